"""The answer of a planner: the best plans as a table, as JSON and as the settings of a run.

A plan that was compiled has the compiler's figures beside those that are predicted.
"""

import json
import time
from dataclasses import dataclass, fields
from typing import Any

import jax

from ..api import PipelinedModel
from ..engines import PeakMemory
from ..xla import compile_only_devices
from ..xla.compile_report import align
from ._devices import device_hardware
from ._reasons import (
    attention_words,
    binding,
    describe,
    plain_words,
    refused_words,
    rests_on,
    runner_up,
)
from ._request import Request
from ._search import BestPlans, Plan

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


@dataclass(frozen=True, repr=False)
class Plans:
    """The fastest plans that fit. Prints as a table.

    The first is the simplest of those that are predicted within 5% of the fastest; the others
    follow by their time.

    Attributes:
        request: The model and the devices that they are for.
        best_plans: The plans, and the number of layouts that were compared.
        seconds: The time that the planner took.
    """

    request: Request
    best_plans: BestPlans
    seconds: float

    @property
    def best(self) -> Plan:
        """Returns the first plan: the simplest of those that are nearly as fast as any."""
        return self.best_plans.plans[0]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Returns the plans, the first as `best` says, the others by their time."""
        return self.best_plans.plans

    def yaml(self, index: int = 0) -> str:
        """Returns the settings of a run by a plan, for `jaxpipe train`.

        Raises:
            ValueError: If the model is not the trainer's.
        """
        if self.request.source.is_own:
            raise ValueError(
                "The model is your own, which the trainer does not have. `pipeline` returns the "
                "pipeline of a plan."
            )
        plan, devices = self.plans[index], self.request.devices
        lines = [
            f"# {self.request.model.name} on {devices.name}, planned by `jaxpipe plan`: "
            f"{plan.time.seconds:.3g} s a step and",
            f"# {plan.memory.total / _GB:.3g} GB of {self.request.limit / _GB:.3g} on a device.",
        ]
        values = plan.settings.items()
        lines += [f"{key}: {json.dumps(value)}" for key, value in values]
        return "\n".join(lines) + "\n"

    def pipeline(self, index: int = 0) -> PipelinedModel:
        """Returns the pipeline of a plan, on the first of `jax.devices()`.

        As many devices are taken as the plan has, of whatever kind: a plan for GPUs can be tried on
        emulated CPUs.

        Returns:
            What `jaxpipe.pipeline` returns for the `settings` of the plan.

        Raises:
            IndexError: If there are fewer plans.
            ValueError: If the model is the trainer's, too few devices are here, or
                `jaxpipe.pipeline` refuses the settings.
        """
        target, devices = self.request.devices, jax.devices()
        if len(devices) < target.num_devices:
            raise ValueError(
                f"The plan is for {target.name}, {target.num_devices} devices, and {len(devices)} "
                "are here. Plan for 'here', or run where these devices are."
            )
        mine = devices[: target.num_devices]
        return self.request.source.pipeline(self.plans[index].settings, mine)

    def verify(self, index: int = 0) -> VerifiedPlan:
        """Compiles the train step of a plan, which may take minutes; no device is needed.

        A model of your own is trained with AdamW of optax.

        Returns:
            What is predicted beside what the compiler says, which prints as a line.

        Raises:
            ValueError: If the compiler of the devices is not installed, or refuses the step.
            RuntimeError: If the step cannot be compiled.
        """
        started, request, plan = time.perf_counter(), self.request, self.plans[index]
        target, devices = request.devices, jax.devices()
        if not target.are_here:
            devices = compile_only_devices(target.topology, target.num_slices)
        report = request.source.compile(plan.settings, request.batch, devices)
        timed = report.step_time
        return VerifiedPlan(
            plan=plan,
            peak_bytes=report.memory.peak_bytes,
            step_seconds=None if timed is None else timed.seconds,
            busy_seconds=None if timed is None else sum(timed.busy_seconds.values()),
            compile_seconds=time.perf_counter() - started,
            judge="a roofline of its program"
            if device_hardware(target).is_gpu
            else VerifiedPlan.judge,
        )

    def record(self) -> dict[str, Any]:
        """Returns the plans as plain data, for JSON."""
        request = self.request
        return {
            "model": request.model.name,
            "devices": request.devices.name,
            "num_devices": request.devices.num_devices,
            "batch": request.batch,
            "sequence": request.sequence,
            "limit_bytes": request.limit,
            "num_candidates": self.best_plans.num_candidates,
            "seconds": self.seconds,
            "binds": binding(request, self.best_plans),
            "attention": attention_words(self.best),
            "runner_up": runner_up(self.best_plans),
            "plain": plain_words(request, self.best_plans),
            "rests_on": rests_on(request, self.best),
            "refused": [
                {
                    "layout": describe(layout.candidate),
                    "rough_seconds": layout.seconds,
                    "error": layout.error,
                }
                for layout in self.best_plans.refused
            ],
            "plans": [_plan_record(plan) for plan in self.plans],
        }

    def __repr__(self) -> str:
        request, devices = self.request, self.request.devices
        parameters = request.work.parameters
        count = f"{parameters / 1e9:.3g} billion" if parameters >= 1e7 else f"{parameters:,.0f}"
        slices = f" x {devices.num_slices} slices" if devices.num_slices > 1 else ""
        lines = [
            f"{request.model.name}, {count} parameters, on "
            f"{devices.name}{slices}: {devices.num_devices} devices of "
            f"{devices.memory_bytes / _GB:.1f} GB, of which {request.limit / _GB:.1f} may be used",
            f"{request.batch:,} sequences of {request.sequence:,} tokens a step; "
            f"{self.best_plans.num_candidates:,} layouts compared in {self.seconds:.1f} s",
            "",
            *_time_table(self.plans),
            "",
            *_memory_table(self.plans, request.limit),
            "",
            f"What binds: {binding(request, self.best_plans)}",
        ]
        more = {
            "Attention": attention_words(self.best),
            "Why not 2": runner_up(self.best_plans),
            "Without any of it": plain_words(request, self.best_plans),
            "Refused": refused_words(request, self.best_plans),
            "What it rests on": rests_on(request, self.best),
        }
        return "\n".join([*lines, *(f"{head}: {text}" for head, text in more.items() if text)])


def _plan_record(plan: Plan) -> dict[str, Any]:
    time = plan.time
    return {
        "settings": plan.settings,
        "step_seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "bubble_fraction": time.bubble_fraction,
        "exposed_seconds": time.exposed,
        "seconds_by_kind": time.parts,
        "memory_bytes": vars(plan.memory) | {"total": plan.memory.total},
    }


def _time_table(plans: tuple[Plan, ...]) -> list[str]:
    small = max(plan.time.seconds for plan in plans) < 0.1
    name, unit = ("ms", 1e-3) if small else ("s", 1.0)
    rows = [("", "layout", f"step {name}", "tokens/s", "MFU", "bubble", f"exposed {name}")]
    rows += [
        (
            str(index + 1),
            describe(plan.candidate),
            f"{plan.time.seconds / unit:.3f}",
            f"{plan.time.tokens_per_second:,.0f}",
            f"{plan.time.mfu:.1%}",
            f"{plan.time.bubble_fraction:.1%}",
            ", ".join(f"{k} {v:.2f}" for k, v in _largest_first(plan.time.exposed, unit)) or "0",
        )
        for index, plan in enumerate(plans)
    ]
    return align(rows, left=(1, 6))


def _largest_first(parts: dict[str, float], unit: float) -> list[tuple[str, float]]:
    shown = [(name.replace("_", " "), seconds / unit) for name, seconds in parts.items()]
    return sorted((pair for pair in shown if pair[1] >= 0.005), key=lambda pair: -pair[1])


def _memory_table(plans: tuple[Plan, ...], limit: float) -> list[str]:
    kinds = [kind.name for kind in fields(PeakMemory)]
    name, unit = unit_of_bytes(max(plan.memory.total for plan in plans))
    rows = [(name, *kinds, "sum", f"of {limit / unit:,.1f}")]
    rows += [
        (
            str(index + 1),
            *(f"{getattr(plan.memory, kind) / unit:.2f}" for kind in kinds),
            f"{plan.memory.total / unit:.2f}",
            f"{plan.memory.total / limit:.0%}",
        )
        for index, plan in enumerate(plans)
    ]
    return align(rows, left=())


def unit_of_bytes(largest: float) -> tuple[str, float]:
    """Returns the unit in which memory is printed, and its bytes.

    Returns:
        "MB" if that is less than a tenth of a GB, else "GB".
    """
    return ("MB", 1e6) if largest < 0.1 * _GB else ("GB", _GB)
