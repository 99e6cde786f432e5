"""Defines the base class of JaxPP's schedules and its tasks, and reads the schedule of a loop."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...schedules import FAMILIES, Action, FusedPair, Op, Schedule, build, check
from ...schedules.language import ScheduleStep

_NAMES = {Op.F: "fwd", Op.B: "bwd", Op.I: "bwd_i", Op.W: "bwd_w"}


@dataclass(frozen=True)
class Task:
    """A single action. `str` shows the forward of stage 2 for microbatch 0 as `fwd_2__0`.

    Its backward is `bwd_2__0`. The two halves of a split backward are `bwd_i_2__0` (gradients of
    inputs) and `bwd_w_2__0` (gradients of weights).
    """

    action: Action

    @property
    def stage_id(self) -> int:
        """Returns the index of the stage."""
        return self.action.stage

    @property
    def mubatch_idx(self) -> int:
        """Returns the index of the microbatch."""
        return self.action.microbatch

    def __str__(self) -> str:
        stage, microbatch = self.action.stage, self.action.microbatch
        suffix = "" if self.action.slice is None else f"s{self.action.slice}"
        return f"{_NAMES[self.action.op]}_{stage}__{microbatch}{suffix}"


class FusedTask(NamedTuple):
    """A forward and a backward in one task, in this order if the backward needs the forward."""

    forward: Task
    backward: Task

    def __str__(self) -> str:
        return f"FusedTask({self.forward}, {self.backward})"


Tasks = list[list[Task | FusedTask]]


def tasks_of(schedule: Schedule) -> Tasks:
    """Returns the tasks of each rank, in order.

    A `FusedPair` becomes one task. A forward and the backward of the same microbatch also become
    one task if they are adjacent on the last stage, because nothing is sent between them. They are
    not a `FusedPair`: the halves of a pair are independent, but this backward needs the forward.
    """
    return [_tasks(program, schedule.num_stages - 1) for program in schedule.programs]


def _tasks(program: Iterable[ScheduleStep], last_stage: int) -> list[Task | FusedTask]:
    tasks: list[Task | FusedTask] = []
    for step in program:
        if isinstance(step, FusedPair):
            tasks.append(FusedTask(Task(step.forward), Task(step.backward)))
            continue
        forward = Task(replace(step, op=Op.F))
        if step.op is Op.B and step.stage == last_stage and tasks[-1] == forward:
            tasks[-1] = FusedTask(forward, Task(step))
        else:
            tasks.append(Task(step))
    return tasks


@dataclass(frozen=True)
class BaseSchedule(ABC):
    """A kind of schedule under JaxPP's name.

    Args:
        num_stages: The number of stages of the model.
    """

    num_stages: int

    @property
    def is_partial_bwd(self) -> bool:
        """Returns whether the backward of a stage is split into two tasks."""
        return False

    @abstractmethod
    def schedule(self, num_microbatches: int) -> Schedule:
        """Returns the order of every rank's actions, which passes `check`."""

    @abstractmethod
    def get_mpmd_idx(self, stage_id: int) -> int:
        """Returns the index of the rank that runs a stage."""

    def tasks(self, n_mubatches: int) -> Tasks:
        """Returns the schedule for M microbatches as JaxPP's tasks: `tasks(M)[rank]`."""
        return tasks_of(self.schedule(n_mubatches))


def as_schedule(schedule: Any, num_microbatches: int, ranks: int = 1) -> Schedule:
    """Returns the schedule for a number of microbatches, checked; builds a kind or a name."""
    if isinstance(schedule, str):
        return check(build(schedule, ranks=ranks, microbatches=num_microbatches))
    if isinstance(schedule, BaseSchedule):
        return schedule.schedule(num_microbatches)
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
