"""The optimizer of a run, and the tree of weights that it sees.

That is the tree of a user, {"embed", "layers", "head"}. Layers are a list, in which each weight is
an array of its own, for optimizers that compute with whole arrays. For all others they are stacked,
[L, ...], and the time of tracing does not grow with L.
"""

from functools import partial
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from ...models.weights import Weight, is_weight, stack_weights, weight_shapes
from ..config._config import Config
from ..optim._decay import exclude_from_decay
from ..optim._factories import build_optimizer, refused_by_name, treats_arrays_as_wholes
from ..optim._optimizer import learning_rate_schedule
from ..optim._router_bias import drop_router_biases
from ._weight_plan import STACK_AXES, StatePlan

Groups = dict[str, Any]


def user_tree(plan: StatePlan) -> Groups:
    """Returns the abstract weights that the optimizer of a run sees, without router biases."""
    weights = plan.weights
    num_layers = weights.layout.num_layers
    return user_tree_of(weights.abstract_unstacked, num_layers, plan.config.optimizer)


def user_tree_of(tree: Groups, num_layers: int, optimizer: str) -> Groups:
    """Returns the tree that an optimizer sees of abstract weights of embed, a `layer` and head."""
    tree = drop_router_biases(tree)
    if treats_arrays_as_wholes(optimizer):
        layers: Any = [tree["layer"]] * num_layers
    else:
        layers = stack_weights(tree["layer"], (num_layers,), ("layers",))
    return {"embed": tree["embed"], "layers": layers, "head": tree["head"]}


def layer_of(tree: Groups) -> PyTree:
    """Returns the abstract weights of the layers of a tree from `user_tree`: of one, or stacked."""
    return tree["layers"][0] if isinstance(tree["layers"], list) else tree["layers"]


def make_optimizer(plan: StatePlan) -> optax.GradientTransformation:
    """Builds the optimizer of a run, for the tree of `user_tree`."""
    return optimizer_of(plan.config, user_tree(plan))


def optimizer_of(config: Config, tree: dict[str, Any]) -> optax.GradientTransformation:
    """Builds an optimizer for the abstract weights that it sees.

    Biases and scales of norms do not decay, nor do weights that the config excludes.
    """
    # Weights are named by their groups: `stages.attention.query`.
    groups = {name: tree[name] for name in ("embed", "head")} | {"stages": layer_of(tree)}

    def is_matrix(weight: Weight) -> bool:
        own_axes = [axis for axis in weight.axes if axis not in STACK_AXES]
        return not weight.is_bias and len(own_axes) >= 2

    decays = exclude_from_decay(
        jax.tree.map(is_matrix, groups, is_leaf=is_weight), config.weight_decay_exclude
    )
    dimensions = jax.tree.map(lambda _: False, groups, is_leaf=is_weight)
    for name in ("embed", "head"):
        if "layers" in groups[name]:
            dimensions[name]["layers"] = _matrices(groups[name]["layers"])
    dimensions["stages"] = _matrices(groups["stages"])

    def like_tree(groups: PyTree) -> PyTree:
        in_list, layers = isinstance(tree["layers"], list), groups["stages"]
        layers = [layers] * len(tree["layers"]) if in_list else layers
        return {"embed": groups["embed"], "layers": layers, "head": groups["head"]}

    return build_optimizer(
        config.optimizer,
        dict(config.optimizer_arguments),
        partial(learning_rate, config),
        adam={"b1": config.adam_b1, "b2": config.adam_b2, "eps": config.adam_eps},
        weight_decay=config.adam_weight_decay,
        decays=like_tree(decays),
        dimensions=like_tree(dimensions),
    )


def learning_rate(
    config: Config, peak: float | None = None, num_steps: int | None = None
) -> optax.Schedule:
    """Returns the learning rate of every step of a run, or of one with this peak or number."""
    return learning_rate_schedule(
        config.learning_rate if peak is None else peak,
        num_steps=config.num_schedule_steps if num_steps is None else num_steps,
        warmup_fraction=config.warmup_steps_fraction,
        final_fraction=config.learning_rate_final_fraction,
        shape=config.learning_rate_schedule,
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
    config = plan.config
    with refused_by_name(config.optimizer, dict(config.optimizer_arguments), "run"):
        state = jax.eval_shape(optimizer.init, shapes)
        jax.eval_shape(optimizer.update, shapes, state, shapes)
