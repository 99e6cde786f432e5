"""Ends a run before its last step: after a signal, or when its time is up."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from ._multihost import any_process, max_over_processes

ShouldStop = Callable[[int], bool]
"""From a step to whether the run ends after it. Collective: called after every step."""


class RunError(RuntimeError):
    """Error of a run that ends early for a reason that needs no traceback."""


class TerminatedError(RunError):
    """A signal has ended the run, after a checkpoint of its last step if they are enabled."""

    def __init__(self, signum: int, step: int) -> None:
        self.signal = signal.Signals(signum)
        super().__init__(f"{self.signal.name} has ended the run after step {step}.")


class StopRequests:
    """Ends a run after a step, on a signal or when its time is up: a `ShouldStop`.

    It is a context manager. Inside it SIGTERM, by which schedulers announce that a job will be
    ended, and SIGHUP, by which a terminal says that it closes, are requests to stop. So is SIGINT
    (Ctrl-C) from the first step on; a second one raises KeyboardInterrupt. Signals that are ignored
    stay ignored. With several processes JAX handles SIGTERM on any of them, and finds a step that
    all can stop after; so the other signals are passed on as SIGTERM.
    """

    def __init__(self) -> None:
        self._deadline = math.inf
        self._is_alone = jax.process_count() == 1
        self._is_over = False
        self._cause = self._interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        self._install_handlers(*([signal.SIGTERM] if self._is_alone else []), signal.SIGHUP)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def start_clock(self, max_minutes: float) -> None:
        """Starts the clock that ends the run after `max_minutes`; 0 for no limit."""
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else math.inf

    def _install_handlers(self, *signums: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread handle signals
        for signum in signums:
            if signum not in self._before and signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, _: object) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self._cause = self._cause or signum
        if not self._is_alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def __call__(self, step: int) -> bool:
        self._install_handlers(signal.SIGINT)
        if not self._is_over and time.monotonic() > self._deadline:
            self._is_over = True
            if not self._is_alone:
                os.kill(os.getpid(), signal.SIGTERM)
        if self._is_alone:
            return self._is_over or self._cause != 0
        return multihost_utils.reached_preemption_sync_point(step)

    def cause(self) -> int:
        """Returns the signal that has ended the run, or 0 for a clock. Collective."""
        if any_process(self._is_over):
            return 0
        return (
            max_over_processes(self._cause) or signal.SIGTERM
        )  # JAX handles SIGTERM of several processes


def check_step(
    step: int, metrics: Mapping[str, float], *, policy: str, max_gradient_norm: float = 0.0
) -> str | None:
    """Returns a message if a bad step was skipped; None if the step is good or `ignore` is set."""
    bad = bad_step_reason(metrics, max_gradient_norm)
    if policy == "skip":  # decided on the devices
        return f"step {step} has changed nothing: {bad}" if metrics["skipped"] else None
    if not bad or policy == "ignore":
        return None
    raise RunError(
        f"Step {step} is bad: {bad}. The run ends; its checkpoints are older than "
        "this step. Resume with a lower `learning_rate`, or with `bad_step_policy=skip`, which "
        "leaves such steps out."
    )


def bad_step_reason(metrics: Mapping[str, float], max_gradient_norm: float) -> str:
    """Returns the reason for which a step is bad, such as `its loss is nan`; "" if it is good."""
    values = {name: metrics[name] for name in ("loss", "gradient_norm") if name in metrics}
    bad = [f"its {name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    norm = values.get("gradient_norm", 0.0)
    if not bad and max_gradient_norm and norm > max_gradient_norm:
        bad = [f"its gradient_norm is {norm:.6g}, above {max_gradient_norm:g}"]
    return " and ".join(bad)
