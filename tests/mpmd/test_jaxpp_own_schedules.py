"""Schedules of one's own, as JaxPP's users write them: subclasses that define or override `tasks`.

What they compute is compared with `jax.value_and_grad` of a function that knows neither marks nor
loops nor groups.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import pytest

import jaxpipe.mpmd.jaxpp as jaxpp
import jaxpipe.mpmd.jaxpp.schedules
from jaxpipe.mpmd.api import as_schedule, tasks_of
from jaxpipe.mpmd.jaxpp.schedules import (
    BaseSchedule,
    DualPipeV,
    Eager1F1B,
    FusedTask,
    GPipe,
    Interleaved1F1B,
    InterleavedBaseSchedule,
    InterleavedGPipe,
    KimiK2,
    ScheduleTasks,
    SequentialMicrobatchesIterator,
    Std1F1B,
    Task,
    ZBSequentialMicrobatchesIterator,
    ZeroBubble,
)
from jaxpipe.mpmd.jaxpp.types import TaskType
from jaxpipe.schedules import FAMILIES, Action, Op, Schedule, ScheduleError, build, parse
from jaxpipe.schedules.language import enumerate_actions
from mpmd.small import (
    assert_close,
    batch,
    gradients,
    groups,
    layer,
    layers,
    runs,
    squared_error,
)

FWD, BWD, BWD_I, BWD_W = TaskType.FWD, TaskType.BWD, TaskType.BWD_I, TaskType.BWD_W


class OneByOne(BaseSchedule):
    """Every microbatch alone, with holes where a rank is idle."""

    def tasks(self, n_mubatches: int) -> ScheduleTasks:
        return [
            [
                None,
                *(Task.make(s, m, kind) for m in range(n_mubatches) for kind in (FWD, BWD)),
                None,
            ]
            for s in range(self.num_stages)
        ]


class InHalves(BaseSchedule):
    """All forwards, then gradients of inputs, then those of weights, last microbatch first."""

    def tasks(self, n_mubatches: int) -> ScheduleTasks:
        up, down = range(n_mubatches), range(n_mubatches - 1, -1, -1)
        return [
            [
                *(Task.make(s, m, FWD) for m in up),
                *(Task.make(s, m, BWD_I) for m in down),
                *(Task.make(s, m, BWD_W) for m in down),
            ]
            for s in range(self.num_stages)
        ]


@dataclass(frozen=True)
class Snake(InterleavedBaseSchedule):
    """Two stages on a rank in a V, so that the last rank hands nothing on, and tasks fused."""

    fused: bool = True

    def get_mpmd_idx(self, stage_id: int) -> int:
        return min(stage_id, self.num_stages - 1 - stage_id)

    def tasks(self, n_mubatches: int) -> ScheduleTasks:
        def of_rank(rank: int) -> list[Task | FusedTask | None]:
            down, up = rank, self.num_stages - 1 - rank
            tasks: list[Task | FusedTask | None] = []
            for m in range(n_mubatches):
                tasks += [Task.make(down, m, FWD), Task.make(up, m, FWD)]
                halves = Task.make(up, m, BWD_I), Task.make(up, m, BWD_W)
                tasks += [FusedTask(halves)] if self.fused else halves
                tasks.append(Task.make(down, m, BWD))
            return tasks

        return [of_rank(rank) for rank in range(self.mpmd_dim)]


class Iterated(BaseSchedule):
    """1F1B with JaxPP's iterators of microbatches."""

    iterator: type[SequentialMicrobatchesIterator] = SequentialMicrobatchesIterator

    def tasks(self, n_mubatches: int) -> Any:
        def of_rank(stage: int) -> list[Any]:
            it = self.iterator()
            warmup = min(self.num_stages - 1 - stage, n_mubatches)
            steady = n_mubatches - warmup
            return [
                *(it.fwd(stage) for _ in range(warmup)),
                *(it.fwd_bwd(stage, stage) for _ in range(steady)),
                *(it.bwd(stage) for _ in range(warmup)),
            ]

        return [of_rank(stage) for stage in range(self.num_stages)]


class IteratedHalves(Iterated):
    iterator = ZBSequentialMicrobatchesIterator


def backwards_last(kind: type[Any], *args: int) -> BaseSchedule:
    """A subclass whose forwards all run before its backwards, which keep their order."""

    class BackwardsLast(kind):
        def tasks(self, n_mubatches: int) -> list[list[Task]]:
            def alone(tasks: Any) -> list[Task]:
                fused = (task if isinstance(task, FusedTask) else (task,) for task in tasks)
                return [part for parts in fused for part in parts]

            def is_backward(task: Task) -> bool:
                return task.fwd_or_bwd is not FWD

            return [sorted(alone(of), key=is_backward) for of in super().tasks(n_mubatches)]

    return BackwardsLast(*args)


OWN: dict[str, Callable[[], BaseSchedule]] = {
    "OneByOne": lambda: OneByOne(2),
    "InHalves": lambda: InHalves(2),
    "Snake": lambda: Snake(4, 2),
    "Snake-apart": lambda: Snake(4, 2, fused=False),
    "Iterated": lambda: Iterated(2),
    "IteratedHalves": lambda: IteratedHalves(2),
    "Std1F1B": lambda: backwards_last(Std1F1B, 2),
    "Eager1F1B": lambda: backwards_last(Eager1F1B, 2),
    "GPipe": lambda: backwards_last(GPipe, 2),
    "ZeroBubble": lambda: backwards_last(ZeroBubble, 2),
    "Interleaved1F1B": lambda: backwards_last(Interleaved1F1B, 4, 2),
    "KimiK2": lambda: backwards_last(KimiK2, 4, 2),
    "InterleavedGPipe": lambda: backwards_last(InterleavedGPipe, 4, 2),
    "DualPipeV": lambda: backwards_last(DualPipeV, 4, 2),
}


@pytest.mark.parametrize("name", OWN)
def test_own_tasks_run_in_their_order_and_compute_what_jax_does(name: str):
    schedule, num_microbatches = OWN[name](), 4
    weights, data = layers(schedule.num_stages), batch(num_microbatches)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = layer(w, x)
        return squared_error(x, y)

    def whole(weights: Any) -> Any:
        return sum(loss(weights, *(a[m] for a in data)) for m in range(num_microbatches))

    step = jaxpp.mpmd_jit_with_loop(gradients(schedule), groups(2)).compile(weights, *data)
    assert_close(step(weights, *data), jax.value_and_grad(whole)(weights))

    for rank, tasks in enumerate(schedule.tasks(num_microbatches)):
        fused = (task if isinstance(task, FusedTask) else (task,) for task in tasks if task)
        order = [part.action for parts in fused for part in parts]
        ran = actions_on(step.lowered.program, rank)
        assert [a for a in ran if a in order] == [a for a in order if a in ran]
        # A whole backward may be lowered as its halves and two halves as a whole, and on stage 0
        # the half for the inputs computes nothing.
        assert all(a.op is not Op.F for a in {*order} - {*ran})


def actions_on(program: Any, rank: int) -> list[Action]:
    return [action for task in runs(program) if task.rank == rank for action in task.actions]


def test_the_programs_of_a_rank_run_in_the_order_of_its_tasks():
    args = layers(2), *batch(3)
    program = jaxpp.mpmd_jit_with_loop(gradients(InHalves(2)), groups(2)).lower(*args).program
    assert actions_on(program, 1) == list(parse("1F0 1F1 1F2 1I2 1I1 1I0 1W2 1W1 1W0").programs[0])


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"seq1f1b", "circular", "dualpipe"}))
def test_tasks_of_every_family_are_read_back(name: str):
    schedule = build(name, ranks=2, microbatches=4)
    ranks = {action.stage: rank for rank, action in enumerate_actions(schedule)}

    class Read(BaseSchedule):
        def get_mpmd_idx(self, stage_id: int) -> int:
            return ranks[stage_id]

        def tasks(self, n_mubatches: int) -> Any:
            return tasks_of(schedule)

    assert as_schedule(Read(schedule.num_stages), 4) == schedule


# Errors.


def changed(change: Callable[[ScheduleTasks], object]) -> BaseSchedule:
    """1F1B of two stages with tasks that `change` changes in place."""

    class Changed(Std1F1B):
        def tasks(self, n_mubatches: int) -> Any:
            tasks: Any = super().tasks(n_mubatches)
            change(tasks)
            return tasks

    return Changed(2)


WRONG: dict[str, Callable[[ScheduleTasks], object]] = {
    "`Changed.tasks(2)` cannot run. No rank runs bwd_i_1__1 (or bwd_1__1). Add it to rank 1": (
        lambda tasks: tasks[1].pop()
    ),
    "cannot run. Rank 0 runs fwd_0__1, but rank 0 has already run fwd_0__1": (
        lambda tasks: tasks[0].append(Task.make(0, 1, FWD))
    ),
    "Rank 1 runs bwd_w_1__0, but rank 1 has already run bwd_1__0, which includes": (
        lambda tasks: tasks[1].append(Task.make(1, 0, BWD_W))
    ),
    "rank 1 waits at bwd_1__1 for fwd_1__1, which rank 1 has not reached": (
        lambda tasks: tasks[1].reverse()
    ),
    "Rank 0 runs fwd_0__2, but there are only 2 microbatches": (
        lambda tasks: tasks[0].append(Task.make(0, 2, FWD))
    ),
    "Rank 1 runs fwd_2__0, but there are only 2 stages": (
        lambda tasks: tasks[1].append(Task.make(2, 0, FWD))
    ),
    "`Changed.tasks(2)[0]` has fwd_1__0, and `get_mpmd_idx(1)` is 1. Move the task": (
        lambda tasks: tasks[0].append(Task.make(1, 0, FWD))
    ),
    "`Changed.tasks(2)[0][4]` is 'fwd_0__0'. Give a `Task`, a `FusedTask` of tasks, or None": (
        lambda tasks: tasks[0].append("fwd_0__0")  # pyright: ignore[reportArgumentType]
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tasks_are_refused_by_name_before_anything_is_compiled(message: str):
    args = layers(2), *batch(2)
    step = jaxpp.mpmd_jit_with_loop(gradients(changed(WRONG[message])), groups(2))
    with pytest.raises(ScheduleError, match=re.escape(message)):
        step.lower(*args)


def test_a_list_that_is_no_list_of_lists_is_refused():
    class Flat(BaseSchedule):
        def tasks(self, n_mubatches: int) -> Any:
            return [Task.make(0, m, FWD) for m in range(n_mubatches)]

    with pytest.raises(ScheduleError, match=r"`Flat\.tasks\(1\)` returned .* one list of tasks"):
        as_schedule(Flat(1), 1)


def test_a_schedule_for_other_groups_is_refused():
    with pytest.raises(ValueError, match="The schedule is for 3 ranks, and the mesh has 2 groups"):
        jaxpp.mpmd_jit_with_loop(gradients(OneByOne(3)), groups(2)).lower(layers(3), *batch(2))


def test_a_rank_that_only_get_mpmd_idx_says_is_refused():
    class Turned(Std1F1B):
        def get_mpmd_idx(self, stage_id: int) -> int:
            return 1 - stage_id

    with pytest.raises(ScheduleError, match=r"has fwd_0__0, and `get_mpmd_idx\(0\)` is 1"):
        as_schedule(Turned(2), 2)


def test_a_subclass_that_changes_a_step_of_jaxpp_is_refused():
    with pytest.raises(TypeError, match=r"`Warm\.get_rank_warmup_ops` is a step by which JaxPP"):

        class Warm(Interleaved1F1B):  # pyright: ignore[reportUnusedClass]
            def get_rank_warmup_ops(self, mpmd_idx: int, n_microbatches: int) -> int:
                return mpmd_idx + n_microbatches


def test_a_schedule_that_a_subclass_builds_is_checked():
    class Built(Std1F1B):
        def schedule(self, num_microbatches: int) -> Schedule:
            return parse("0F0 0B0\n1F0")

    with pytest.raises(ScheduleError, match="No rank runs 1I0"):
        as_schedule(Built(2), 1)


def test_base_classes_are_abstract_and_dataclasses_inherit_from_them():
    with pytest.raises(TypeError, match="abstract"):
        InterleavedBaseSchedule(4, 2)  # pyright: ignore[reportAbstractUsage]

    @dataclass(frozen=True)
    class Warm(Std1F1B):
        warmup: int

        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "is_partial_bwd", True)

    assert Warm(4, 2).warmup == 2 and Warm(4, 2).is_partial_bwd and Warm(4, 2).mpmd_dim == 4
    assert not issubclass(Std1F1B, InterleavedBaseSchedule)
    assert issubclass(KimiK2, Interleaved1F1B)
    assert jaxpipe.mpmd.jaxpp.schedules.Task.make(0, 1, BWD).latency == 2
