"""When a run ends before its last step: a signal, or its time is up."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from ._config import Config
from ._together import any_says

ShouldStop = Callable[[int], bool]
"""Whether the run ends after this step; all processes ask after every step, and hear the same."""


class RunError(RuntimeError):
    """A run that ends before its time, by a reason that needs no traceback."""


class TerminatedError(RunError):
    """A run that SIGTERM has ended, with a checkpoint of its last step if it has any."""


class StopRequests:
    """What may end a run after any step, a `ShouldStop`. A context manager.

    Inside it takes SIGTERM, by which schedulers announce that a job will be ended, for a wish to
    stop. With several processes JAX takes it, on any of them, and finds a step that all can stop
    after.
    """

    def __init__(self, max_minutes: float) -> None:
        """
        Args:
            max_minutes: After which the run ends; 0 for never. Of several processes each sends
                itself the signal then.
        """
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else math.inf
        self._is_alone = jax.process_count() == 1
        self._is_asked = self._is_over = False
        self._before: Any = None

    def __enter__(self) -> "StopRequests":
        # Python lets no other thread handle signals.
        if self._is_alone and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    def __call__(self, step: int) -> bool:
        if not self._is_over and time.monotonic() > self._deadline:
            self._is_over = True
            if not self._is_alone:
                os.kill(os.getpid(), signal.SIGTERM)
        if self._is_alone:
            return self._is_over or self._is_asked
        return multihost_utils.reached_preemption_sync_point(step)

    def by_signal(self) -> bool:
        """Whether no clock has ended the run. All processes ask, and hear the same."""
        return not any_says(self._is_over)


def check_step(config: Config, step: int, metrics: Mapping[str, float]) -> str | None:
    """What is wrong with a step that was skipped; None if nothing is, or nobody minds.

    Raises:
        RunError: If something is, and the policy is to stop.
    """
    bad = bad_step(metrics, config.max_gradient_norm)
    if config.bad_step_policy == "skip":  # decided on the devices
        return f"step {step} has changed nothing: {bad}" if metrics["skipped"] else None
    if not bad or config.bad_step_policy == "ignore":
        return None
    raise RunError(
        f"Step {step} is bad: {bad}. The run ends; its checkpoints are older than "
        "this step. Resume with a lower `learning_rate`, or with `bad_step_policy=skip`, which "
        "leaves such steps out."
    )


def bad_step(metrics: Mapping[str, float], max_gradient_norm: float) -> str:
    """What is wrong with a step, such as `its loss is nan`; "" if nothing is.

    Args:
        metrics: Of the step; without `loss` or `gradient_norm` nothing is wrong with these.
        max_gradient_norm: 0 for no limit.
    """
    found = {name: metrics[name] for name in ("loss", "gradient_norm") if name in metrics}
    bad = [f"its {name} is {value}" for name, value in found.items() if not math.isfinite(value)]
    norm = found.get("gradient_norm", 0.0)
    if not bad and max_gradient_norm and norm > max_gradient_norm:
        bad = [f"its gradient_norm is {norm:.6g}, above {max_gradient_norm:g}"]
    return " and ".join(bad)
