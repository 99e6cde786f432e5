"""The closed forms of the papers: p ranks, m microbatches, v chunks, r rank; F, I, W per chunk."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from jaxpipe.schedules import Costs, Op, Schedule, build, makespan, peak_activations, simulate
from jaxpipe.schedules.analysis import parallelogram_bubble, rectangular_bubble
from jaxpipe.schedules.language import actions_of

SIZES = [(4, 8), (4, 12), (8, 16)]
COSTS = [(1, 1, 1), (10, 10, 10), (10, 12, 8), (10, 14, 9), (10, 10, 5), (12, 10, 10)]
EQUAL = [(1, 1, 1), (10, 10, 10)]

Bubble = Callable[[int, int, int, int], int]


def fill_and_drain(p: int, F: int, I: int, W: int) -> int:  # noqa: E741
    return (p - 1) * (F + I + W)


def less_a_weight(p: int, F: int, I: int, W: int) -> int:  # noqa: E741
    return (p - 1) * (F + I - W)


def bubbles(
    name: str, costs: tuple[int, int, int], **options: int
) -> list[tuple[int, int | float, int | float]]:
    """For every size: p, the rectangular bubble and the parallelogram one."""
    found = []
    for p, m in SIZES:
        timeline = simulate(build(name, ranks=p, microbatches=m, **options), Costs(*costs))
        found.append((p, rectangular_bubble(timeline), parallelogram_bubble(timeline)))
    return found


def name_or_options(value: object) -> str:
    """Part of a test's name: a formula has none, its address would differ from run to run."""
    return "formula" if callable(value) else str(value)


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize(
    ("name", "options", "bubble"),
    [
        ("gpipe", {}, fill_and_drain),
        ("1f1b", {}, fill_and_drain),
        ("eager_1f1b", {}, fill_and_drain),
        ("interleaved_1f1b", {"chunks": 2}, fill_and_drain),
        ("interleaved_1f1b", {"chunks": 3}, fill_and_drain),
        ("kimi_k2", {"chunks": 2}, fill_and_drain),
        ("looped_bfs", {"chunks": 2}, fill_and_drain),
        ("interleaved_gpipe", {"chunks": 2}, fill_and_drain),
        ("circular", {"chunks": 2}, fill_and_drain),
        ("seq1f1b", {"slices": 2}, fill_and_drain),
        ("seq1f1b", {"slices": 3}, fill_and_drain),
        ("zero_bubble_h1", {}, less_a_weight),
        ("interleaved_zero_bubble", {"chunks": 2}, less_a_weight),
        ("interleaved_zero_bubble", {"chunks": 3}, less_a_weight),
    ],
    ids=name_or_options,
)
def test_the_rectangular_bubble_is_the_formula(
    name: str, options: dict[str, int], bubble: Bubble, costs: tuple[int, int, int]
):
    for p, rectangular, _ in bubbles(name, costs, **options):
        assert rectangular == bubble(p, *costs)


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_zero_bubble_h2_has_the_parallelogram_bubble_of_its_formula(costs: tuple[int, int, int]):
    F, I, W = costs  # noqa: E741
    for p, rectangular, parallelogram in bubbles("zero_bubble_h2", costs):
        assert parallelogram == max(0, (p - 1) * (F + I - 2 * W))
        if F == I == W:
            assert rectangular == (p - 1) * F


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_a_spare_microbatch_lets_zero_bubble_h2_do_better_than_its_formula(costs):
    for (_, _, with_spare), (_, _, without) in zip(
        bubbles("zero_bubble_h2", costs, spare=1), bubbles("zero_bubble_h2", costs), strict=True
    ):
        assert with_spare < without if without else with_spare == 0


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_zbv_has_no_parallelogram_bubble_if_and_only_if_costs_are_equal(costs):
    F, I, W = costs  # noqa: E741
    for p, rectangular, parallelogram in bubbles("zbv", costs):
        assert (parallelogram == 0) == (F == I == W)
        if F == I == W:
            assert rectangular == (p - 1) * F


@pytest.mark.parametrize(("F", "I", "W"), EQUAL)
@pytest.mark.parametrize(
    ("name", "of_p"),
    [("v_half", {4: 5, 8: 17}), ("v_min", {4: 11, 8: 27}), ("grouped_interleaved", {4: 8, 8: 18})],
)
def test_at_equal_costs_the_bubble_is_the_tabulated(name: str, of_p: dict[int, int], F, I, W):  # noqa: E741
    for p, rectangular, _ in bubbles(name, (F, I, W)):
        assert rectangular == of_p[p] * F


@pytest.mark.parametrize(("p", "bubble"), [(4, 6), (8, 14)])
def test_grouped_interleaved_with_full_groups_has_the_tabulated_bubble(p: int, bubble: int):
    schedule = build("grouped_interleaved", ranks=p, microbatches=2 * p, group=p)
    assert rectangular_bubble(simulate(schedule, Costs())) == bubble


def test_v_min_waits_longer_with_every_microbatch_if_costs_are_unequal():
    def bubble(m: int, costs: Costs) -> int | float:
        return rectangular_bubble(simulate(build("v_min", ranks=4, microbatches=m), costs))

    assert bubble(8, Costs()) == bubble(16, Costs())
    assert bubble(8, Costs(10, 14, 9)) < bubble(12, Costs(10, 14, 9)) < bubble(16, Costs(10, 14, 9))


@pytest.mark.parametrize("costs", [c for c in COSTS if c[0] == c[1]], ids=str)
@pytest.mark.parametrize(("name", "ends"), [("dualpipe", 1), ("dualpipev", 2)])
def test_dualpipe_has_deepseeks_bubble(name: str, ends: int, costs: tuple[int, int, int]):
    F, I, W = costs  # noqa: E741
    pair, B = F + I + W, I + W
    for p, rectangular, _ in bubbles(name, costs):
        assert rectangular == (ends * p // 2 - 1) * (pair + B - 3 * W)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(
    ("name", "options", "peak"),
    [
        ("gpipe", {}, lambda p, m, r: m),
        ("1f1b", {}, lambda p, m, r: min(m, p - r)),
        ("eager_1f1b", {}, lambda p, m, r: min(m, 2 * (p - r) - 1)),
        *(
            (
                "interleaved_1f1b",
                {"chunks": v},
                lambda p, m, r, v=v: _group(p, m) * (v - 1) + 2 * (p - 1 - r) + 1,
            )
            for v in (1, 2, 3)
        ),
        *(
            (
                "kimi_k2",
                {"chunks": v},
                lambda p, m, r, v=v: _group(p, m) * (v - 1) + 2 * (p - 1 - r) + 2,
            )
            for v in (1, 2, 3)
        ),
        *(
            (n, {"chunks": v}, lambda p, m, r, v=v: v * m)
            for n in ("looped_bfs", "circular")
            for v in (1, 3)
        ),
        ("interleaved_gpipe", {}, lambda p, m, r: 2 * m),
        ("zero_bubble_h1", {}, lambda p, m, r: p),
        ("zero_bubble_h2", {}, lambda p, m, r: 2 * p - 1),
        *(
            ("interleaved_zero_bubble", {"chunks": v}, lambda p, m, r, v=v: v * p)
            for v in (1, 2, 3)
        ),
        ("zbv", {}, lambda p, m, r: 2 * p),
        ("dualpipe", {}, lambda p, m, r: p + 1),
        ("dualpipev", {}, lambda p, m, r: 2 * p + 1),
        *(("seq1f1b", {"slices": s}, lambda p, m, r, s=s: p - 1 - r + s) for s in (1, 2, 3)),
    ],
    ids=name_or_options,
)
def test_the_peak_of_live_activations_is_the_formula(name, options, peak, p: int, m: int):
    schedule = build(name, ranks=p, microbatches=m, **options)
    assert peak_activations(schedule) == tuple(peak(p, m, r) for r in range(p))


def _group(p: int, m: int) -> int:
    return m // max(1, m // p)


@pytest.mark.parametrize(("p", "m"), [*SIZES, (3, 9), (5, 10), (6, 12), (7, 14)])
def test_v_schedules_hold_a_half_and_a_third_of_1f1b_at_most(p: int, m: int):
    half = peak_activations(build("v_half", ranks=p, microbatches=m))
    third = peak_activations(build("v_min", ranks=p, microbatches=m))
    assert max(half) == 2 * ((p + 2) // 2)
    assert max(third) == 2 * ((p + 4) // 3)


@pytest.mark.parametrize(("group", "peaks"), [(2, (6, 5, 4, 3)), (4, (8, 7, 6, 5))])
def test_grouped_interleaved_holds_the_tabulated_peaks(group: int, peaks: tuple[int, ...]):
    schedule = build("grouped_interleaved", ranks=4, microbatches=8, group=group)
    assert peak_activations(schedule) == peaks


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_the_forward_of_circular_takes_its_number_of_iterations(delay: int, v: int):
    for p, m in SIZES:
        only_forward = Costs(forward=1, input=0, weight=0, transfer=delay - 1)
        timeline = simulate(build("circular", ranks=p, microbatches=m, chunks=v), only_forward)
        ends = [t.end for row in timeline.rows for t in row if str(t.step).count("F")]
        assert max(ends) == m * v + delay * (p - 1)


def test_eager_1f1b_hides_a_transfer_that_1f1b_waits_for():
    costs = Costs(forward=2, input=1, weight=1, transfer=1)
    eager, plain = (build(name, ranks=4, microbatches=16) for name in ("eager_1f1b", "1f1b"))
    assert makespan(simulate(eager, costs)) + 16 < makespan(simulate(plain, costs))


def test_zero_bubble_h2_hides_a_transfer_it_was_told_of():
    def bubble(latency: int) -> int | float:
        schedule = build("zero_bubble_h2", ranks=4, microbatches=24, latency=latency)
        return parallelogram_bubble(simulate(schedule, Costs(transfer=1)))

    assert bubble(latency=1) == 0 < bubble(latency=0)


def test_kimi_k2_never_puts_a_backward_beside_its_own_forward():
    def together(name: str) -> int:
        schedule: Schedule = build(name, ranks=4, microbatches=8)
        last = [action for step in schedule.programs[-1] for action in actions_of(step)]
        return sum(
            a.op is Op.F and b.op is Op.B and (a.stage, a.microbatch) == (b.stage, b.microbatch)
            for a, b in pairwise(last)
        )

    assert together("interleaved_1f1b") == 8
    assert together("kimi_k2") == 0
