"""The abstract train state: shapes, logical axes and shardings, and its optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ... import models, sharding
from ...models.weights import weight_shapes
from ..optim._decay import exclude_from_decay
from ..optim._optimizer import adamw, weight_decay_mask
from ..optim._router_bias import drop_router_biases
from ..plan._devices import DeviceLayout
from ..plan._state_plan import StatePlan
from ..plan._weight_plan import WeightPlan

TrainState = dict[str, Any]
"""`weights`, `optimizer` (its state) and `step`, the number of steps done."""


def make_optimizer(plan: StatePlan) -> optax.GradientTransformation:
    """Builds AdamW; scales of norms do not decay, nor do weights that the plan excludes."""
    wanted = plan.optimizer
    mask = weight_decay_mask(
        weight_shapes(abstract_trained_weights(plan.weights)), plan.weights.num_stacked_dims
    )
    return adamw(
        wanted.learning_rate.schedule(),
        b1=wanted.b1,
        b2=wanted.b2,
        eps=wanted.eps,
        weight_decay=wanted.weight_decay,
        decay_mask=exclude_from_decay(mask, wanted.weight_decay_exclude),
    )


def abstract_trained_weights(weights: WeightPlan) -> PyTree:
    """Returns the abstract weights that the optimizer updates: all but router biases."""
    return drop_router_biases(weights.abstract)


def state_shapes(plan: StatePlan) -> TrainState:
    """Returns a `jax.ShapeDtypeStruct` for every leaf of a train state."""
    optimizer = jax.eval_shape(
        make_optimizer(plan).init, weight_shapes(abstract_trained_weights(plan.weights))
    )
    step = jax.ShapeDtypeStruct((), jnp.int32)
    weights = weight_shapes(plan.weights.abstract)
    return {"weights": weights, "optimizer": optimizer, "step": step}


def state_logical_axes(plan: StatePlan) -> TrainState:
    """Returns the logical axes of every leaf; Adam's moments have those of their weights."""
    optimizer = optax.tree_utils.tree_map_params(
        make_optimizer(plan),
        lambda _, of_weight: of_weight,
        state_shapes(plan)["optimizer"],
        models.logical_axes(abstract_trained_weights(plan.weights)),
        transform_non_params=lambda _: (),
    )
    axes = models.logical_axes(plan.weights.abstract)
    return {"weights": axes, "optimizer": optimizer, "step": ()}


def state_shardings(plan: StatePlan) -> TrainState:
    """Returns a sharding for every leaf of a train state, in one program or in that of a rank."""
    shapes, axes = state_shapes(plan), state_logical_axes(plan)
    mesh, rules = plan.weights.devices.mesh, state_rules(plan.weights.devices)
    return {
        name: sharding.named_shardings(shapes[name], axes[name], mesh, rules[name])
        for name in shapes
    }


def state_rules(devices: DeviceLayout) -> dict[str, sharding.Rules]:
    """Returns the logical axis rules of each part of a train state."""
    return {
        "weights": devices.rules,
        "optimizer": devices.optimizer_rules,
        "step": devices.rules,
    }


def gradient_shardings(weights: WeightPlan) -> PyTree:
    """Returns a sharding for every gradient: that of the weight's moments."""
    tree, devices = weights.abstract, weights.devices
    return sharding.named_shardings(
        weight_shapes(tree), models.logical_axes(tree), devices.mesh, devices.optimizer_rules
    )
