"""Defines JaxPP's schedules and their tasks, of which they are lists, and what a list means.

A `Task` says in JaxPP's words what an `Action` is: stage, operation and microbatch.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..._input import short_repr
from ...schedules import FAMILIES, Action, FusedPair, Op, Schedule, ScheduleError, build, check
from ...schedules.language import ScheduleStep, actions_of, parse_action


class TaskType(Enum):
    """Names the operation of a task: a forward, a backward, or one half of a split backward."""

    FWD = 1
    BWD = 2
    BWD_I = 3
    """The gradients of inputs."""
    BWD_W = 4
    """The gradients of weights."""

    @property
    def default_latency(self) -> int:
        """Returns the length of the task, where a forward is 1."""
        return 2 if self is TaskType.BWD else 1


_OPS = {TaskType.FWD: Op.F, TaskType.BWD: Op.B, TaskType.BWD_I: Op.I, TaskType.BWD_W: Op.W}
_TYPES = {op: kind for kind, op in _OPS.items()}


@dataclass(frozen=True)
class Task:
    """A single action. `str` shows the forward of stage 2 for microbatch 0 as `fwd_2__0`.

    Its backward is `bwd_2__0`. The two halves of a split backward are `bwd_i_2__0` (gradients of
    inputs) and `bwd_w_2__0` (gradients of weights).

    Args:
        stage_id: The index of the stage.
        mubatch_idx: The index of the microbatch.
        fwd_or_bwd: The operation: a forward, a backward or one half of it.
        latency: How long the task is, where a forward is 1. Nothing reads it: a task runs as soon
            as its group is free and its inputs are there.
        slice: The index of the sequence slice, or None for whole sequences.

    Example:
        >>> str(Task.make(2, 0, TaskType.FWD))
        'fwd_2__0'
    """

    stage_id: int
    mubatch_idx: int
    fwd_or_bwd: TaskType
    latency: int = field(default=1, compare=False)
    slice: int | None = None

    @classmethod
    def make(
        cls, stage_id: int, mubatch_idx: int, fwd_or_bwd: TaskType, latency: int | None = None
    ) -> "Task":
        """Returns a task. `latency` is 2 for a whole backward and otherwise 1, unless given."""
        if latency is None:
            latency = fwd_or_bwd.default_latency
        return cls(stage_id, mubatch_idx, fwd_or_bwd, latency)

    @classmethod
    def of(cls, action: Action) -> "Task":
        """Returns the task that is an action."""
        task = cls.make(action.stage, action.microbatch, _TYPES[action.op])
        return task if action.slice is None else replace(task, slice=action.slice)

    @property
    def action(self) -> Action:
        """Returns the action that is the task."""
        return Action(self.stage_id, _OPS[self.fwd_or_bwd], self.mubatch_idx, self.slice)

    def __str__(self) -> str:
        suffix = "" if self.slice is None else f"s{self.slice}"
        return f"{self.fwd_or_bwd.name.lower()}_{self.stage_id}__{self.mubatch_idx}{suffix}"


class FusedTask(tuple[Task, ...]):
    """Several tasks in one, in the order in which they run.

    A forward and a backward of different microbatches are a `FusedPair`. A forward and the backward
    of the same microbatch are two actions in a row, which the last stage runs as one program.

    Example:
        >>> print(FusedTask((Task.make(1, 0, TaskType.FWD), Task.make(1, 0, TaskType.BWD))))
        FusedTask(fwd_1__0, bwd_1__0)
    """

    __slots__ = ()

    @property
    def latency(self) -> int:
        """Returns the sum of the latencies of the tasks."""
        return sum(task.latency for task in self)

    def __str__(self) -> str:
        return f"FusedTask({', '.join(map(str, self))})"


ScheduleTasks = list[list[Task | FusedTask | None]]
"""The tasks of each rank, in order. None, JaxPP's task of an idle rank, says nothing."""


def tasks_of(schedule: Schedule, *, fuse_last: bool = True) -> ScheduleTasks:
    """Returns the tasks of each rank, in order.

    A `FusedPair` becomes one task. With `fuse_last` a forward and the backward of the same
    microbatch also become one task if they are adjacent on the last stage, because nothing is sent
    between them. They are not a `FusedPair`: the halves of a pair are independent, but this
    backward needs the forward.
    """
    last = schedule.num_stages - 1 if fuse_last else -1
    return [_tasks(program, last) for program in schedule.programs]


def _tasks(program: Iterable[ScheduleStep], last_stage: int) -> list[Task | FusedTask | None]:
    tasks: list[Task | FusedTask | None] = []
    for step in program:
        if isinstance(step, FusedPair):
            tasks.append(FusedTask((Task.of(step.forward), Task.of(step.backward))))
            continue
        forward = Task.of(replace(step, op=Op.F))
        if step.op is Op.B and step.stage == last_stage and tasks[-1] == forward:
            tasks[-1] = FusedTask((forward, Task.of(step)))
        else:
            tasks.append(Task.of(step))
    return tasks


def schedule_of(
    tasks: Any, num_stages: int, num_microbatches: int, *, ranks: Sequence[int], name: str
) -> Schedule:
    """Returns the schedule that lists of tasks are, checked: the inverse of `tasks_of`.

    Args:
        tasks: One list of tasks for each rank.
        num_stages: The number of stages.
        num_microbatches: The number of microbatches.
        ranks: The rank of each stage, as `get_mpmd_idx` says it.
        name: The call that returned the tasks, for messages.

    Returns:
        A schedule that passes `check`.

    Raises:
        ScheduleError: If a task is missing, is there twice, is out of range, is on another rank
            than `ranks` says, or waits for itself. The message names the task.
    """
    if not isinstance(tasks, list | tuple) or not all(isinstance(of, list | tuple) for of in tasks):
        raise ScheduleError(
            f"`{name}` returned {short_repr(tasks)}. Return a list with one list of tasks for each "
            "rank."
        )
    programs = []
    for rank, of_rank in enumerate(tasks):
        steps: list[ScheduleStep] = []
        for position, task in enumerate(of_rank):
            if task is not None:
                steps += _steps(task, f"`{name}[{rank}][{position}]`")
        for step in steps:
            _check_rank(step, rank, ranks, name)
        programs.append(tuple(steps))
    try:
        return check(Schedule(num_stages, num_microbatches, tuple(programs)))
    except ScheduleError as error:
        raise ScheduleError(f"`{name}` cannot run. {_in_words_of_tasks(str(error))}") from error


def _steps(task: Any, where: str) -> list[ScheduleStep]:
    parts = task if isinstance(task, FusedTask) else (task,)
    for part in parts:
        if not isinstance(part, Task):
            raise ScheduleError(
                f"{where} is {short_repr(part)}. Give a `Task`, a `FusedTask` of tasks, or None."
            )
    actions = _whole_backwards([part.action for part in parts])
    if len(actions) == 2:
        first, second = actions
        ops = first.op, second.op
        if ops in ((Op.F, Op.B), (Op.F, Op.I)) and first.microbatch != second.microbatch:
            return [FusedPair(first, second)]
    return list(actions)


def _whole_backwards(actions: Sequence[Action]) -> list[Action]:
    """Joins the halves of a backward that one task runs in a row: they are one whole backward."""
    whole: list[Action] = []
    for action in actions:
        if action.op is Op.W and whole and whole[-1] == replace(action, op=Op.I):
            whole[-1] = replace(action, op=Op.B)
        else:
            whole.append(action)
    return whole


def _check_rank(step: ScheduleStep, rank: int, ranks: Sequence[int], name: str) -> None:
    for action in actions_of(step):
        if 0 <= action.stage < len(ranks) and ranks[action.stage] != rank:
            raise ScheduleError(
                f"`{name}[{rank}]` has {Task.of(action)}, and `get_mpmd_idx({action.stage})` is "
                f"{ranks[action.stage]}. Move the task to the list of this rank, or override "
                "`get_mpmd_idx` too."
            )


def _in_words_of_tasks(message: str) -> str:
    """Writes the actions of the sentence in front of a schedule's text as tasks."""
    sentence, *text = message.split("\n")
    if sentence.endswith("deadlocks:"):  # its next lines say which rank waits for what
        waits = [line for line in text if line.startswith("  rank ")]
        sentence, text = "\n".join([sentence, *waits]), text[len(waits) :]
    sentence = re.sub(
        r"\b\d+[FBIW]\d+(s\d+)?\b", lambda at: str(Task.of(parse_action(at[0]))), sentence
    )
    return "\n".join([sentence, *text])


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
