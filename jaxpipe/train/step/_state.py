"""The train state: its shapes, logical axes and shardings, and its first weights.

Keys of weights are folded from the number of a layer, so runs are equal in every layout.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ... import models
from ...engines import PipelineSpec
from ...engines.fsdp import over_data
from ...models.weights import weight_shapes
from ...sharding import LogicalAxes
from ..optim._router_bias import drop_router_biases
from ..plan._optimizer import make_optimizer
from ..plan._setup import StepPlan
from ..plan._weight_plan import STACK_AXES, StatePlan, WeightPlan
from ._optimizer_state import of_weights, optimizer_state_shapes

TrainState = dict[str, Any]
"""`weights`, `optimizer` (its state) and `step`, the number of steps done."""


def state_shapes(plan: StatePlan) -> TrainState:
    """Returns a `jax.ShapeDtypeStruct` for every leaf of a train state."""
    optimizer = optimizer_state_shapes(plan, make_optimizer(plan))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    weights = weight_shapes(plan.weights.abstract)
    return {"weights": weights, "optimizer": optimizer, "step": step}


def state_logical_axes(plan: StatePlan) -> TrainState:
    """Returns the logical axes of every leaf; moments have those of their weights."""
    trained = drop_router_biases(plan.weights.abstract)
    stack = ("layers",) if plan.weights.per_stage else STACK_AXES

    def others(leaf: Any, group: str | None) -> LogicalAxes:
        lead = stack if group == "stages" else ()
        return (*lead, *[None] * (len(leaf.shape) - len(lead)))

    shapes = state_shapes(plan)["optimizer"]
    optimizer = of_weights(trained, models.logical_axes(trained), shapes, others)
    axes = models.logical_axes(plan.weights.abstract)
    return {"weights": axes, "optimizer": optimizer, "step": ()}


def state_shardings(plan: StepPlan) -> TrainState:
    """Returns a sharding for every leaf of a train state, in one program or in that of a rank."""
    mesh = plan.pipe.mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    in_ranks = PartitionSpec() if plan.engine.program_per_rank else PartitionSpec(None, "stage")

    def others(leaf: Any, group: str | None) -> NamedSharding:
        return NamedSharding(mesh, in_ranks) if group == "stages" else replicated

    trained = drop_router_biases(plan.state.weights.abstract)
    moments = drop_router_biases(gradient_shardings(plan))
    shapes = state_shapes(plan.state)["optimizer"]
    optimizer = of_weights(trained, moments, shapes, others)
    return {
        "weights": _shardings(plan, plan.pipeline),
        "optimizer": optimizer,
        "step": replicated,
    }


def gradient_shardings(plan: StepPlan) -> PyTree[NamedSharding]:
    """Returns a sharding for every gradient: that of the weight's moments."""
    return _shardings(plan, of_gradients(plan))


def of_gradients(plan: StepPlan) -> PipelineSpec:
    """Returns the specification of gradients, which ZeRO-1 divides over `data` too."""
    return over_data(plan.pipeline, plan.groups)


def _shardings(plan: StepPlan, pipeline: PipelineSpec) -> PyTree[NamedSharding]:
    weights, mesh = plan.groups, plan.pipe.mesh
    where = plan.engine.storage.shardings(pipeline, weights, plan.state.weights.tied)
    where = {name: where[name] for name in ("embed", "stages", "head")}
    return jax.tree.map(lambda sharding: NamedSharding(mesh, sharding.spec), where)


def init_boundary(weights: WeightPlan, seed: int) -> dict[str, Any]:
    """Initializes the weights of `embed` and `head`, with those of layers after the pipeline."""
    tree, key = weights.abstract_unstacked, jax.random.key(seed)
    boundary = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    if weights.num_layers_after:
        after, first = (weights.num_layers_after,), weights.layout.num_layers
        layers = models.initialize_layers(tree["layer"], key, after, first=first)
        boundary["head"]["layers"] = layers
    return boundary


def init_layers(
    weights: WeightPlan, seed: int, dims: Sequence[int], *, layer_ids: Sequence[int]
) -> PyTree[Array]:
    """Initializes weights [*dims, ...] of layers by their ids; those of padding, -1, are zeros."""
    layer = weights.abstract_unstacked["layer"]
    return models.initialize_layers(layer, jax.random.key(seed), dims, layer_ids=layer_ids)
