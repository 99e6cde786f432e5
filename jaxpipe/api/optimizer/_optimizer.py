"""An optimizer that sees the user's tree, whatever an engine stores.

`update` of the optimizer is traced on the user's tree, with all L layers, as shapes. What it does
to each layer alike runs once on stored layers: see `jaxpipe.ir.symmetry`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...engines import Engine
from ...engines._engine import PipelinePlan
from ...ir.symmetry import LayerSlot, lift
from .._frozen import partition
from .._kinds import unstack_all
from .._model import Model
from .._params import NumLayers, StoredLayers
from ._parts import PartsByName, layer_ids, num_lead_dims, parts_by_name, stages_like
from ._slots import Slot, UserTree, layer_counts, slots_of_groups, user_tree
from ._state import (
    StateForm,
    StoredState,
    from_stored,
    is_tree_of_state,
    node_values,
    specs_of_state,
    state_form,
    to_stored,
)


@dataclass(frozen=True)
class StoredTree:
    """Stored trainable parameters, and the user's tree that they are of.

    Attributes:
        params: The parameters.
        plan: What the engine is told.
        groups: The groups of the user's tree, as shapes, with lists of layers.
        slots: The slot of each leaf of `groups`.
        tree: The user's tree.
    """

    params: dict[str, Any]
    plan: PipelinePlan
    groups: dict[str, PyTree]
    slots: list[Slot]
    tree: UserTree

    @property
    def layers(self) -> StoredLayers:
        """The stored layers."""
        return self.params["layers"]

    @property
    def num_layers(self) -> NumLayers:
        """L, or the layers of each kind."""
        return self.layers.num_layers


@dataclass(frozen=True)
class _Argument:
    """An argument or a result of the traced function.

    Attributes:
        shapes: The tree that the optimizer is given, as shapes.
        slots: For each leaf which array of which layer it is; None: of no layer.
        values: The leaves of no layer, in order.
        parts: The arrays [lead, ...] of all layers, by kind and name.
    """

    shapes: PyTree
    slots: list[LayerSlot | None]
    values: list[Any]
    parts: PartsByName


@dataclass(frozen=True)
class LiftedOptimizer:
    """An optimizer of the user's tree for stored parameters.

    Attributes:
        tx: The optimizer.
        model: The model.
        engine: The engine.
        plan_of: From stored parameters to what the engine is told.
    """

    tx: Any
    model: Model
    engine: Engine
    plan_of: Callable[[dict[str, Any]], PipelinePlan]

    def init(self, params: dict[str, Any]) -> PyTree:
        """Returns the first state for stored parameters. It is called in a traced function."""
        stored = stored_tree(self.model, self.engine, self.plan_of(params), params)

        def init(groups: PyTree) -> tuple[PyTree, PyTree]:
            return (), self.tx.init(self.model.from_groups(groups))

        _, state = self._run(init, stored, [_of_params("parameters ", stored, stored.params)])
        return jax.tree.map(partial(self._placed, stored), state, is_leaf=is_tree_of_state)

    def update(
        self, grads: dict[str, Any], state: PyTree, params: dict[str, Any] | None, extra: PyTree
    ) -> tuple[dict[str, Any], PyTree]:
        """Returns (updates like trainable parameters, the new state), in a traced function."""
        given = grads if params is None else params
        stored = stored_tree(self.model, self.engine, self.plan_of(given), given)
        arguments = [
            _of_params("gradients ", stored, grads),
            _of_state(stored, state),
            _Argument(_shapes(extra), [None] * len(jax.tree.leaves(extra)), _leaves(extra), {}),
        ]
        if params is not None:
            arguments.append(_of_params("parameters ", stored, stored.params))

        def update(grads: PyTree, state: PyTree, extra: Any, *groups: PyTree) -> Any:
            user = [self.model.from_groups(tree) for tree in (grads, *groups)]
            updates, state = self.tx.update(user[0], state, *user[1:], **extra)
            return self.model.to_groups(updates), state

        return self._run(update, stored, arguments)

    def shapes(self, params: dict[str, Any]) -> PyTree:
        """Returns the shapes of the first state, with the shardings of arrays like parameters."""
        stored = stored_tree(self.model, self.engine, self.plan_of(params), params)

        def with_shardings(node: Any) -> Any:
            if not is_tree_of_state(node):
                return node
            plan = plan_of_node(stored, node)
            where = self.engine.shardings(plan, node.groups, self.model.tied)
            groups = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), node.groups, where
            )
            return replace(node, groups=groups)

        return jax.tree.map(
            with_shardings, jax.eval_shape(self.init, params), is_leaf=is_tree_of_state
        )

    def _placed(self, stored: StoredTree, node: Any) -> Any:
        """Returns a part of a first state where the parameters are that it is for."""
        if not is_tree_of_state(node):
            return self.engine.gather(stored.plan, node)
        like = {name: stored.params[name] for name in node.groups if name != "stages"}
        like["stages"] = stored.layers.stages
        plan = plan_of_node(stored, node)
        return replace(node, groups=self.engine.place(plan, node.groups, like, self.model.tied))

    def _run(
        self, function: Callable, stored: StoredTree, arguments: Sequence[_Argument]
    ) -> tuple[Any, PyTree]:
        """Runs `(*arguments) -> (groups of updates or (), state)` of the user's tree."""
        flat, structure = jax.tree.flatten([a.shapes for a in arguments])

        def of_leaves(*leaves: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):  # optax multiplies integers and floats
                return function(*structure.unflatten(leaves))

        closed, (groups, state) = jax.make_jaxpr(of_leaves, return_shape=True)(*flat)
        form = state_form(state, stored.tree)
        out_slots = [] if groups == () else _layer_slots("updates ", stored.slots)
        of_state = _slots_of_nodes(form)
        in_slots = [slot for a in arguments for slot in a.slots]
        counts = layer_counts(stored.num_layers)
        lifted = lift(closed, in_slots, [*out_slots, *of_state], counts)
        values, parts = lifted(
            [value for a in arguments for value in a.values],
            {name: p for a in arguments for name, p in a.parts.items()},
            layer_ids(self.engine, stored.plan, stored.num_layers),
            partial(self.engine.gather, stored.plan),
        )
        split = out_slots.count(None)
        updates = () if groups == () else _updates(stored, groups, values[:split], parts)
        return updates, _stored_state(stored, form, values[split:], parts)


def stored_tree(
    model: Model, engine: Engine, plan: PipelinePlan, params: dict[str, Any]
) -> StoredTree:
    """Returns stored parameters with the user's tree that they are of."""
    params = partition(params)[0]
    layers = params["layers"]

    def to_groups(params: dict[str, Any]) -> dict[str, PyTree]:
        layers = params["layers"]
        stack = engine.unstack(plan, layers.stages)
        return params | {"layers": unstack_all(stack, layers.num_layers, layers.in_list)}

    groups = jax.eval_shape(to_groups, _shapes(params))
    tree = user_tree(model.from_groups, groups, layers.num_layers)
    return StoredTree(params, plan, groups, slots_of_groups(groups, layers.num_layers), tree)


def _shapes(tree: PyTree) -> PyTree:
    def shape(x: Any) -> jax.ShapeDtypeStruct:
        aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    return jax.tree.map(shape, tree)


def _leaves(tree: PyTree) -> list[Any]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _layer_slots(prefix: str, slots: Sequence[Slot | None]) -> list[LayerSlot | None]:
    """Returns which array of which layer leaves are, with a name that no other argument has."""
    return [
        LayerSlot(slot.kind, prefix + slot.name, slot.layer)
        if slot is not None and slot.group == "stages"
        else None
        for slot in slots
    ]


def _of_params(prefix: str, stored: StoredTree, params: dict[str, Any]) -> _Argument:
    """Returns parameters or gradients as an argument."""
    layers = params["layers"]
    others = [leaf for name in sorted(params) if name != "layers" for leaf in _leaves(params[name])]
    parts = parts_by_name(layers.stages, layers.num_layers)
    dtypes = {name: arrays[0].dtype for name, arrays in parts.items()}
    flat, structure = jax.tree.flatten(stored.groups)
    dtype_of = iter([x.dtype for x in others])
    shapes = [
        jax.ShapeDtypeStruct(
            leaf.shape,
            dtypes[slot.kind, slot.name] if slot.group == "stages" else next(dtype_of),
        )
        for leaf, slot in zip(flat, stored.slots, strict=True)
    ]
    named = {(kind, prefix + name): arrays for (kind, name), arrays in parts.items()}
    return _Argument(structure.unflatten(shapes), _layer_slots(prefix, stored.slots), others, named)


def _prefix(node: int) -> str:
    return f"state[{node}] "


def _of_state(stored: StoredTree, state: PyTree) -> _Argument:
    """Returns a stored state as an argument."""
    nodes = jax.tree.leaves(state, is_leaf=is_tree_of_state)
    slots: list[LayerSlot | None] = []
    values: list[Any] = []
    parts: dict[tuple[str, str], tuple[Any, ...]] = {}
    for i, node in enumerate(nodes):
        slots += _layer_slots(_prefix(i), node.slots) if is_tree_of_state(node) else [None]
        of_node, of_layers = node_values(node)
        values += of_node
        parts |= {(kind, _prefix(i) + name): p for (kind, name), p in of_layers.items()}

    def one_layer(node: StoredState, name: tuple[str, str]) -> dict[int, Any]:
        stack = node_values(node)[1][name][0]
        lead = num_lead_dims(node.groups["stages"])
        shape = jax.ShapeDtypeStruct(stack.shape[lead:], stack.dtype)
        return dict.fromkeys(range(layer_counts(stored.num_layers)[name[0]]), shape)

    whole = from_stored(state, one_layer)
    return _Argument(_shapes(whole), slots, values, parts)


def _slots_of_nodes(form: StateForm) -> list[LayerSlot | None]:
    slots: list[LayerSlot | None] = []
    for i, node in enumerate(form.nodes):
        slots += _layer_slots(_prefix(i), node.slots)
    return slots


def _updates(
    stored: StoredTree, groups: PyTree, values: Sequence[Any], parts: PartsByName
) -> dict[str, Any]:
    """Returns updates like trainable parameters, from those of the groups of the user's tree."""
    rest = iter(values)
    updates: dict[str, Any] = {}
    for name in sorted(groups):
        if name == "layers":
            prefix = "updates "
            named = {(k, n.removeprefix(prefix)): p for (k, n), p in parts.items() if prefix in n}
            stages = stages_like(stored.layers.stages, stored.num_layers, named)
            updates[name] = replace(stored.layers, stages=stages)
        else:
            updates[name] = jax.tree.map(lambda _: next(rest), groups[name])
    return {name: updates[name] for name in stored.params}


def _stored_state(
    stored: StoredTree, form: StateForm, values: Sequence[Any], parts: PartsByName
) -> PyTree:
    by_node: list[PartsByName] = [
        {
            (kind, name.removeprefix(_prefix(i))): arrays
            for (kind, name), arrays in parts.items()
            if name.startswith(_prefix(i))
        }
        for i in range(len(form.nodes))
    ]
    others = [name for name in stored.params if name != "layers"]
    layers = stored.layers
    return to_stored(
        form, values, by_node, layers.stages, layers.num_layers, layers.layer_ids, others
    )


def plan_of_node(stored: StoredTree, node: StoredState) -> PipelinePlan:
    """Returns what the engine is told of arrays of a state: the specs of their parameters."""
    leaves = zip(stored.slots, jax.tree.leaves(stored.groups), strict=True)
    shapes = {slot: leaf for slot, leaf in leaves if slot.layer <= 0}
    return replace(stored.plan, param_specs=specs_of_state(stored.layers.specs, shapes, node))
