"""Takes the state of an optimizer from the user's tree to stored parameters, and back."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...engines import Engine
from ...engines._engine import PipelinePlan
from .._model import Model
from ._optimizer import StoredTree, plan_of_node
from ._parts import named_parts
from ._slots import by_name
from ._state import StoredState, from_stored, is_tree_of_state, state_form, to_stored


def unshard_state(
    engine: Engine, plan_of: Callable[[StoredState], PipelinePlan], state: PyTree
) -> PyTree:
    """Returns a stored state as the optimizer has it for the user's tree.

    Args:
        engine: The engine.
        plan_of: From a tree of the state to what the engine is told.
        state: The stored state.

    Returns:
        The state, whole on every device; for `mpmd` on the first device.
    """

    def gather(node: Any) -> Any:
        if not is_tree_of_state(node):
            return engine.gather(plan_of(node), node)
        plan = plan_of(node)
        groups = engine.gather(plan, node.groups)
        stack = engine.unstack(plan, groups["stages"])
        return replace(node, groups=groups | {"stages": stack})

    def layer(node: StoredState, name: tuple[str, str]) -> Mapping[int, Any]:
        kind, array = name
        stack = node.groups["stages"][kind][array] if kind else node.groups["stages"][array]
        return {i: stack[i] for i in range(stack.shape[0])}

    return from_stored(jax.tree.map(gather, state, is_leaf=is_tree_of_state), layer)


def shard_state(model: Model, engine: Engine, stored: StoredTree, state: PyTree) -> PyTree:
    """Stores the state that an optimizer has for the user's tree.

    Args:
        model: The model.
        engine: The engine.
        stored: Shapes of the stored parameters that it is for.
        state: The state.

    Returns:
        The state, on the devices that hold the parameters.

    Raises:
        ValueError: If a parameter has state and the same parameter of another layer has not.
    """
    form = state_form(state, stored.tree)
    values: list[Any] = []
    stacks: list[dict[tuple[str, str], Any]] = []
    for node, leaves in zip(form.nodes, form.per_node(jax.tree.leaves(state)), strict=True):
        slots = [slot for slot in node.slots if slot is not None]
        layers = by_name(slots, leaves) if slots else {}
        stacks.append({n: jnp.stack([d[i] for i in sorted(d)]) for n, d in layers.items()})
        pairs = zip(node.slots, leaves, strict=True)
        values += [leaf for slot, leaf in pairs if slot is None or slot.group != "stages"]

    def stage_parts(stack: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
        kinds: dict[str, Any] = {}
        for (kind, name), leaf in stack.items():
            kinds.setdefault(kind, {})[name] = leaf
        if isinstance(stored.num_layers, int):
            stages = engine.stack(stored.plan, kinds.get("", {}))
        else:
            named = {kind: kinds.get(kind, {}) for kind, _ in stored.num_layers}
            stages = engine.stack(stored.plan, named)
        return named_parts(stages, stored.num_layers)

    layers, others = stored.layers, [name for name in stored.params if name != "layers"]
    parts = [stage_parts(stack) for stack in stacks]
    made = to_stored(
        form, values, parts, layers.stages, layers.num_layers, layers.layer_ids, others
    )

    def put(node: Any) -> Any:
        if not is_tree_of_state(node):
            return node
        plan = plan_of_node(stored, node)
        return replace(node, groups=engine.put(plan, node.groups, model.tied))

    return jax.tree.map(put, made, is_leaf=is_tree_of_state)
