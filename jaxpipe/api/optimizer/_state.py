"""The state of an optimizer, as engines store it and as it is for the user's tree.

The state that an optimizer makes of the user's tree has trees like it, such as moments, and other
arrays, such as a count. Of the former each is stored as parameters are; the latter are on all
devices. All else of the state is as the optimizer made it, so that `state.hyperparams` is found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import DictKey, keystr
from jaxtyping import PyTree

from ...engines import Engine, ParamSpecs, PipelineSpec
from .._params import NumLayers, StoredLayers
from ._parts import PartsByName, named_parts, num_lead_dims, stages_of_names
from ._slots import Slot, UserTree, layer_counts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredState:
    """A tree of an optimizer's state that is like that of the parameters, a pytree.

    Attributes:
        groups: Arrays by name in the groups of engines: "embed", "stages" (as stages of parameters,
            each a dict by name), "head" and, if layers share some, "shared".
        slots: Where each leaf of the user's form is stored.
        structure: The structure of the user's form.
        num_layers: L, or the layers of each kind.
        layer_ids: The layer at every place of stages.
        specs: The specs of arrays that have the shape of a parameter with one of the user's.
    """

    groups: dict[str, Any]
    slots: tuple[Slot, ...] = field(metadata={"static": True})
    structure: Any = field(metadata={"static": True})
    num_layers: NumLayers = field(metadata={"static": True})
    layer_ids: tuple[Any, ...] = field(metadata={"static": True})
    specs: ParamSpecs = field(default=(), metadata={"static": True})


def is_tree_of_state(x: Any) -> bool:
    """Returns whether `x` is a tree of a state that is like that of parameters."""
    return isinstance(x, StoredState)


@dataclass(frozen=True)
class StateNode:
    """A part of a state in the user's form: a tree like that of parameters, or one array.

    Attributes:
        structure: The structure of a tree like that of parameters; None for one array.
        slots: The slots of its leaves; one None for one array.
    """

    structure: Any
    slots: tuple[Slot | None, ...]


@dataclass(frozen=True)
class StateForm:
    """The form of a state.

    Attributes:
        outer: The structure of the state with `nodes` as leaves.
        nodes: Trees like that of parameters, and arrays.
    """

    outer: Any
    nodes: tuple[StateNode, ...]


def state_form(state: PyTree, of_one_layer: PyTree, tree: UserTree) -> StateForm:
    """Returns the form of a state, given its shapes for L layers and for one layer of a stack."""
    nodes, outer = jax.tree.flatten(state, is_leaf=tree.is_like)
    if jax.tree.structure(of_one_layer) != jax.tree.structure(state):
        raise ValueError(_other_state("of one structure", "a model", "of another structure"))
    forms: list[StateNode] = []
    for node, other in zip(nodes, outer.flatten_up_to(of_one_layer), strict=True):
        if not tree.is_like(node):
            forms.append(StateNode(None, (None,)))
            continue
        slots: list[Slot | None] = []
        ones = iter(jax.tree.leaves(other))
        for slot, part in zip(tree.slots, tree.structure.flatten_up_to(node), strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(part):
                one = next(ones)
                named = slot and slot._replace(name=slot.name + keystr(path))
                slots.append(named and _slot_of_state(named, leaf.shape, one.shape))
        _check_alike(slots, jax.tree.leaves(node))
        forms.append(StateNode(jax.tree.structure(node), tuple(slots)))
    return StateForm(outer, tuple(forms))


def _slot_of_state(slot: Slot, shape: tuple[int, ...], of_one_layer: tuple[int, ...]) -> Slot:
    """Returns the slot of an array of a state, given that of its parameter."""
    if slot.dim is None:
        return slot
    if shape == of_one_layer:  # one for all layers
        return Slot("shared", "", f"layers {slot.kind} {slot.name}", -1)
    dims = [i for i, size in enumerate(of_one_layer) if shape[i : i + 1] != (size,)]
    if len(shape) != len(of_one_layer) or len(dims) != 1 or of_one_layer[dims[0]] != 1:
        raise ValueError(
            _other_state(f"of shape {list(shape)}", slot.name, f"of {list(of_one_layer)}")
        )
    return slot._replace(dim=dims[0])


def _other_state(state: str, name: str, of_one_layer: str) -> str:
    return (
        f"The optimizer has a state {state} for the stacked layers of {name}, and {of_one_layer} "
        "for one layer, so it is not known which part belongs to which layer. Give "
        "`params['layers']` as a list of layers."
    )


def _check_alike(slots: Sequence[Slot | None], leaves: Sequence[Any]) -> None:
    """Raises a `ValueError` if layers of a kind differ in what state they have."""
    of_layers: dict[tuple[str, int], dict[str, Any]] = {}
    for slot, leaf in zip(slots, leaves, strict=True):
        if slot is not None and slot.group == "stages" and slot.dim is None:
            of_layers.setdefault((slot.kind, slot.layer), {})[slot.name] = leaf.shape, leaf.dtype
    for (kind, layer), shapes in of_layers.items():
        first = of_layers.get((kind, 0), {})
        if shapes == first:
            continue
        names = sorted(n for n in {*shapes, *first} if shapes.get(n) != first.get(n))
        raise ValueError(
            f"The optimizer has other state for {names[0]} of layer {layer} than for that of layer "
            "0. Layers of one pipeline are updated by one program: give a parameter the same "
            "transformation, mask or label in all layers."
        )


def to_stored(
    form: StateForm,
    leaves: Sequence[Any],
    parts: Sequence[PartsByName],
    layers: StoredLayers,
    groups: Sequence[str],
) -> PyTree:
    """Returns a state as engines store it.

    It has the leaves of no layer, in order, and for each node the parts of its layers. `layers` are
    those of the parameters, and `groups` their groups besides "stages"; a state may have "shared"
    too.
    """
    rest = iter(leaves)
    nodes: list[Any] = []
    for node, of_layers in zip(form.nodes, parts, strict=True):
        if node.structure is None:
            nodes.append(next(rest))
            continue
        by_group: dict[str, Any] = {name: {} for name in groups}
        for slot in node.slots:
            assert slot is not None
            if slot.group != "stages":
                by_group.setdefault(slot.group, {})[slot.name] = next(rest)
        by_group["stages"] = stages_of_names(layers.stages, layers.num_layers, of_layers)
        slots: Any = node.slots
        nodes.append(
            StoredState(by_group, slots, node.structure, layers.num_layers, layers.layer_ids)
        )
    return form.outer.unflatten(nodes)


def from_stored(state: PyTree, array_of: Callable[[StoredState, Slot], Any]) -> PyTree:
    """Returns a state in the user's form, with `array_of(node, slot)` for slots of layers."""

    def whole(node: Any) -> Any:
        if not is_tree_of_state(node):
            return node
        leaves = [
            array_of(node, slot) if slot.group == "stages" else node.groups[slot.group][slot.name]
            for slot in node.slots
        ]
        return node.structure.unflatten(leaves)

    return jax.tree.map(whole, state, is_leaf=is_tree_of_state)


def node_values(node: Any) -> tuple[list[Any], PartsByName]:
    """Returns the arrays of a node that are of no layer, in order of the user's form, and parts."""
    if not is_tree_of_state(node):
        return [node], {}
    values = [node.groups[s.group][s.name] for s in node.slots if s.group != "stages"]
    return values, named_parts(node.groups["stages"], node.num_layers)


def specs_of_state(specs: ParamSpecs, params: Mapping[Slot, Any], node: StoredState) -> ParamSpecs:
    """Returns the specs, by path, of the arrays of a node that have the shape of their parameter.

    `params` has the shape of each parameter by its slot, of one layer for layers.
    """
    table = dict(specs)
    specs_by_path: list[tuple[str, Any]] = []
    first = {slot: leaf for slot, leaf in _first_leaves(node) if slot in params}
    for slot, leaf in first.items():
        groups = (slot.group, slot.kind) if slot.kind else (slot.group,)
        spec = table.get(keystr(tuple(map(DictKey, groups))) + slot.name)
        if spec is not None and leaf.shape == params[slot].shape:
            specs_by_path.append((keystr(tuple(map(DictKey, (*groups, slot.name)))), spec))
    return tuple(specs_by_path)


def _first_leaves(node: StoredState) -> list[tuple[Slot, Any]]:
    """Returns the arrays of groups and of layer 0 of a node, as shapes."""
    parts = named_parts(node.groups["stages"], node.num_layers)
    lead = num_lead_dims(node.groups["stages"])
    leaves: list[tuple[Slot, Any]] = []
    for slot in node.slots:
        if slot.group != "stages":
            leaves.append((slot, node.groups[slot.group][slot.name]))
        elif slot.layer <= 0:
            stack = parts[slot.kind, slot.name][0]
            leaves.append((slot, jax.ShapeDtypeStruct(stack.shape[lead:], stack.dtype)))
    return leaves


def unshard_state(engine: Engine, spec_of: Callable[[Any], PipelineSpec], state: PyTree) -> PyTree:
    """Returns a stored state, whole on every device, as it is for the user's tree."""

    def gather(node: Any) -> Any:
        if not is_tree_of_state(node):
            return engine.storage.gather(spec_of(node), node)
        groups = engine.storage.gather(spec_of(node), node.groups)
        return replace(
            node,
            groups=groups | {"stages": engine.storage.unstack(spec_of(node), groups["stages"])},
        )

    def array(node: StoredState, slot: Slot) -> Any:
        stages = node.groups["stages"]
        stack = (stages[slot.kind] if slot.kind else stages)[slot.name]
        return stack[slot.layer] if slot.dim is None else jnp.moveaxis(stack, 0, slot.dim)

    return from_stored(jax.tree.map(gather, state, is_leaf=is_tree_of_state), array)


def shard_state(
    engine: Engine,
    spec_of: Callable[[Any], PipelineSpec],
    state: PyTree,
    like: PyTree,
    tied: bool,
) -> PyTree:
    """Stores the state that an optimizer has for the user's tree."""
    nodes, outer = jax.tree.flatten(like, is_leaf=is_tree_of_state)

    def stored(node: Any, part: Any) -> Any:
        if not is_tree_of_state(node):  # such as the number of steps
            return jax.device_put(part, node.sharding) if _has_values(node) else part
        return _stored_node(engine, spec_of(node), node, node.structure.flatten_up_to(part), tied)

    return outer.unflatten(map(stored, nodes, outer.flatten_up_to(state)))


def _has_values(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _stored_node(
    engine: Engine, spec: PipelineSpec, node: StoredState, leaves: list[Any], tied: bool
) -> StoredState:
    groups: dict[str, Any] = {name: {} for name in node.groups}
    layers: dict[str, dict[str, list[Any]]] = {kind: {} for kind in layer_counts(node.num_layers)}
    for slot, leaf in zip(node.slots, map(jnp.asarray, leaves), strict=True):
        if slot.group != "stages":
            groups[slot.group][slot.name] = leaf
        else:  # one layer, or all layers in front
            some = leaf[None] if slot.dim is None else jnp.moveaxis(leaf, slot.dim, 0)
            layers[slot.kind].setdefault(slot.name, []).append(some)
    stacks = {
        kind: {name: jnp.concatenate(arrays) for name, arrays in by_name.items()}
        for kind, by_name in layers.items()
    }
    stages = stacks[""] if isinstance(node.num_layers, int) else stacks
    groups["stages"] = engine.storage.stack(spec, stages)
    spec = replace(spec, param_specs=node.specs)
    return replace(node, groups=engine.storage.put(spec, groups, tied))
