"""Offers jaxpipe's schedules under JaxPP's names, prints them as JaxPP's tasks, and makes tasks.

p ranks (JaxPP's `mpmd_dim`), v stages on each rank, M microbatches.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ...mpmd.api import (
    BaseSchedule,
    FusedTask,
    ScheduleTasks,
    Task,
    TaskType,
    require_positive,
    tasks_of,
)
from ...schedules import Action, FusedPair, Schedule, builders, check, num_ranks
from ...schedules.language import ScheduleStep


class NamedSchedule(BaseSchedule):
    """A kind of schedule that is one of `jaxpipe.schedules`, built for a number of microbatches.

    A subclass may override `tasks`: its lists are then what runs.

    Raises:
        TypeError: If a subclass overrides a method by which JaxPP computes tasks, such as
            `get_rank_warmup_ops`, and not `tasks`.
    """

    mpmd_dim: int
    """The number of ranks. Each rank runs the same number of stages."""

    fuse_last: ClassVar[bool] = False
    """Whether JaxPP fuses a forward of the last stage with the backward after it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        unused = sorted(_STEPS_OF_JAXPP & vars(cls).keys())
        if unused and cls.tasks is NamedSchedule.tasks:
            raise TypeError(
                f"`{cls.__name__}.{unused[0]}` is a step by which JaxPP computes tasks, and the "
                "tasks of this class are not computed so. Override `tasks`."
            )

    @abstractmethod
    def _build(self, num_microbatches: int) -> Schedule:
        """Returns the schedule whose tasks are `tasks`, unless these are overridden."""

    def tasks(self, n_mubatches: int) -> ScheduleTasks:
        """Returns the tasks of each rank for a number of microbatches: `tasks(M)[rank]`."""
        return tasks_of(check(self._build(n_mubatches)), fuse_last=self.fuse_last)


_STEPS_OF_JAXPP = {
    "_get_rank_warmup_ops",
    "_tasks_for_rank",
    "backward_stage_index",
    "build_schedule",
    "forward_stage_index",
    "get_rank_warmup_ops",
    "microbatches_per_round",
}
"""The methods of JaxPP's schedules that a subclass could override in place of `tasks`."""


@dataclass(frozen=True)
class InterleavedBaseSchedule(BaseSchedule):
    """The base class of schedules with several stages on each rank. A subclass defines `tasks`.

    Args:
        num_stages: The number of stages of the model.
        mpmd_dim: The number of ranks. Each rank runs the same number of stages.

    Raises:
        ValueError: If an argument is below 1 or `num_stages` is no multiple of `mpmd_dim`.
    """

    mpmd_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(mpmd_dim=self.mpmd_dim)
        if self.num_stages % self.mpmd_dim:
            raise ValueError(
                f"`num_stages` is {self.num_stages}, which can not be evenly divided by "
                f"`mpmd_dim`, {self.mpmd_dim}. Give every rank the same number of stages."
            )

    def get_mpmd_idx(self, stage_id: int) -> int:
        """Returns the index of the rank that runs a stage: `stage_id` modulo `mpmd_dim`."""
        return stage_id % self.mpmd_dim


@dataclass(frozen=True, init=False)
class _OneStagePerRank(NamedSchedule):
    """A kind of schedule with one stage on each rank: `mpmd_dim`, if given, is `num_stages`.

    `mpmd_dim` is no field, so that a dataclass that inherits from it has its own fields behind
    `num_stages`, as in JaxPP.
    """

    def __init__(self, num_stages: int, mpmd_dim: int | None = None) -> None:
        if mpmd_dim is not None and mpmd_dim != num_stages:
            raise ValueError(
                f"`mpmd_dim` is {mpmd_dim} for {num_stages} stages, but {type(self).__name__} has "
                "one stage on each rank. Leave it out, or choose InterleavedGPipe or "
                "Interleaved1F1B."
            )
        super().__init__(num_stages)

    @property
    def mpmd_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns the number of ranks."""
        return self.num_stages


@dataclass(frozen=True, init=False)
class GPipe(_OneStagePerRank):
    """GPipe, all forwards before all backwards: `schedules.gpipe`."""

    def _build(self, num_microbatches: int) -> Schedule:
        return builders.gpipe(self.num_stages, num_microbatches)


@dataclass(frozen=True, init=False)
class Std1F1B(_OneStagePerRank):
    """1F1B, which runs each backward as soon as it is ready: `schedules.one_f_one_b`."""

    def _build(self, num_microbatches: int) -> Schedule:
        return builders.one_f_one_b(self.num_stages, num_microbatches)


@dataclass(frozen=True, init=False)
class Eager1F1B(_OneStagePerRank):
    """1F1B with twice the warmup, which hides transfers: `schedules.eager_one_f_one_b`."""

    def _build(self, num_microbatches: int) -> Schedule:
        return builders.eager_one_f_one_b(self.num_stages, num_microbatches)


@dataclass(frozen=True, init=False)
class ZeroBubble(_OneStagePerRank):
    """1F1B with split backwards that fill the bubble: `schedules.zero_bubble_h1`.

    Requires at least as many microbatches as stages.
    """

    is_partial_bwd = True

    def _build(self, num_microbatches: int) -> Schedule:
        return builders.zero_bubble_h1(self.num_stages, num_microbatches)


@dataclass(frozen=True)
class InterleavedGPipe(NamedSchedule, InterleavedBaseSchedule):
    """GPipe with several stages on each rank: `schedules.interleaved_gpipe`."""

    def _build(self, num_microbatches: int) -> Schedule:
        return _interleaved(
            builders.interleaved_gpipe, self.num_stages, self.mpmd_dim, num_microbatches
        )


@dataclass(frozen=True)
class Interleaved1F1B(NamedSchedule, InterleavedBaseSchedule):
    """1F1B with several stages on each rank: `schedules.interleaved_one_f_one_b`.

    With one stage on each rank it is `Eager1F1B`.

    Args:
        num_stages: The number of stages of the model.
        mpmd_dim: The number of ranks. Stage i runs on rank i modulo `mpmd_dim`.
        fuse_steady_state: Whether to make a `FusedPair` of each forward and the backward after it
            between warmup and drain, unless both are of one microbatch. A pair runs as two
            programs in a row, so that the output of the forward is sent before the backward runs.
            A forward and a backward of one microbatch run as one program.
    """

    fuse_steady_state: bool = False
    fuse_last = True

    def _build(self, num_microbatches: int) -> Schedule:
        builder = builders.interleaved_one_f_one_b
        plain = _interleaved(builder, self.num_stages, self.mpmd_dim, num_microbatches)
        return _pair_steady_state(plain, more_warmup=0) if self.fuse_steady_state else plain


@dataclass(frozen=True)
class KimiK2(Interleaved1F1B):
    """Interleaved 1F1B with one more warmup forward: `schedules.kimi_k2`.

    On the last rank too, `fuse_steady_state` then pairs actions of different microbatches, so on
    every rank the communication of one action can overlap the computation of the other.

    Args:
        num_stages: The number of stages of the model.
        mpmd_dim: The number of ranks. Stage i runs on rank i modulo `mpmd_dim`.
        fuse_steady_state: Whether to make a `FusedPair` of each forward and the backward after it
            between warmup and drain.
    """

    def _build(self, num_microbatches: int) -> Schedule:
        plain = _interleaved(builders.kimi_k2, self.num_stages, self.mpmd_dim, num_microbatches)
        return _pair_steady_state(plain, more_warmup=1) if self.fuse_steady_state else plain


@dataclass(frozen=True, init=False)
class DualPipeV(NamedSchedule, InterleavedBaseSchedule):
    """DualPipeV, two stages on each rank in a V, with fused pairs: `schedules.dualpipev`.

    Requires at least as many microbatches as stages.

    Args:
        num_stages: The number of stages of the model, an even number.
        mpmd_dim: The number of ranks: `num_stages // 2`, or None for this number.
    """

    def __init__(self, num_stages: int, mpmd_dim: int | None = None) -> None:
        super().__init__(num_stages, num_stages // 2 if mpmd_dim is None else mpmd_dim)

    def __post_init__(self) -> None:
        if self.num_stages != 2 * self.mpmd_dim:
            raise ValueError(
                f"`num_stages` is {self.num_stages} and `mpmd_dim` {self.mpmd_dim}, but DualPipeV "
                "has two stages on each rank. Give an even `num_stages`, and half of it or no "
                f"`mpmd_dim`. (DualPipeV only supports 2 * mpmd_dim stages, {self.num_stages=} "
                f"requested with {self.mpmd_dim=}, in the words of JaxPP.)"
            )
        super().__post_init__()

    is_partial_bwd = True

    def get_mpmd_idx(self, stage_id: int) -> int:
        """Returns the rank of a stage: the second half of the stages visits ranks in reverse."""
        return min(stage_id, self.num_stages - 1 - stage_id)

    def _build(self, num_microbatches: int) -> Schedule:
        if num_microbatches < self.num_stages:
            raise ValueError(
                f"`num_microbatches` is {num_microbatches}. Give at least {self.num_stages}: "
                f"DualPipeV requires n_mubatches={num_microbatches} >= {self.num_stages=}."
            )
        return builders.dualpipev(self.mpmd_dim, num_microbatches)


def _interleaved(
    builder: Callable[..., Schedule], num_stages: int, num_ranks: int, num_microbatches: int
) -> Schedule:
    require_positive(num_microbatches=num_microbatches)
    group_size = _group_size(num_ranks, num_microbatches)
    num_chunks = num_stages // num_ranks
    return builder(num_ranks, num_microbatches, num_chunks=num_chunks, group_size=group_size)


def _group_size(num_ranks: int, num_microbatches: int) -> int:
    """Returns the microbatches of a group: about p, as in JaxPP, for any M.

    JaxPP keeps M // p groups and spreads the rest over the first; here the last group has the rest.
    """
    for num_groups in range(max(1, num_microbatches // num_ranks), 1, -1):
        group_size = -(-num_microbatches // num_groups)
        rest = num_microbatches % group_size
        if rest == 0 or rest >= num_ranks:
            return group_size
    return num_microbatches


def _pair_steady_state(schedule: Schedule, *, more_warmup: int) -> Schedule:
    """Returns `schedule` with each forward between warmup and drain paired with a backward.

    The length of the warmup decides which actions are paired. An adjacent forward and backward are
    not enough: if all forwards belong to the warmup, the backward after the last one depends on it
    through the other ranks.
    """
    p = num_ranks(schedule)
    v = schedule.num_stages // p
    group_size = _group_size(p, schedule.num_microbatches)

    def program(rank: int) -> tuple[ScheduleStep, ...]:
        steps = schedule.programs[rank]
        warmup = (v - 1) * group_size + 2 * (p - 1 - rank) + more_warmup
        warmup = min(warmup, len(steps) // 2)
        cooldown = len(steps) - warmup
        steady = steps[warmup:cooldown]
        pairs = (_paired(*neighbours) for neighbours in zip(steady[::2], steady[1::2], strict=True))
        return (*steps[:warmup], *(step for pair in pairs for step in pair), *steps[cooldown:])

    programs = tuple(map(program, range(p)))
    return Schedule(schedule.num_stages, schedule.num_microbatches, programs)


def _paired(forward: ScheduleStep, backward: ScheduleStep) -> tuple[ScheduleStep, ...]:
    """Returns a fused pair, or both actions if they are of the same microbatch and so dependent."""
    assert isinstance(forward, Action) and isinstance(backward, Action)
    if forward.microbatch == backward.microbatch:
        return forward, backward
    return (FusedPair(forward, backward),)


class SequentialMicrobatchesIterator:
    """Makes tasks, each of the microbatch after the last one of its stage and operation.

    Example:
        >>> it = SequentialMicrobatchesIterator()
        >>> print(it.fwd(0), it.fwd(0), it.bwd(0), it.fwd_bwd(0, 0))
        fwd_0__0 fwd_0__1 bwd_0__0 FusedTask(fwd_0__2, bwd_0__1)
    """

    def __init__(self) -> None:
        self.task_mubatch: Counter[tuple[int, TaskType]] = Counter()

    def task(self, stage_id: int, task_type: TaskType) -> Task:
        """Returns the next task of an operation of a stage."""
        key = stage_id, task_type
        task = Task.make(stage_id, self.task_mubatch[key], task_type)
        self.task_mubatch[key] += 1
        return task

    def fwd(self, stage_id: int) -> Task:
        """Returns the next forward of a stage."""
        return self.task(stage_id, TaskType.FWD)

    def bwd(self, stage_id: int) -> Task | FusedTask:
        """Returns the next backward of a stage."""
        return self.task(stage_id, TaskType.BWD)

    def fwd_bwd(self, fwd_stage_id: int, bwd_stage_id: int) -> FusedTask:
        """Returns the next forward of a stage fused with the next backward of a stage."""
        forward, backward = self.fwd(fwd_stage_id), self.bwd(bwd_stage_id)
        return FusedTask((forward, *(backward if isinstance(backward, FusedTask) else (backward,))))


class ZBSequentialMicrobatchesIterator(SequentialMicrobatchesIterator):
    """Makes tasks as its base class does, with backwards in two halves.

    Example:
        >>> it = ZBSequentialMicrobatchesIterator()
        >>> print(it.fwd(1), it.bwd_a(1), it.bwd_w(1), it.bwd(1))
        fwd_1__0 bwd_i_1__0 bwd_w_1__0 FusedTask(bwd_i_1__1, bwd_w_1__1)
    """

    def bwd_a(self, stage_id: int) -> Task:
        """Returns the next half of a backward for the inputs of a stage."""
        return self.task(stage_id, TaskType.BWD_I)

    def bwd_w(self, stage_id: int) -> Task:
        """Returns the next half of a backward for the weights of a stage."""
        return self.task(stage_id, TaskType.BWD_W)

    def bwd(self, stage_id: int) -> FusedTask:
        """Returns both halves of the next backward of a stage."""
        return FusedTask((self.bwd_a(stage_id), self.bwd_w(stage_id)))
