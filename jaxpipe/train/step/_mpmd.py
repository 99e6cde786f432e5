"""The train step of the engine `mpmd`: a state per stage, and a step that ranks run as programs.

Every rank holds the weights and moments of its own stages, and of the embedding or head that it
reads.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ... import mpmd, schedules
from ...models.weights import weight_shapes
from ...mpmd import api as mpmd_api
from ...mpmd import profiling
from ..plan._optimizer import make_optimizer
from ..plan._setup import StepPlan
from ..plan._weight_plan import StatePlan, WeightPlan
from ._one_program import make_eval, make_value_and_grad
from ._optimizer_state import init_optimizer_state, reads_weights
from ._optimizer_step import make_optimizer_step
from ._per_stage_state import mpmd_mesh
from ._state import TrainState, init_boundary, init_layers, state_shapes, state_shardings


def make_mpmd_train_step(
    plan: StepPlan,
) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Any]]]:
    """Builds the step; its programs are compiled at its first call."""
    return lambda state, batch: compiled_mpmd_train_step(plan)(state, batch)


def make_mpmd_eval_step(plan: StepPlan) -> Callable[[PyTree, PyTree], dict[str, Any]]:
    """Builds the evaluation of one batch; its programs are compiled at its first call."""
    weights_plan = plan.state.weights

    @cache
    def compiled() -> mpmd.Compiled:
        return mpmd.mpmd_jit_with_loop(
            make_eval(plan),
            mpmd_mesh(weights_plan),
            in_shardings=(state_shardings(plan)["weights"], plan.batch.shardings),
            out_shardings=_replicated_sharding(weights_plan),
            compiler_options=dict(plan.pipeline.compiler_options or ()),
            timeout=plan.state.config.mpmd_timeout_seconds,
        ).compile(weight_shapes(weights_plan.abstract), plan.batch.shapes)

    return lambda weights, batch: compiled()(weights, batch)


def trace_mpmd_train_step(
    plan: StepPlan, state: TrainState, batch: PyTree
) -> tuple[TrainState, dict[str, Any], str]:
    """Runs a step, and returns its trace, beside what its schedule predicts, as Perfetto's JSON.

    The metrics also have the bubbles of both timelines as shares of the loop.
    """
    (state, metrics), timelines = profiling.trace_step(compiled_mpmd_train_step(plan), state, batch)
    bubbles = {
        f"bubble_{name}": schedules.bubble_fraction(line) for name, line in timelines.items()
    }
    return state, metrics | bubbles, schedules.to_perfetto(timelines, microseconds=1e6)


def init_mpmd_state(plan: StepPlan) -> TrainState:
    """Initializes weights, optimizer state and step 0; no device holds more than its own part."""
    shardings, shapes = mpmd_state_shardings(plan), state_shapes(plan.state)
    make = partial(_init_state_of_rank, plan.state, shardings["weights"]["stages"])
    return mpmd_api.init_on_ranks(make, shapes, shardings)


def _init_state_of_rank(plan: StatePlan, shardings: list[PyTree], rank: int) -> TrainState:
    """Initializes a state; stages on other ranks alone, which take long to trace, are shapes."""
    weights, seed, optimizer = plan.weights, plan.config.init_weights_seed, make_optimizer(plan)
    stages = list(state_shapes(plan)["weights"]["stages"])
    needs_all = reads_weights(plan, optimizer)
    for i, layer_ids in enumerate(weights.layout.stage_layer_ids):
        if needs_all or any(rank in leaf.mpmd_idxs for leaf in jax.tree.leaves(shardings[i])):
            stages[i] = init_layers(weights, seed, (len(layer_ids),), layer_ids=layer_ids)
    groups = init_boundary(weights, seed) | {"stages": stages}
    state = init_optimizer_state(plan, optimizer, groups)
    return {"weights": groups, "optimizer": state, "step": jnp.int32(0)}


def mpmd_state_shardings(plan: StepPlan) -> PyTree[mpmd.MpmdSharding]:
    """Returns the ranks that hold each leaf of a state, and how it is sharded on them."""
    mesh = mpmd_mesh(plan.state.weights)
    shardings, tree = jax.tree.flatten(state_shardings(plan))
    # A scalar that no rank reads, such as a flag of the optimizer dog, is stored on all ranks.
    every_rank = tuple(range(mesh.mpmd_dim))
    inputs = lower_train_step(plan).program.inputs[: len(shardings)]
    mpmd_shardings = [
        mpmd.MpmdSharding(mesh, ranks or every_rank, sharding.spec)
        for (_, ranks), sharding in zip(inputs, shardings, strict=True)
    ]
    return tree.unflatten(mpmd_shardings)


@lru_cache(maxsize=1)
def compiled_mpmd_train_step(plan: StepPlan) -> mpmd.Compiled:
    """Compiles the step, with the name of every action in profiles."""
    return profiling.annotated(lower_train_step(plan).compile())


# The state's shardings, its initial values and the step all need this program, and lowering takes
# a while.
@lru_cache(maxsize=1)
def lower_train_step(plan: StepPlan) -> mpmd.Lowered:
    """Lowers the step on all ranks."""
    weights = plan.state.weights
    shardings = state_shardings(plan)
    step = mpmd.mpmd_jit_with_loop(
        make_optimizer_step(plan, make_value_and_grad(plan)),
        mpmd_mesh(weights),
        in_shardings=(shardings, plan.batch.shardings),
        out_shardings=(shardings, _replicated_sharding(weights)),
        donate_argnums=0,
        compiler_options=dict(plan.pipeline.compiler_options or ()),
        timeout=plan.state.config.mpmd_timeout_seconds,
    )
    return step.lower(state_shapes(plan.state), plan.batch.shapes)


def _replicated_sharding(weights: WeightPlan) -> mpmd.MpmdSharding:
    """Returns the sharding of metrics: on all ranks, since every process reads them."""
    mesh = mpmd_mesh(weights)
    return mpmd.MpmdSharding(mesh, tuple(range(mesh.mpmd_dim)), PartitionSpec())
