"""Decides by the clock after which step a checkpoint is due, the same on all processes."""

import math
import time
from collections.abc import Callable

import jax

from ..runtime._multihost import broadcast_from_first


class CheckpointTimer:
    """Measures the time since the last checkpoint.

    The clock of the first process counts. Telling the others makes all wait for the step that runs,
    so with several processes they do not ask after every step: the first also says when to ask
    again, after half the steps that it expects in the time that is left.
    """

    def __init__(
        self,
        minutes: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[int], int] = broadcast_from_first,
        alone: bool | None = None,
    ) -> None:
        """Starts the first interval."""
        self._seconds = 60 * minutes or math.inf
        self._clock, self._agree = clock, agree
        self._alone = jax.process_count() == 1 if alone is None else alone
        self._saved = self._then = clock()
        self._asked, self._ask_at = 0, 0

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after a step.

        Collective: every process must call it after the same steps and receives the same answer.
        """
        if self._seconds == math.inf or step < self._ask_at:
            return False
        steps = self._agree(self._steps_left(step))
        self._ask_at = step + max(steps, 1)
        return steps == 0

    def saved(self) -> None:
        """Records that a checkpoint has been saved."""
        self._saved = self._clock()

    def _steps_left(self, step: int) -> int:
        """Returns after how many steps to ask again; 0 if a checkpoint is due."""
        now = self._clock()
        left = self._saved + self._seconds - now
        pace = (now - self._then) / (step - self._asked) if self._asked else math.inf
        self._then, self._asked = now, step
        if left <= 0:
            return 0
        return 1 if self._alone or pace <= 0 else max(1, int(left / pace / 2))
