"""Returns an optimizer of optax that sees the user's tree, whatever an engine stores.

`update` of the optimizer is traced on the user's tree, with all L layers, as shapes. What it does
to each layer alike runs once on stored layers: see `jaxpipe.ir.symmetry`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._compat import ClosedJaxpr
from ..._input import clause
from ...engines import Engine, PipelineSpec
from ...engines.fsdp import over_data
from ...sharding.specs import with_auto_axes
from .._frozen import partition
from .._kinds import unstack_all
from .._model import Model
from .._params import PARAMETERS, NumLayers, StoredLayers, weights_of
from .._pieces import with_sharding
from ._parts import PartsByName, layer_ids, num_lead_dims, parts_by_name, stages_like
from ._run import Argument, Results, is_of_layers, run_of_lists, run_of_stacks
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


class Optimizer(Protocol):
    """An optimizer as those of optax are."""

    @property
    def init(self) -> Callable[[PyTree], PyTree]: ...
    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]: ...


class Transformation(NamedTuple):
    """An optimizer as those of optax are, for stored parameters.

    Attributes:
        init: `params -> state`, of stored parameters or their trainable part.
        update: `(grads, state, params=None, **extra) -> (updates, state)`.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


def transformation(
    tx: Optimizer,
    model: Model,
    engine: Engine,
    spec_of: Callable[[dict[str, Any]], PipelineSpec],
    jit: Callable[[Callable], Callable],
) -> Any:
    """Returns an optimizer for stored parameters, of the class of the user's optimizer."""
    lifted = LiftedOptimizer(tx, model, engine, spec_of)
    run_init, run_update = traced(jit, lifted.init), traced(jit, lifted.update)

    def init(params: PyTree) -> PyTree:
        leaves = jax.tree.leaves(params)
        is_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        return (lifted.shapes if is_shapes else run_init)(params)

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        for name, value in extra.items():
            if callable(value):
                raise ValueError(
                    f"`update` is given the function `{name}`, as line searches need one. They "
                    "compute the loss inside of an update, which a pipeline cannot do: give an "
                    "optimizer of gradients alone."
                )
        return run_update(grads, state, params, extra)

    if isinstance(tx, tuple):  # of a class of optax, which may take extra arguments
        of_optax: Any = tx
        return of_optax._replace(init=init, update=update)
    return Transformation(init, update)


def traced(jit: Callable[[Callable], Callable], function: Callable) -> Callable:
    """Returns a function that is compiled where it is called outside of a compiled function."""
    compiled = jit(function)

    def run(*arguments: PyTree) -> Any:
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments))
        return (function if is_traced else compiled)(*arguments)

    return run


def state_shapes(
    tx: Optimizer, model: Model, engine: Engine, spec: PipelineSpec, params: dict[str, Any]
) -> PyTree:
    """Returns the shapes of the first state for stored parameters, with shardings."""
    return LiftedOptimizer(tx, model, engine, lambda params: spec).shapes(params)


@dataclass(frozen=True)
class StoredTree:
    """Stored trainable parameters, and the user's tree that they are of.

    Attributes:
        spec: The specification that the engine is given.
        groups: The groups of the user's tree, as shapes.
        slots: The slot of each leaf of `groups`.
        in_list: Whether layers are lists of trees; otherwise they are trees of leaves [L, ...].
    """

    params: dict[str, Any]
    spec: PipelineSpec
    groups: dict[str, PyTree]
    slots: list[Slot]
    tree: UserTree
    in_list: bool

    @property
    def layers(self) -> StoredLayers:
        """Returns the stored layers."""
        return self.params["layers"]

    @property
    def num_layers(self) -> NumLayers:
        """L, or the layers of each kind."""
        return self.layers.num_layers


@dataclass(frozen=True)
class LiftedOptimizer:
    """An optimizer of the user's tree for stored parameters.

    Attributes:
        spec_of: From stored parameters to what the engine is told.
    """

    tx: Any
    model: Model
    engine: Engine
    spec_of: Callable[[dict[str, Any]], PipelineSpec]

    def init(self, params: dict[str, Any]) -> PyTree:
        """Returns the first state for stored parameters. It is called in a traced function."""
        stored = stored_tree(self.model, self.engine, self.spec_of(params), params)

        def init(groups: PyTree) -> tuple[PyTree, PyTree]:
            return (), self.tx.init(self.model.from_groups(groups))

        _, state = self._run(init, stored, [_of_params("parameters ", stored, stored.params)])
        return jax.tree.map(partial(self._placed, stored), state, is_leaf=is_tree_of_state)

    def update(
        self, grads: dict[str, Any], state: PyTree, params: dict[str, Any] | None, extra: PyTree
    ) -> tuple[dict[str, Any], PyTree]:
        """Returns (updates like trainable parameters, the new state), in a traced function."""
        like = grads if params is None else params
        stored = stored_tree(self.model, self.engine, self.spec_of(like), like)
        arguments = [
            _of_params("gradients ", stored, grads),
            _of_state(stored, state),
            _argument(_shapes(extra), [None] * len(jax.tree.leaves(extra)), _leaves(extra), {}),
        ]
        if params is not None:
            arguments.append(_of_params("parameters ", stored, stored.params))

        def update(grads: PyTree, state: PyTree, extra: Any, *groups: PyTree) -> Any:
            user = [self.model.from_groups(tree) for tree in (grads, *groups)]
            updates, state = self.tx.update(user[0], state, *user[1:], **extra)
            return self.model.to_groups(updates), state

        updates, state = self._run(update, stored, arguments)
        if not stored.spec.options.zero1:
            return updates, state
        # Each device has its part of the updates, and gathers the others'.
        groups = weights_of(updates)
        groups = self.engine.storage.put_like(stored.spec, groups, groups, self.model.tied)
        layers = replace(updates["layers"], stages=groups["stages"])
        updates = {name: groups[name] for name in updates if name != "layers"} | {"layers": layers}
        return updates, jax.tree.map(
            lambda node: self._placed(stored, node) if is_tree_of_state(node) else node,
            state,
            is_leaf=is_tree_of_state,
        )

    def shapes(self, params: dict[str, Any]) -> PyTree:
        """Returns the shapes of the first state, in one program with the shardings of its arrays.

        Programs of ranks have those of arrays like parameters alone.
        """
        stored = stored_tree(self.model, self.engine, self.spec_of(params), params)
        return self._with_shardings(stored, jax.eval_shape(self.init, params))

    def _with_shardings(self, stored: StoredTree, state: PyTree) -> PyTree:
        """Returns the shapes of a state with the shardings of its arrays, as `shapes` does."""

        def of_node(node: Any) -> Any:
            if not is_tree_of_state(node):
                is_whole = not self.engine.program_per_rank
                everywhere = NamedSharding(stored.spec.mesh, PartitionSpec())
                return with_sharding(node, everywhere) if is_whole else node
            where = self.engine.storage.shardings(
                _spec_of(stored, node), node.groups, self.model.tied
            )
            return replace(node, groups=jax.tree.map(with_sharding, node.groups, where))

        return jax.tree.map(of_node, state, is_leaf=is_tree_of_state)

    def _placed(self, stored: StoredTree, node: Any) -> Any:
        """Returns a part of a first state where the parameters are that it is for."""
        if not is_tree_of_state(node):
            return self.engine.storage.gather(stored.spec, node)
        like = stored.params | {"stages": stored.layers.stages}
        spec, tied = _spec_of(stored, node), self.model.tied
        return replace(node, groups=self.engine.storage.put_like(spec, node.groups, like, tied))

    def _run(
        self, function: Callable, stored: StoredTree, arguments: Sequence[Argument]
    ) -> tuple[Any, PyTree]:
        """Runs `(*arguments) -> (groups of updates or (), state)` of the user's tree."""
        closed, (groups, state) = _trace(function, [a.shapes for a in arguments])
        if stored.in_list:
            one, of_one = closed, state
        else:
            try:
                one, (_, of_one) = _trace(function, [a.of_one_layer for a in arguments])
            except Exception as error:
                raise ValueError(
                    "The optimizer cannot be traced for one layer, which shows what it does to "
                    f"each of a stack: {clause(error)}. Give `params['layers']` as a list of "
                    "layers."
                ) from error
        form = state_form(state, of_one, stored.tree)
        run = partial(self._run_traced, stored, closed, one, form, groups)
        mesh = stored.spec.mesh
        if self.engine.program_per_rank or AxisType.Explicit not in mesh.axis_types:
            return run(partial(self.engine.storage.gather, stored.spec), arguments)
        return self._with_automatic_axes(stored, run, arguments)

    def _with_automatic_axes(
        self, stored: StoredTree, run: Callable, arguments: Sequence[Argument]
    ) -> tuple[Any, PyTree]:
        """Runs an optimizer as on a mesh whose axes are automatic; its results have explicit ones.

        Optimizers such as `optax.contrib.muon` do not say how what they compute is divided.
        """

        def of_arrays(replicate: Callable, arrays: Any) -> Any:
            pairs = zip(arguments, arrays, strict=True)
            return run(replicate, [replace(a, values=x, parts=parts) for a, (x, parts) in pairs])

        arrays = [(a.values, a.parts) for a in arguments]
        updates, state = jax.eval_shape(partial(of_arrays, lambda x: x), _shapes(arrays))
        state = self._with_shardings(stored, state)
        if updates != ():
            weights = weights_of(updates)
            where = self.engine.storage.shardings(stored.spec, weights, self.model.tied)
            stages = replace(updates["layers"], stages=where["stages"])
            updates = {name: where[name] for name in updates if name != "layers"}
            updates |= {"layers": stages}
        where = jax.tree.map(lambda x: getattr(x, "sharding", x), (updates, state))
        specs = jax.tree.map(lambda sharding: sharding.spec, where)
        constrain = jax.lax.with_sharding_constraint

        def constrained(arrays: Any) -> Any:  # over axes that are automatic outside, too
            results = of_arrays(partial(constrain, shardings=PartitionSpec()), arrays)
            return jax.tree.map(constrain, results, specs)

        return with_auto_axes(stored.spec.mesh, constrained, where)(arrays)

    def _run_traced(
        self,
        stored: StoredTree,
        closed: ClosedJaxpr,
        one: ClosedJaxpr,
        form: Any,
        groups: Any,
        replicate: Callable[[Any], Any],
        arguments: Sequence[Argument],
    ) -> tuple[Any, PyTree]:
        """Runs the program of the user's tree; `one` is that of one layer of stacks."""
        slots = [*([] if groups == () else _named("updates ", stored.slots)), *_slots_of(form)]
        ids = layer_ids(self.engine, stored.spec, stored.num_layers)
        if stored.in_list:
            counts = layer_counts(stored.num_layers)
            results = run_of_lists(closed, arguments, slots, counts, ids, replicate)
        else:
            results = run_of_stacks(closed, one, arguments, slots, ids, replicate)
        if groups == ():
            return (), _stored_state(stored, form, results)
        count = sum(not is_of_layers(slot) for slot in stored.slots)
        updates = _updates(stored, groups, replace(results, values=results.values[:count]))
        rest = replace(results, values=results.values[count:])
        return updates, _stored_state(stored, form, rest)


def _spec_of(stored: StoredTree, node: StoredState) -> PipelineSpec:
    """Returns the spec for arrays of a state."""
    return over_data(replace(stored.spec, param_specs=node.specs), node.groups)


def stored_tree(
    model: Model, engine: Engine, spec: PipelineSpec, params: dict[str, Any]
) -> StoredTree:
    """Returns stored parameters, arrays or shapes, with the user's tree that they are of."""
    params = partition(params)[0]
    layers = params["layers"]
    in_list = {layers.in_list} if isinstance(layers.in_list, bool) else {*layers.in_list}
    if len(in_list) > 1:
        raise ValueError(
            "`params['layers']` has lists of layers and leaves [L, ...]. For an optimizer all "
            "kinds must be alike: give lists."
        )

    def to_groups(params: dict[str, Any]) -> dict[str, PyTree]:
        layers = params["layers"]
        stack = engine.storage.unstack(spec, layers.stages)
        return params | {"layers": unstack_all(stack, layers.num_layers, layers.in_list)}

    groups = jax.eval_shape(to_groups, _shapes(params))
    (is_list,) = in_list
    slots = slots_of_groups(groups, layers.num_layers, is_list)
    tree = user_tree(model.from_groups, groups, slots)
    return StoredTree(
        params=params, spec=spec, groups=groups, slots=slots, tree=tree, in_list=is_list
    )


def _trace(function: Callable, arguments: PyTree) -> tuple[ClosedJaxpr, Any]:
    """Returns the program of a function of trees, and the shapes of its results."""
    flat, structure = jax.tree.flatten(arguments)

    def of_leaves(*leaves: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies integers and floats
            return function(*structure.unflatten(leaves))

    # The caller's explicit axes would be in the types of all results.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(of_leaves, return_shape=True)(*flat)


def _shapes(tree: PyTree) -> PyTree:
    def shape(x: Any) -> jax.ShapeDtypeStruct:
        aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    return jax.tree.map(shape, tree)


def _of_one_layer(slot: Slot | None, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if slot is None or slot.dim is None:
        return shape
    one = *shape.shape[: slot.dim], 1, *shape.shape[slot.dim + 1 :]
    return jax.ShapeDtypeStruct(one, shape.dtype, weak_type=shape.weak_type)


def _leaves(tree: PyTree) -> list[Any]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _named(prefix: str, slots: Sequence[Slot | None]) -> list[Slot | None]:
    """Returns slots with names that no other argument has."""
    return [slot and slot._replace(name=prefix + slot.name) for slot in slots]


def _argument(
    shapes: PyTree, slots: list[Slot | None], values: list[Any], parts: PartsByName
) -> Argument:
    leaves, structure = jax.tree.flatten(shapes)
    return Argument(
        shapes, structure.unflatten(map(_of_one_layer, slots, leaves)), slots, values, parts
    )


def _of_params(prefix: str, stored: StoredTree, params: dict[str, Any]) -> Argument:
    """Returns parameters or gradients as an argument."""
    layers = params["layers"]
    others = [leaf for name in sorted(params) if name != "layers" for leaf in _leaves(params[name])]
    parts = parts_by_name(layers.stages, layers.num_layers)
    flat, structure = jax.tree.flatten(stored.groups)
    before = [leaf for leaf, s in zip(flat, stored.slots, strict=True) if not is_of_layers(s)]
    dtypes = iter([x.dtype for x in others])
    assert len(before) == len(others)
    shapes = [
        jax.ShapeDtypeStruct(
            leaf.shape,
            parts[slot.kind, slot.name][0].dtype if is_of_layers(slot) else next(dtypes),
        )
        for leaf, slot in zip(flat, stored.slots, strict=True)
    ]
    named = {(kind, prefix + name): arrays for (kind, name), arrays in parts.items()}
    return _argument(structure.unflatten(shapes), _named(prefix, stored.slots), others, named)


def _prefix(node: int) -> str:
    return f"state[{node}] "


def _of_state(stored: StoredTree, state: PyTree) -> Argument:
    """Returns a stored state as an argument."""
    slots: list[Slot | None] = []
    values: list[Any] = []
    parts: dict[tuple[str, str], tuple[Any, ...]] = {}
    for i, node in enumerate(jax.tree.leaves(state, is_leaf=is_tree_of_state)):
        slots += _named(_prefix(i), node.slots) if is_tree_of_state(node) else [None]
        of_node, of_layers = node_values(node)
        values += of_node
        parts |= {(kind, _prefix(i) + name): p for (kind, name), p in of_layers.items()}
    counts = layer_counts(stored.num_layers)

    def shape(node: StoredState, slot: Slot) -> jax.ShapeDtypeStruct:
        stack = node_values(node)[1][slot.kind, slot.name][0]
        dims = list(stack.shape[num_lead_dims(node.groups["stages"]) :])
        if slot.dim is not None:
            dims.insert(slot.dim, counts[slot.kind])
        return jax.ShapeDtypeStruct(tuple(dims), stack.dtype)

    return _argument(_shapes(from_stored(state, shape)), slots, values, parts)


def _slots_of(form: StateForm) -> list[Slot | None]:
    return [s for i, node in enumerate(form.nodes) for s in _named(_prefix(i), node.slots)]


def _with_prefix(prefix: str, parts: PartsByName) -> PartsByName:
    """Returns the arrays whose names have a prefix, without it."""
    return {
        (kind, name.removeprefix(prefix)): arrays
        for (kind, name), arrays in parts.items()
        if name.startswith(prefix)
    }


def _updates(stored: StoredTree, groups: PyTree, results: Results) -> dict[str, Any]:
    """Returns updates like trainable parameters, from those of the groups of the user's tree."""
    rest = iter(results.values)
    updates: dict[str, Any] = {}
    for name in sorted(groups):
        if name == "layers":
            parts = _with_prefix("updates ", results.parts)
            stages = stages_like(stored.layers.stages, stored.num_layers, parts)
            updates[name] = replace(stored.layers, stages=stages, role=PARAMETERS)
        else:
            updates[name] = jax.tree.map(lambda _: next(rest), groups[name])
    return {name: updates[name] for name in stored.params}


def _stored_state(stored: StoredTree, form: StateForm, results: Results) -> PyTree:
    by_node = [_with_prefix(_prefix(i), results.parts) for i in range(len(form.nodes))]
    others = [name for name in stored.params if name != "layers"]
    layers = stored.layers
    state = to_stored(form, results.values, by_node, layers, others)
    shapes: dict[Slot, Any] = {}
    for slot, leaf in zip(stored.slots, jax.tree.leaves(stored.groups), strict=True):
        if slot.layer <= 0:
            shape = leaf.shape if slot.dim is None else leaf.shape[1:]
            shapes[slot] = jax.ShapeDtypeStruct(shape, leaf.dtype)

    def with_specs(node: Any) -> Any:
        if not is_tree_of_state(node):
            return node
        return replace(node, specs=specs_of_state(layers.specs, shapes, node))

    return jax.tree.map(with_specs, state, is_leaf=is_tree_of_state)
