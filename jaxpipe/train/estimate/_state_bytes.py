"""The bytes of an optimizer's state for each parameter, from its shapes."""

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ...models.weights import is_weight, num_parameters, weight_shapes
from ...planner import StateBytes
from ..optim._router_bias import drop_router_biases
from ..plan._optimizer import optimizer_of, user_tree_of
from ..plan._state_plan import OptimizerPlan
from ..step._optimizer_state import in_groups, is_weight_tree


def state_bytes(weights: dict[str, Any], plan: OptimizerPlan) -> tuple[StateBytes, StateBytes]:
    """Returns the bytes of the state for a layer, and for embedding and head."""
    tree = user_tree_of(weights, 1, plan)
    state = jax.eval_shape(optimizer_of(plan, tree).init, weight_shapes(tree))

    def one(x: Any, _: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    groups = in_groups(tree, np.zeros(1, int), state, one)
    nodes = [x for x in jax.tree.leaves(groups, is_leaf=is_weight_tree) if is_weight_tree(x)]
    layer, ends = (
        drop_router_biases(weights["layer"]),
        {name: tree[name] for name in ("embed", "head")},
    )
    return (
        _sum(layer, [node["stages"] for node in nodes]),
        _sum(ends, [{name: node[name] for name in ends} for node in nodes]),
    )


def _sum(weights: PyTree, states: list[PyTree]) -> StateBytes:
    like_weights = whole = 0

    def count(weight: Any, leaves: PyTree) -> None:
        nonlocal like_weights, whole
        for leaf in jax.tree.leaves(leaves):
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            if leaf.shape == weight.shape:
                like_weights += size
            else:
                whole += size

    for state in states:
        jax.tree.map(count, weights, state, is_leaf=is_weight)
    return StateBytes(like_weights / num_parameters(weights), float(whole))
