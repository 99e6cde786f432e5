"""Compiles the train step and reports what the compiler says of it, without its devices."""

import time

import jax

from ... import schedules
from ...xla.compile_report import CompileReport, report_compiled
from ..estimate._step_metrics import step_work
from ..optim._factories import treats_arrays_as_wholes
from ..plan._setup import StepPlan
from ._aot import compile_train_step


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
