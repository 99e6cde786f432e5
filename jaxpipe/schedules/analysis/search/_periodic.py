"""Orders with a period: every microbatch does what the one before did, one period later.

This is modulo scheduling, as compilers do it for loops (Rau, 1994, "Iterative modulo scheduling"),
and what the building blocks of controllable-memory schedules are (Qi et al., 2024, arXiv
2405.15362). A microbatch takes each stage as early as the rank is free in every period. Its way is
short, so it needs little memory; a period below the work of a rank starts more of them before the
first is back. Only the order matters: times follow from it.
"""

from random import Random

from .._simulate import Time
from ._problem import F, Problem
from ._rules import Rules


def periodic_rules(problem: Problem, *, period: Time, delay: Time, seed: int) -> Rules | None:
    """Returns strict rules with a period.

    `period`, and `delay`, the longest random delay behind an F or I, are fractions of the work of
    the busiest rank for a microbatch.
    """
    work = float(max(problem.work) / problem.num_microbatches)
    if work <= 0:
        return None
    starts = _offsets(problem, float(period * work), float(delay * work), Random(seed))
    return Rules(tuple(starts), float(period * work), problem.caps, strict=True)


def _offsets(problem: Problem, period: float, delay: float, random: Random) -> list[float]:
    """Returns [2 S] the start of the F's and I's of microbatch 0."""
    S, now = problem.num_stages, 0.0
    busy: list[list[tuple[float, float]]] = [[] for _ in range(problem.num_ranks)]
    starts = [0.0] * (2 * S)
    for code in (*range(S), *range(2 * S - 1, S - 1, -1)):
        op, stage = divmod(code, S)
        length = float(problem.times[op][stage])
        start = _first_free(busy[problem.rank_of[stage]], now, length, period)
        starts[code], now = start, start + length + delay * random.random()
        leaving = stage if op == F else stage - 1
        if 0 <= leaving < S - 1:
            now += float(problem.hops[leaving])
    return starts


def _first_free(busy: list[tuple[float, float]], now: float, length: float, period: float) -> float:
    """Returns, and takes, the first time at which a rank is free in every period; else `now`."""
    length = min(length, period)
    start, tries = now, 2 * len(busy) + 2
    while tries:
        phase = start % period
        clash = next(
            (end for begin, end in busy if _overlap(phase, length, begin, end, period)), None
        )
        if clash is None:
            break
        start += (clash - phase) % period or period
        tries -= 1
    else:
        start = now
    busy.append((start % period, start % period + length))
    return start


def _overlap(phase: float, length: float, begin: float, end: float, period: float) -> bool:
    small = 1e-9 * period
    return any(
        phase < end + shift - small and phase + length > begin + shift + small
        for shift in (-period, 0.0, period)
    )
