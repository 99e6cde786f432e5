"""Compiles the train step without a state or a batch, also for devices that are not present."""

from typing import Any

import jax
from jaxtyping import PyTree

from ...engines import Engine
from ..plan._devices import BatchPlan
from ..plan._setup import StepPlan
from ._state import TrainState, state_shapes, state_shardings
from ._step import make_train_step


def compile_train_step(plan: StepPlan) -> jax.stages.Compiled:
    """Lowers and compiles the step that `train` runs; no array is allocated.

    Args:
        plan: The step. Its devices may be those of a topology description.

    Returns:
        The compiled step, with `memory_analysis()`, `cost_analysis()` and `as_text()`.

    Raises:
        ValueError: If the step is not one program.
    """
    check_single_program(plan.engine)
    # Built outside of the mesh's context: constants computed on the way need a device that exists.
    step: Any = make_train_step(plan)
    arguments = abstract_state(plan), abstract_batch(plan.batch)
    with jax.set_mesh(plan.pipeline.mesh):
        return step.lower(*arguments).compile()


def check_single_program(engine: Engine) -> None:
    """Checks that the step of an engine is one program, not one for every rank."""
    if engine.program_per_rank:
        raise ValueError(
            f"`pipeline_engine` is {engine.config_name!r}, whose step is many programs, and what "
            "is compiled ahead is one. Give `pipeline_engine=scheduled`, which runs the same "
            "schedules."
        )


def abstract_state(plan: StepPlan) -> TrainState:
    """Returns the train state as `jax.ShapeDtypeStruct` with a sharding for every leaf."""
    return jax.tree.map(_with_sharding, state_shapes(plan.state), state_shardings(plan))


def abstract_batch(plan: BatchPlan) -> PyTree:
    """Returns a batch as `jax.ShapeDtypeStruct` [A * M, b, T], each with a sharding."""
    return jax.tree.map(_with_sharding, plan.shapes, plan.shardings)


def _with_sharding(
    leaf: jax.ShapeDtypeStruct, where: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
