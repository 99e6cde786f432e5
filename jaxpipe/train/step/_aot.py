"""Compiles the train step without a state or a batch, also for absent devices, and reports it."""

import time
from typing import Any

import jax

from ... import schedules
from ...engines import Engine
from ...xla.compile_report import CompileReport, report_compiled
from ..estimate._step_metrics import step_work
from ..optim._factories import treats_arrays_as_wholes
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


def report_train_step(plan: StepPlan) -> tuple[CompileReport, str]:
    """Compiles the step that `train` runs."""
    work = step_work(plan.state.weights, plan.batch)
    for attention in plan.model.attentions:
        attention.check_compiles()
    started = time.perf_counter()
    try:
        compiled = compile_train_step(plan)
    except jax.errors.JaxRuntimeError as error:
        if _exceeds_memory(error):
            first = str(error).splitlines()[0]
            raise ValueError(does_not_fit(f"XLA says: {first}\n")) from error
        raise
    except ValueError as error:
        if treats_arrays_as_wholes(plan.state.config.optimizer):
            raise  # what is done to layers is known when an update is traced
        # `set_up` has checked everything else that a user can get wrong.
        raise RuntimeError("The train step cannot be compiled.") from error
    seconds = time.perf_counter() - started
    hlo_text = compiled.as_text() or ""
    report = report_compiled(
        *(compiled, hlo_text, plan.pipeline.mesh, seconds, _bubble(plan)),
        model_flops=work.flops,
        tokens=work.num_tokens,
    )
    return report, hlo_text


def does_not_fit(reason: str) -> str:
    """Returns the error of a step that needs more memory than its devices have."""
    return (
        f"The step does not fit into the devices' memory: {reason} Spread weights over more "
        "devices (`ici_fsdp_parallelism`), or make `per_device_batch_size` smaller."
    )


def _bubble(plan: StepPlan) -> float:
    """Returns the share of the pipeline's time in which a device waits, by the schedule."""
    timeline = plan.predicted_timeline
    return 0.0 if timeline is None else schedules.bubble_fraction(timeline)


def _exceeds_memory(error: Exception) -> bool:
    """Returns whether XLA finds that the step does not fit into the memory of a device."""
    first = str(error).splitlines()[0]
    return "RESOURCE_EXHAUSTED" in first and "Shared memory" not in first  # a kernel's on a GPU
