"""What a compiler says of the program of a plan, beside what is predicted."""

import time
from dataclasses import dataclass
from typing import Any

import jax

from ..xla import compile_only_devices
from ._devices import device_hardware
from ._request import Request
from ._search import Plan

_GB = 1e9


@dataclass(frozen=True, repr=False)
class VerifiedPlan:
    """A plan with the figures of the compiler beside the predicted ones. Prints as a line.

    Attributes:
        plan: The plan that was compiled.
        peak_bytes: The most memory that the program needs on a device.
        step_seconds: Seconds of a step by the compiler's cycles, on GPUs by a roofline of its
            program; None on CPUs.
        busy_seconds: Seconds of them in which a device computes or communicates; likewise.
        compile_seconds: The seconds that setting up and compiling took.
        judge: The origin of `step_seconds`.
    """

    plan: Plan
    peak_bytes: int
    step_seconds: float | None
    busy_seconds: float | None
    compile_seconds: float
    judge: str = "the compiler's cycles"

    def record(self) -> dict[str, Any]:
        """Returns the figures of the compiler as plain data, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "plan"}

    def __repr__(self) -> str:
        predicted, peak = self.plan.memory.total, self.peak_bytes
        time_of_step = ""
        if self.step_seconds is not None:
            time_of_step = (
                f"; {self.plan.time.seconds:.3f} s predicted, {self.step_seconds:.3f} by "
                f"{self.judge}, {self.busy_seconds:.3f} of them busy"
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
    report = request.source.compile(plan.settings, request.batch, devices)
    compiled_time = report.step_time
    return VerifiedPlan(
        plan=plan,
        peak_bytes=report.memory.peak_bytes,
        step_seconds=None if compiled_time is None else compiled_time.seconds,
        busy_seconds=None if compiled_time is None else sum(compiled_time.busy_seconds.values()),
        compile_seconds=time.perf_counter() - started,
        judge="a roofline of its program" if device_hardware(target).is_gpu else VerifiedPlan.judge,
    )
