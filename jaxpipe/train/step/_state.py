"""The abstract train state: shapes, logical axes and shardings, and its optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ... import models
from ...engines import PipelinePlan
from ...engines.fsdp import over_data
from ...models.weights import weight_shapes
from ..optim._decay import exclude_from_decay
from ..optim._optimizer import adamw, weight_decay_mask
from ..optim._router_bias import drop_router_biases
from ..plan._setup import StepPlan
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


def state_shardings(plan: StepPlan) -> TrainState:
    """Returns a sharding for every leaf of a train state, in one program or in that of a rank."""
    replicated = NamedSharding(plan.pipe.mesh, PartitionSpec())
    shapes = state_shapes(plan.state)
    moments = drop_router_biases(gradient_shardings(plan))
    optimizer = optax.tree_utils.tree_map_params(
        make_optimizer(plan.state),
        lambda _, of_weight: of_weight,
        shapes["optimizer"],
        moments,
        transform_non_params=lambda _: replicated,
    )
    weights = _shardings(plan, plan.pipeline)
    return {"weights": weights, "optimizer": optimizer, "step": replicated}


def gradient_shardings(plan: StepPlan) -> PyTree[NamedSharding]:
    """Returns a sharding for every gradient: that of the weight's moments."""
    return _shardings(plan, of_gradients(plan))


def of_gradients(plan: StepPlan) -> PipelinePlan:
    """Returns what the engine is told of gradients, which ZeRO-1 divides over `data` too."""
    return over_data(plan.pipeline, plan.groups)


def _shardings(plan: StepPlan, pipeline: PipelinePlan) -> PyTree[NamedSharding]:
    weights, mesh = plan.groups, plan.pipe.mesh
    where = plan.engine.shardings(pipeline, weights, plan.state.weights.tied)
    where = {name: where[name] for name in ("embed", "stages", "head")}
    return jax.tree.map(lambda sharding: NamedSharding(mesh, sharding.spec), where)
