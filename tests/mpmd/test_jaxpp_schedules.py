"""The lists of JaxPP's tutorial, and that its names stand for the schedules they say."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

from jaxpipe.mpmd.api import FusedTask, as_schedule, tasks_of
from jaxpipe.mpmd.jaxpp import (
    DualPipeV,
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    InterleavedGPipe,
    KimiK2,
    NamedSchedule,
    Std1F1B,
    ZeroBubble,
)
from jaxpipe.schedules import (
    Action,
    FusedPair,
    Op,
    Schedule,
    ScheduleError,
    build,
    check,
    num_ranks,
    parse,
)
from jaxpipe.schedules.language import enumerate_actions, without_fused_pairs
from mpmd.small import batch, compare, gradients, groups, layers


def printed(schedule: NamedSchedule, num_microbatches: int) -> list[list[str]]:
    return [[str(task) for task in rank] for rank in schedule.tasks(num_microbatches)]


def words(text: str) -> list[str]:
    return re.findall(r"FusedTask\(.*?\)|\S+", text)


def test_words_keep_a_fused_task_whole():
    assert words("fwd_3__0 FusedTask(fwd_7__0, bwd_7__0)") == [
        "fwd_3__0",
        "FusedTask(fwd_7__0, bwd_7__0)",
    ]


# In [36], [37], [40], [41] of the tutorial: 4 ranks, 4 microbatches.
TUTORIAL = {
    (4, 2): "fwd_2__0 fwd_2__1 fwd_2__2 bwd_2__0 fwd_2__3 bwd_2__1 bwd_2__2 bwd_2__3",
    (4, 3): "FusedTask(fwd_3__0, bwd_3__0) FusedTask(fwd_3__1, bwd_3__1) "
    "FusedTask(fwd_3__2, bwd_3__2) FusedTask(fwd_3__3, bwd_3__3)",
    (8, 0): "fwd_0__0 fwd_0__1 fwd_0__2 fwd_0__3 fwd_4__0 fwd_4__1 fwd_4__2 fwd_4__3 "
    "bwd_4__0 bwd_4__1 bwd_4__2 bwd_4__3 bwd_0__0 bwd_0__1 bwd_0__2 bwd_0__3",
    (8, 3): "fwd_3__0 fwd_3__1 fwd_3__2 fwd_3__3 FusedTask(fwd_7__0, bwd_7__0) "
    "FusedTask(fwd_7__1, bwd_7__1) FusedTask(fwd_7__2, bwd_7__2) FusedTask(fwd_7__3, bwd_7__3) "
    "bwd_3__0 bwd_3__1 bwd_3__2 bwd_3__3",
}


@pytest.mark.parametrize(("num_stages", "rank"), TUTORIAL)
def test_tasks_print_as_in_the_tutorial(num_stages: int, rank: int):
    schedule = Interleaved1F1B(num_stages=num_stages, mpmd_dim=4)
    assert [str(e) for e in schedule.tasks(4)[rank]] == words(TUTORIAL[num_stages, rank])


def test_halves_of_a_backward_print_apart():
    assert printed(ZeroBubble(3), 3)[1] == words(
        "fwd_1__0 fwd_1__1 bwd_i_1__0 fwd_1__2 bwd_i_1__1 bwd_w_1__0 bwd_i_1__2 bwd_w_1__1 "
        "bwd_w_1__2"
    )


def test_pairs_of_dualpipev_print_as_fused_tasks():
    assert printed(DualPipeV(4), 4)[0] == words(
        "fwd_0__0 fwd_0__1 fwd_0__2 fwd_3__0 bwd_i_3__0 bwd_w_3__0 fwd_3__1 "
        "FusedTask(fwd_0__3, bwd_3__1) FusedTask(fwd_3__2, bwd_0__0) bwd_3__2 "
        "FusedTask(fwd_3__3, bwd_0__1) bwd_3__3 bwd_i_0__2 bwd_w_0__2 bwd_i_0__3 bwd_w_0__3"
    )


def test_a_slice_prints_behind_its_microbatch():
    sliced = build("seq1f1b", ranks=2, microbatches=1)
    assert str(tasks_of(sliced)[0][0]) == "fwd_0__0s0"


# The classes, with stages per rank.


class Case(NamedTuple):
    make: Callable[[int], NamedSchedule]  # of the number of ranks
    name: str  # in jaxpipe.schedules
    options: dict[str, int]


CASES = {
    "GPipe": Case(GPipe, "gpipe", {}),
    "Std1F1B": Case(Std1F1B, "1f1b", {}),
    "Eager1F1B": Case(Eager1F1B, "eager_1f1b", {}),
    "ZeroBubble": Case(ZeroBubble, "zero_bubble_h1", {}),
    "DualPipeV": Case(lambda p: DualPipeV(2 * p), "dualpipev", {}),
}
for v in (1, 2, 3):
    interleaved = {
        "InterleavedGPipe": (InterleavedGPipe, "interleaved_gpipe"),
        "Interleaved1F1B": (Interleaved1F1B, "interleaved_1f1b"),
        "KimiK2": (KimiK2, "kimi_k2"),
    }
    for kind, (cls, name) in interleaved.items():
        CASES[f"{kind}-{v}"] = Case(lambda p, cls=cls, v=v: cls(v * p, p), name, {"chunks": v})


@pytest.mark.parametrize("num_microbatches", [8, 10, 12])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_name_stands_for_its_builder(case: str, ranks: int, num_microbatches: int):
    make, name, options = CASES[case]
    ours = make(ranks).schedule(num_microbatches)
    assert ours == check(build(name, ranks=ranks, microbatches=num_microbatches, **options))
    assert (num_ranks(ours), ours.num_stages) == (make(ranks).mpmd_dim, make(ranks).num_stages)


@pytest.mark.parametrize("case", CASES)
def test_tasks_are_the_actions_of_the_schedule(case: str):
    schedule = CASES[case].make(4)
    unfused = [
        (rank, part.action)
        for rank, tasks in enumerate(schedule.tasks(8))
        for task in tasks
        for part in (task if isinstance(task, FusedTask) else (task,))
        if part is not None
    ]
    assert unfused == list(enumerate_actions(schedule.schedule(8)))


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith(("-1", "-3"))])
def test_a_schedule_of_every_name_computes_what_jit_does(case: str):
    schedule = CASES[case].make(2)
    data = batch(6)
    compare(gradients(schedule), groups(2), layers(schedule.num_stages), *data)


def test_interleaved_1f1b_of_one_stage_per_rank_is_eager_1f1b():
    assert Interleaved1F1B(4, 4).schedule(6) == Eager1F1B(4).schedule(6)


@pytest.mark.parametrize("cls", [InterleavedGPipe, Interleaved1F1B, KimiK2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_interleaved_schedules_take_any_number_of_microbatches(
    cls: Callable[[int, int], NamedSchedule], ranks: int
):
    for num_microbatches in range(1, 4 * ranks):
        assert cls(2 * ranks, ranks).schedule(num_microbatches).num_microbatches == num_microbatches


def test_the_last_group_of_interleaved_gpipe_takes_the_rest():
    assert printed(InterleavedGPipe(4, 2), 5)[0][:10] == words(
        "fwd_0__0 fwd_0__1 fwd_0__2 fwd_2__0 fwd_2__1 fwd_2__2 fwd_0__3 fwd_0__4 fwd_2__3 fwd_2__4"
    )


# fuse_steady_state.


def test_a_fused_steady_state_reads_warmup_then_pairs_then_cooldown():
    assert printed(Interleaved1F1B(4, 4, fuse_steady_state=True), 5) == [
        words(text)
        for text in (
            "fwd_0__0 fwd_0__1 fwd_0__2 fwd_0__3 fwd_0__4 "
            "bwd_0__0 bwd_0__1 bwd_0__2 bwd_0__3 bwd_0__4",
            "fwd_1__0 fwd_1__1 fwd_1__2 fwd_1__3 FusedTask(fwd_1__4, bwd_1__0) "
            "bwd_1__1 bwd_1__2 bwd_1__3 bwd_1__4",
            "fwd_2__0 fwd_2__1 FusedTask(fwd_2__2, bwd_2__0) FusedTask(fwd_2__3, bwd_2__1) "
            "FusedTask(fwd_2__4, bwd_2__2) bwd_2__3 bwd_2__4",
            "FusedTask(fwd_3__0, bwd_3__0) FusedTask(fwd_3__1, bwd_3__1) "
            "FusedTask(fwd_3__2, bwd_3__2) FusedTask(fwd_3__3, bwd_3__3) "
            "FusedTask(fwd_3__4, bwd_3__4)",
        )
    ]


def test_kimi_k2_fuses_different_microbatches_on_the_last_rank_too():
    assert printed(KimiK2(4, 2, True), 2)[1] == words(
        "fwd_1__0 fwd_1__1 fwd_3__0 FusedTask(fwd_3__1, bwd_3__0) bwd_3__1 bwd_1__0 bwd_1__1"
    )
    assert printed(KimiK2(4, 2), 2)[1][3:5] == ["fwd_3__1", "bwd_3__0"]


@pytest.mark.parametrize("cls", [Interleaved1F1B, KimiK2])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fusing_moves_nothing_and_never_deadlocks(
    cls: type[Interleaved1F1B | KimiK2], num_chunks: int, ranks: int
):
    for num_microbatches in range(1, 3 * ranks + 2):
        plain = cls(num_chunks * ranks, ranks).schedule(num_microbatches)
        fused = cls(num_chunks * ranks, ranks, fuse_steady_state=True).schedule(num_microbatches)
        assert without_fused_pairs(check(fused)) == plain
        assert not any(
            isinstance(step, FusedPair) for program in plain.programs for step in program
        )


# as_schedule.


def test_as_schedule_takes_a_name_and_a_schedule():
    named = Std1F1B(2)
    assert as_schedule(named, 4) == named.schedule(4) == as_schedule(named.schedule(4), 4)


def test_as_schedule_refuses_another_number_of_microbatches():
    message = (
        "`schedule` is for 4 microbatches, but `num_microbatches` is 8. Build it for 8, or pass a "
        "schedule that fits any number, such as Std1F1B(num_stages)."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        as_schedule(Std1F1B(2).schedule(4), 8)


def test_as_schedule_checks_a_schedule():
    without_backward = Schedule(1, 1, ((Action(0, Op.F, 0),),))
    with pytest.raises(ScheduleError, match="No rank runs 0I0"):
        as_schedule(without_backward, 1)
    assert as_schedule(parse("0F0 0B0"), 1) == parse("0F0 0B0")


# What users read and get wrong.


def test_a_schedule_prints_its_arguments_and_is_a_value():
    assert repr(DualPipeV(8)) == "DualPipeV(num_stages=8, mpmd_dim=4)"
    assert repr(Interleaved1F1B(8, 4)) == (
        "Interleaved1F1B(num_stages=8, mpmd_dim=4, fuse_steady_state=False)"
    )
    assert GPipe(4) == GPipe(4, mpmd_dim=4) != Std1F1B(4)
    assert hash(GPipe(4)) == hash(GPipe(4, mpmd_dim=4))


ONE_STAGE_PER_RANK = "has one stage on each rank. Leave it out, or choose InterleavedGPipe"
ERRORS = {
    "`num_stages` is 0. Give at least 1.": lambda: GPipe(0),
    "`num_stages` is -2. Give at least 1.": lambda: DualPipeV(-2),
    "`mpmd_dim` is 0. Give at least 1.": lambda: Interleaved1F1B(4, 0),
    "`num_stages` is 6, which can not be evenly divided by `mpmd_dim`, 4. Give every rank the": (
        lambda: KimiK2(6, 4)
    ),
    f"`mpmd_dim` is 2 for 4 stages, but Eager1F1B {ONE_STAGE_PER_RANK}": lambda: Eager1F1B(4, 2),
    f"`mpmd_dim` is 3 for 4 stages, but Std1F1B {ONE_STAGE_PER_RANK}": lambda: Std1F1B(4, 3),
    "`num_stages` is 7 and `mpmd_dim` 3, but DualPipeV has two stages on each rank. Give an even": (
        lambda: DualPipeV(7)
    ),
    "`num_stages` is 4 and `mpmd_dim` 4, but DualPipeV has two": lambda: DualPipeV(4, 4),
    "`num_microbatches` is 5. Give at least 6: DualPipeV requires n_mubatches=5": (
        lambda: DualPipeV(6).tasks(5)
    ),
    "`num_microbatches` is 2, fewer than 4 stages. Give at least 4": (
        lambda: ZeroBubble(4).schedule(2)
    ),
    "`num_microbatches` is 0. Give at least 1.": lambda: InterleavedGPipe(4, 2).tasks(0),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument_and_say_what_to_do(message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        ERRORS[message]()
