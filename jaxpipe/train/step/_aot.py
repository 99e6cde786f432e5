"""Compiles the train step without a state or a batch, also for devices that are not present."""

from typing import Any

import jax

from ...engines import Engine
from ..plan._setup import StepPlan
from ._state import state_shapes, state_shardings
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
    arguments = (
        jax.tree.map(_with_sharding, state_shapes(plan.state), state_shardings(plan)),
        jax.tree.map(_with_sharding, plan.batch.shapes, plan.batch.shardings),
    )
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


def _with_sharding(
    leaf: jax.ShapeDtypeStruct, where: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
