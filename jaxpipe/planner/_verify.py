"""What a compiler says of the program of a plan, beside what is predicted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..api import PipelinedModel, pipeline
from ..autodiff import remat_by_name
from ..sharding import make_mesh
from ..train.step import check_single_program, report_train_step
from ..xla import compile_only_devices
from ..xla.compile_report import CompileReport
from ._keys import checked_setup
from ._request import OwnInputs, Request
from ._search import Plan

_GB = 1e9


@dataclass(frozen=True, repr=False)
class VerifiedPlan:
    """A plan with the figures of the compiler beside the predicted ones. Prints as a line.

    Attributes:
        plan: The plan that was compiled.
        peak_bytes: The most memory that the program needs on a device.
        step_seconds: Seconds of a step by the compiler's cycles; None but on TPUs.
        busy_seconds: Seconds of them in which a device computes or communicates; likewise.
        compile_seconds: The seconds that setting up and compiling took.
    """

    plan: Plan
    peak_bytes: int
    step_seconds: float | None
    busy_seconds: float | None
    compile_seconds: float

    def record(self) -> dict[str, Any]:
        """Returns the figures of the compiler as plain data, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "plan"}

    def __repr__(self) -> str:
        predicted, peak = self.plan.memory.total, self.peak_bytes
        time_of_step = ""
        if self.step_seconds is not None:
            time_of_step = (
                f"; {self.plan.time.seconds:.3f} s predicted, {self.step_seconds:.3f} by the "
                f"compiler's cycles, {self.busy_seconds:.3f} of them busy"
            )
        return (
            f"{predicted / _GB:.3f} GB predicted, {peak / _GB:.3f} compiled "
            f"({predicted / peak - 1:+.1%}){time_of_step}; {self.compile_seconds:.0f} s to compile"
        )


def verify(plan: Plan, request: Request) -> VerifiedPlan:
    """Compiles the train step of a plan for its devices, which need not be there.

    Raises:
        ValueError: If the compiler is not installed, or the step is refused.
        RuntimeError: If the step cannot be compiled.
    """
    started, target = time.perf_counter(), request.devices
    devices = jax.devices()
    if not target.are_here:
        devices = compile_only_devices(target.topology, target.num_slices)
    if request.own is None:
        setup = checked_setup(plan.settings, devices)
        check_single_program(setup.step.engine)
        report, _ = report_train_step(setup.step)
    else:
        report = _own_report(plan, request.own, request.batch, devices)
    compiled_time = report.step_time
    return VerifiedPlan(
        plan,
        report.memory.peak_bytes,
        None if compiled_time is None else compiled_time.seconds,
        None if compiled_time is None else sum(compiled_time.busy_seconds.values()),
        time.perf_counter() - started,
    )


def own_pipeline(plan: Plan, own: OwnInputs, devices: Sequence[Any]) -> PipelinedModel:
    """Returns the pipeline of a plan for a model of plain functions.

    Raises:
        ValueError: If `jaxpipe.pipeline` refuses the settings.
    """
    settings: dict[str, Any] = dict(plan.settings)
    return pipeline(
        own.model,  # pyright: ignore[reportArgumentType]
        mesh=make_mesh(settings.pop("mesh"), devices=devices),
        remat=remat_by_name(settings.pop("remat")),
        **settings,
    )


def _own_report(plan: Plan, own: OwnInputs, num_rows: int, devices: Sequence[Any]) -> CompileReport:
    """Compiles a train step with AdamW of a model of plain functions."""
    import optax

    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), own.example
    )
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own.params)
    return own_pipeline(plan, own, devices).compile(params, batch, optimizer=optax.adamw(1e-3))
