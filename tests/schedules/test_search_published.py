"""The search against Zero Bubble's published profiles and against its own bound, at random."""

import csv
import random
from fractions import Fraction
from pathlib import Path

import pytest

from jaxpipe.schedules import (
    FAMILIES,
    Costs,
    activation_bytes,
    build,
    check,
    makespan,
    peak_activations,
    search,
    simulate,
)
from jaxpipe.schedules.analysis import busy_times, parallelogram_bubble
from jaxpipe.schedules.analysis.search import ActivationMemory, Candidate, rank_of_each_stage
from jaxpipe.schedules.language import num_slices

# Qi et al., 2023, arXiv 2401.10241, tables 9 and 5: ranks, microbatches, the milliseconds of F, I,
# W and a transfer, and the bubbles of ZB-1p and ZB-2p.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 0.1585, 0.0433),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 0.1242, 0.0039),
    (8, 64, (18.546, 18.097, 9.321, 0.762), 0.0674, 0.0026),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 0.1397, 0.0066),
    (16, 64, (11.307, 11.254, 8.101, 0.379), 0.1088, 0.0054),
    (16, 128, (11.325, 11.308, 8.109, 0.378), 0.0576, 0.0028),
]


def is_sound(found: Candidate, costs: Costs, cap: int) -> None:
    """Checks a candidate whose memory is in microbatches of a whole rank."""
    schedule = check(found.schedule)
    pieces = schedule.num_stages * num_slices(schedule) // len(schedule.programs)
    assert Fraction(max(peak_activations(schedule)), pieces) == found.peak <= cap
    parts = (costs.forward, costs.input, costs.weight)
    timeline = simulate(schedule, Costs(*parts, transfer=costs.transfer * pieces))
    assert makespan(timeline) / pieces == pytest.approx(found.makespan)
    span = (parallelogram_bubble(timeline) + max(busy_times(timeline))) / pieces
    assert found.step_time == pytest.approx(found.makespan) or found.step_time == (
        pytest.approx(span)
    )
    assert found.bound <= found.step_time * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "microbatches", "times", "at_p", "at_2p"), PUBLISHED)
def test_bubbles_are_at_most_the_published(
    ranks: int, microbatches: int, times: tuple[float, ...], at_p: float, at_2p: float
):
    costs, work = Costs(*times[:3], transfer=times[3]), microbatches * sum(times[:3])
    one = simulate(build("zero_bubble_h1", ranks=ranks, microbatches=microbatches), costs)
    for cap, published in ((ranks, at_p), (2 * ranks, at_2p)):
        found = search(ranks, microbatches, costs, cap, synchronous=False)
        is_sound(found, costs, cap)
        assert 1 - work / found.step_time <= published
        assert search(ranks, microbatches, costs, cap).makespan <= makespan(one)


def test_a_v_needs_less_than_the_published_bubble():
    ranks, microbatches, times, at_p, at_2p = PUBLISHED[0]
    halves = Costs(*(time / 2 for time in times[:3]), transfer=times[3])
    placement = rank_of_each_stage("v", ranks, 2)
    for cap, published in ((2 * ranks, at_p), (4 * ranks, at_2p)):
        found = search(ranks, microbatches, halves, cap, placement=placement, synchronous=False)
        assert found.peak == max(peak_activations(check(found.schedule))) <= cap
        assert 1 - microbatches * sum(times[:3]) / found.step_time <= published


def test_zero_bubble_h1_is_optimal_for_its_memory_and_placement():
    for ranks, microbatches, times, *_ in PUBLISHED[:2]:
        costs = Costs(*times[:3], transfer=times[3])
        found = search(ranks, microbatches, costs, ranks, placement=range(ranks))
        named = simulate(build("zero_bubble_h1", ranks=ranks, microbatches=microbatches), costs)
        assert found.gap < 1e-9
        assert found.makespan == pytest.approx(makespan(named))


def test_the_published_bubble_of_zb_2p_is_optimal_for_its_bytes():
    """Its generator counts 34 h + 5 a s bytes from F to I, and 32 h to W."""
    ranks, microbatches, times, _, published = PUBLISHED[0]
    stored, kept = 34 * 2304 + 5 * 24 * 1024, 32 * 2304
    found = search(
        ranks,
        microbatches,
        Costs(*times[:3], transfer=times[3]),
        2 * ranks * stored,
        placement=range(ranks),
        memory=ActivationMemory(stored, kept),
        synchronous=False,
    )
    sizes = [stored] * ranks, [kept] * ranks
    assert max(activation_bytes(found.schedule, *sizes)) == found.peak <= 2 * ranks * stored
    assert 1 - microbatches * sum(times[:3]) / found.bound == pytest.approx(published, abs=1e-4)
    assert found.gap < 1e-3


@pytest.mark.parametrize("kind", ["straight", "loop", "v"])
def test_uneven_stages_and_caps_per_rank_are_kept(kind: str):
    rank_of = rank_of_each_stage(kind, 3, 1 if kind == "straight" else 2)
    stages = range(len(rank_of))
    costs = Costs(*(tuple(5 + s * n % 4 for s in stages) for n in (1, 2, 3)), transfer=1)
    stored, kept = [6 + s % 3 for s in stages], [2 + s % 2 for s in stages]
    caps = (60, 45, 30)
    memory = ActivationMemory(tuple(stored), tuple(kept))
    for synchronous in (True, False):
        found = search(3, 7, costs, caps, placement=rank_of, memory=memory, synchronous=synchronous)
        peaks = activation_bytes(check(found.schedule), stored, kept)
        assert all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))
        timeline = simulate(found.schedule, costs)
        span = parallelogram_bubble(timeline) + max(busy_times(timeline))
        assert found.bound <= found.step_time == (makespan(timeline) if synchronous else span)


SEEDS = [s if s in (0, 1, 2, 5) else pytest.param(s, marks=pytest.mark.slow) for s in range(1000)]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_family_within_a_random_cap_is_faster(seed: int):
    source = random.Random(seed)
    ranks = source.randint(1, 3 if seed < 3 else 16)
    microbatches = source.randint(1, 3 * ranks)
    f, i, w = (source.randint(1, 20) for _ in range(3))
    costs = Costs(f, i, w, transfer=source.choice((0, 0, 1, 3)))
    cap = source.randint(1, 2 * ranks)
    found = search(ranks, microbatches, costs, cap, max_chunks=2)
    is_sound(found, costs, cap)
    for name in FAMILIES:
        if name == "seq1f1b":
            continue
        try:
            schedule = build(name, ranks=ranks, microbatches=microbatches)
        except ValueError:
            continue
        pieces = schedule.num_stages // ranks
        if max(peak_activations(schedule)) <= cap * pieces:
            of_a_stage = Costs(f, i, w, transfer=costs.transfer * pieces)
            assert found.makespan <= makespan(simulate(schedule, of_a_stage)) / pieces + 1e-9


def optimal_rows() -> list[dict[str, str]]:
    """Problems of up to 4 ranks with their optimal step time; optimal.py writes them."""
    with (Path(__file__).parent / "optimal.csv").open() as file:
        return list(csv.DictReader(file))


def gaps_to_optimum(rows: list[dict[str, str]]) -> list[float]:
    """Searches problems; returns how far the step times are above the optima, as fractions."""
    gaps = []
    for row in rows:
        ranks, kind = int(row["ranks"]), row["placement"]
        found = search(
            ranks,
            int(row["microbatches"]),
            Costs(
                int(row["forward"]),
                int(row["input"]),
                int(row["weight"]),
                transfer=int(row["transfer"]),
            ),
            int(row["cap"]),
            placement=rank_of_each_stage(kind, ranks, 1 if kind == "straight" else 2),
            memory=ActivationMemory(int(row["stored"]), int(row["kept"])),
            synchronous=row["synchronous"] == "1",
        )
        optimum = int(row["optimum"])
        assert found.bound <= optimum <= found.step_time, row
        gaps.append(found.step_time / optimum - 1)
    return gaps


def test_nine_of_ten_small_problems_are_searched_to_their_optimum():
    gaps = gaps_to_optimum(optimal_rows()[:10])
    assert gaps.count(0) >= 9 and max(gaps) < 0.05


@pytest.mark.slow
def test_most_small_problems_are_searched_to_their_optimum():
    gaps = gaps_to_optimum(optimal_rows())
    assert sum(gap == 0 for gap in gaps) >= 0.95 * len(gaps)
    assert sum(gaps) / len(gaps) < 0.003
