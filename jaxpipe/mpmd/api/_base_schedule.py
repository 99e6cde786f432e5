"""Defines the base class of JaxPP's schedules, and reads the schedule of a loop."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...schedules import FAMILIES, Schedule, build, check
from ._tasks import FusedTask, Task, schedule_of


@dataclass(frozen=True)
class BaseSchedule(ABC):
    """A kind of schedule under JaxPP's name. `tasks` is what a schedule of your own overrides.

    Args:
        num_stages: The number of stages of the model.

    Raises:
        ValueError: If `num_stages` is below 1.

    Example:
        >>> from jaxpipe.mpmd.jaxpp.schedules import Task, TaskType
        >>> class Sequential(BaseSchedule):
        ...     def tasks(self, n_mubatches):
        ...         kinds = TaskType.FWD, TaskType.BWD
        ...         return [
        ...             [Task.make(s, m, kind) for m in range(n_mubatches) for kind in kinds]
        ...             for s in range(self.num_stages)
        ...         ]
        >>> print(Sequential(2).schedule(2))
        0F0 0B0 0F1 0B1
        1F0 1B0 1F1 1B1
    """

    num_stages: int
    is_partial_bwd: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        require_positive(num_stages=self.num_stages)

    def get_mpmd_idx(self, stage_id: int) -> int:
        """Returns the index of the rank that runs a stage: `stage_id`, unless overridden."""
        return stage_id

    @abstractmethod
    def tasks(self, n_mubatches: int) -> Sequence[Sequence[Task | FusedTask | None]]:
        """Returns the tasks of each rank for a number of microbatches, in order: `tasks(M)[rank]`.

        They are checked before anything is compiled: every task is there once, on the rank that
        `get_mpmd_idx` says, and no rank waits for itself.
        """

    def schedule(self, num_microbatches: int) -> Schedule:
        """Returns the order of every rank's actions that `tasks` says, which passes `check`."""
        ranks = [int(self.get_mpmd_idx(stage)) for stage in range(self.num_stages)]
        return schedule_of(
            self.tasks(num_microbatches),
            self.num_stages,
            num_microbatches,
            ranks=ranks,
            name=f"{type(self).__name__}.tasks({num_microbatches})",
        )


def require_positive(**counts: int) -> None:
    """Checks that each count is 1 or more. The message has JaxPP's too, which scripts may match."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(
                f"`{name}` is {count}. Give at least 1. (The argument `{name}` must be `>= 0`, in "
                "the words of JaxPP, which refuses 0 too.)"
            )


def as_schedule(schedule: Any, num_microbatches: int, ranks: int = 1) -> Schedule:
    """Returns the schedule for a number of microbatches, checked; builds a kind or a name."""
    if isinstance(schedule, str):
        return check(build(schedule, ranks=ranks, microbatches=num_microbatches))
    if isinstance(schedule, BaseSchedule):
        named = schedule.schedule(num_microbatches)
        overridden = type(schedule).schedule is not BaseSchedule.schedule
        return as_schedule(named, num_microbatches) if overridden else named
    if not isinstance(schedule, Schedule):
        said = f"the class {schedule.__name__}" if isinstance(schedule, type) else repr(schedule)
        raise ValueError(
            f"`schedule` is {said}. Give a schedule with its number of stages, such as "
            f"`Std1F1B({ranks})`, a `jaxpipe.schedules.Schedule`, or a name: "
            f"{', '.join(FAMILIES)}."
        )
    if schedule.num_microbatches != num_microbatches:
        raise ValueError(
            f"`schedule` is for {schedule.num_microbatches} microbatches, but `num_microbatches` "
            f"is {num_microbatches}. Build it for {num_microbatches}, or pass a schedule that fits "
            "any number, such as Std1F1B(num_stages)."
        )
    return check(schedule)
