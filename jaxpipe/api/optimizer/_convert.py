"""Takes the state of an optimizer from the user's tree to stored parameters, and back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import PyTree

from ...engines import Engine, PipelineSpec
from ._slots import Slot, layer_counts
from ._state import StoredState, from_stored, is_tree_of_state


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
