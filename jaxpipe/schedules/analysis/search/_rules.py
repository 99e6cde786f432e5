"""The parameters of an order: how urgent every action is, and when a rank waits.

The k-th action of a letter has the key `urgency + k step`; the lowest is the most urgent. A rank
may follow the keys to the letter, which is a periodic order, or choose among what is ready.
"""

from dataclasses import dataclass, replace
from math import inf
from random import Random

from .._simulate import Time
from ._problem import F, I, Problem, W, Words


@dataclass(frozen=True)
class Rules:
    """The parameters of an order.

    Attributes:
        urgency: [2 S] The keys of the F's and the I's of microbatch 0, in time.
        step: The number that each later microbatch adds to a key.
        limits: [num_ranks] The most bytes of microbatches between F and I. The rest of a rank's
            memory is for W's that wait.
        wait_forward: How long an F may delay a more urgent action that is on its way, as a fraction
            of the time of the F.
        wait_weight: The same of a W.
        margin: The time that is aimed at, in lower bounds: a rank that would lose more runs a W in
            any gap.
        strict: Whether every rank follows the keys to the letter. Then only `margin` counts beside
            them.
    """

    urgency: tuple[float, ...]
    step: float
    limits: tuple[Time, ...]
    wait_forward: Time = 0.5
    wait_weight: Time = 0
    margin: Time = inf
    strict: bool = False


def pace_rules(
    problem: Problem, *, pace: Time, wait_forward: Time, wait_weight: Time, reserve: Time
) -> Rules:
    """Returns rules by which actions are urgent that are far from the end of their microbatch.

    At a pace of 1 microbatches follow each other as fast as the busiest rank can; less starts more
    of them before the first ends. An F may delay a more urgent action by a fraction of its time,
    and a rank may have `reserve` microbatches less between F and I for every rank before it.
    """
    stages = range(problem.num_stages)
    to_end = [problem.times[I][s] + problem.up[s] for s in stages]
    forwards = [-float(problem.round_trip(s, s) + to_end[s]) for s in stages]
    limits = [
        max(size, cap - reserve * rank * size)
        for rank, (size, cap) in enumerate(zip(problem.footprint, problem.caps, strict=True))
    ]
    return Rules(
        (*forwards, *(-float(time) for time in to_end)),
        float(pace * _work(problem)),
        tuple(limits),
        wait_forward,
        wait_weight,
    )


def periodic_rules(problem: Problem, *, period: Time, delay: Time, seed: int) -> Rules | None:
    """Returns strict rules with a period: every microbatch does what the one before did, one later.

    This is modulo scheduling, as compilers do it for loops (Rau, 1994, "Iterative modulo
    scheduling"), and what the building blocks of controllable-memory schedules are (Qi et al.,
    2024, arXiv 2405.15362). A microbatch takes each stage as early as the rank is free in every
    period. Its way is short, so it needs little memory; a period below the work of a rank starts
    more of them before the first is back. Only the order matters: times follow from it.

    `period`, and `delay`, the longest random delay behind an F or I, are fractions of the work of
    the busiest rank for a microbatch.
    """
    work = float(_work(problem))
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


def strict_order(problem: Problem, rules: Rules) -> Words:
    """Returns [num_ranks] the codes of F's and I's in the order of their keys."""
    orders = []
    for stages in problem.stages:
        letters = [
            (rules.urgency[code] + microbatch * rules.step, code)
            for stage in stages
            for code in (stage, problem.num_stages + stage)
            for microbatch in range(problem.num_microbatches)
        ]
        orders.append([code for _, code in sorted(letters)])
    return orders


def fitted_rules(problem: Problem, words: Words) -> Rules:
    """Returns strict rules that come near to the order of words.

    The keys are the positions of the middle microbatch's letters, counted in the work before them.
    """
    middle, step = problem.num_microbatches // 2, float(_work(problem))
    lengths = [float(time) for times in problem.times for time in times]
    counts, keys = [0] * len(lengths), [0.0] * len(lengths)
    for word in words:
        now = 0.0
        for code in word:
            if counts[code] == middle:
                keys[code] = now - middle * step
            now += lengths[code]
            counts[code] += 1
    return Rules(tuple(keys[: W * problem.num_stages]), step, problem.caps, strict=True)


def mutated(problem: Problem, rules: Rules, random: Random) -> Rules:
    """Returns rules that differ a little: in keys, the step, limits or waiting."""
    choice = random.random()
    if choice < 0.2:
        return replace(
            rules,
            wait_forward=random.choice((0, 0.25, 0.5, 0.75, 1)),
            wait_weight=random.choice((0, 0.25, 0.5, 0.75)),
            margin=random.choice((1, 1.02, 1.05, inf)),
        )
    if choice < 0.3:
        return replace(rules, step=rules.step * 2 ** random.gauss(0, 0.3))
    if choice < 0.55 and not rules.strict:
        return replace(rules, limits=_other_limits(problem, rules.limits, random))
    return replace(rules, urgency=_other_urgency(problem, rules.urgency, random))


def _other_limits(problem: Problem, limits: tuple[Time, ...], random: Random) -> tuple[Time, ...]:
    """Returns limits of which one, or those on one side of a rank, are a stage more or less."""
    chosen, change = random.randrange(len(limits)), random.choice((-2, -1, 1, 2))
    side = random.choice((-1, 0, 1))
    changed = list(limits)
    for rank, limit in enumerate(limits):
        if rank == chosen or (rank - chosen) * side > 0:
            size = problem.stored[problem.stages[rank][0]]
            least, most = problem.footprint[rank], problem.caps[rank]
            changed[rank] = min(most, max(least, limit + change * size))
    return tuple(changed)


def _other_urgency(
    problem: Problem, urgency: tuple[float, ...], random: Random
) -> tuple[float, ...]:
    """Returns keys of which one, or those of an operation on one side of a stage, are changed."""
    S, op, side = problem.num_stages, random.choice((F, I)), random.choice((-1, 0, 0, 1))
    chosen, change = random.randrange(S), random.gauss(0, 1) * float(_work(problem))
    changed = list(urgency)
    for stage in range(S):
        if stage == chosen or (stage - chosen) * side > 0:
            changed[op * S + stage] += change
    return tuple(changed)


def _work(problem: Problem) -> Time:
    """Returns the time that the busiest rank computes for a microbatch."""
    return max(problem.work) / problem.num_microbatches
