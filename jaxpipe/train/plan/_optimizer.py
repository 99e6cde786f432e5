"""The optimizer of a run, and the tree of weights that it sees.

That is the tree of a user, {"embed", "layers", "head"}. Layers are a list, in which each weight is
an array of its own, for optimizers that compute with whole arrays. For all others they are stacked,
[L, ...], and the time of tracing does not grow with L.
"""

from dataclasses import replace
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from ...models.weights import Weight, is_weight, stack_weights, weight_shapes
from ..optim._decay import exclude_from_decay
from ..optim._factories import (
    WeightTraits,
    build_optimizer,
    refused_by_name,
    treats_arrays_as_wholes,
)
from ..optim._router_bias import drop_router_biases
from ._state_plan import OptimizerPlan, StatePlan
from ._weight_plan import STACK_AXES

Groups = dict[str, Any]


def user_tree(plan: StatePlan) -> Groups:
    """Returns the abstract weights that the optimizer of a run sees, without router biases."""
    weights = plan.weights
    return user_tree_of(weights.abstract_unstacked, weights.layout.num_layers, plan.optimizer)


def user_tree_of(tree: Groups, num_layers: int, optimizer: OptimizerPlan) -> Groups:
    """Returns the tree that an optimizer sees of abstract weights of embed, a `layer` and head."""
    tree = drop_router_biases(tree)
    if treats_arrays_as_wholes(optimizer.keys.name):
        layers: Any = [tree["layer"]] * num_layers
    else:
        layers = stack_weights(tree["layer"], (num_layers,), ("layers",))
    return {"embed": tree["embed"], "layers": layers, "head": tree["head"]}


def layer_of(tree: Groups) -> PyTree:
    """Returns the abstract weights of the layers of a tree from `user_tree`: of one, or stacked."""
    return tree["layers"][0] if isinstance(tree["layers"], list) else tree["layers"]


def make_optimizer(plan: StatePlan) -> optax.GradientTransformation:
    """Builds the optimizer of a run, for the tree of `user_tree`."""
    return optimizer_of(plan.optimizer, user_tree(plan))


def optimizer_of(wanted: OptimizerPlan, tree: dict[str, Any]) -> optax.GradientTransformation:
    """Builds an optimizer for the abstract weights that it sees.

    Biases and scales of norms do not decay, nor do weights that the plan excludes.
    """
    # Weights are named by their groups: `stages.attention.query`.
    groups = {name: tree[name] for name in ("embed", "head")} | {"stages": layer_of(tree)}

    def is_matrix(weight: Weight) -> bool:
        own_axes = [axis for axis in weight.axes if axis not in STACK_AXES]
        return not weight.is_bias and len(own_axes) >= 2

    decays = exclude_from_decay(
        jax.tree.map(is_matrix, groups, is_leaf=is_weight), wanted.weight_decay_exclude
    )
    of_layers = {"embed": groups["embed"].get("layers"), "head": groups["head"].get("layers")}
    dimensions = jax.tree.map(lambda _: False, groups, is_leaf=is_weight)
    for name, layers in of_layers.items():
        if layers is not None:
            dimensions[name]["layers"] = _matrices(layers)
    dimensions["stages"] = _matrices(groups["stages"])

    def like_tree(groups: PyTree) -> PyTree:
        in_list, layers = isinstance(tree["layers"], list), groups["stages"]
        layers = [layers] * len(tree["layers"]) if in_list else layers
        return {"embed": groups["embed"], "layers": layers, "head": groups["head"]}

    def schedule_of(peak: float | None) -> optax.Schedule:
        rate = wanted.learning_rate
        return (rate if peak is None else replace(rate, peak=peak)).schedule()

    return build_optimizer(
        wanted.keys, schedule_of, WeightTraits(like_tree(decays), like_tree(dimensions))
    )


def _matrices(layer: PyTree) -> PyTree:
    """Returns the dims of each matrix of layers that are its rows and columns, False for others.

    Dims of layers and of experts are neither: each has a matrix of its own. Heads and their
    channels are one side of a matrix.
    """

    def dimensions(weight: Weight) -> optax.contrib.MuonDimensionNumbers | bool:
        apart = (*STACK_AXES, "exp")
        dims = [i for i, axis in enumerate(weight.axes) if axis not in apart]
        if weight.is_bias or len(dims) < 2:
            return False
        count = len(dims) - 1 if weight.axes[-1] == "embed" else 1  # dims that a product sums over
        return optax.contrib.MuonDimensionNumbers(tuple(dims[:count]), tuple(dims[count:]))

    return jax.tree.map(dimensions, layer, is_leaf=is_weight)


def check_optimizer(plan: StatePlan) -> None:
    """Checks that the optimizer of a run can be built, and has updates for its weights."""
    optimizer, shapes = make_optimizer(plan), weight_shapes(user_tree(plan))
    with refused_by_name(plan.optimizer.keys, "run"):
        state = jax.eval_shape(optimizer.init, shapes)
        jax.eval_shape(optimizer.update, shapes, state, shapes)
