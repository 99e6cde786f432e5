"""Lower bounds: no order of a problem's actions, whichever, takes less time.

Each argument is about one rank. It computes its work, and beyond that it waits:

* Before its first I. From its first F to its first I passes at least the way of a microbatch
  through all later stages. Only F's can fill that time, as many as the memory holds.
* After its last F. That microbatch has its way before it too, and then an I and a W. Only I's and
  W's of what the rank stores can fill that time, again as much as the memory holds.
* For memory. A microbatch is stored from its F to its I and W. If K fit at a time, the j-th that
  ends makes room for the (j + K)-th.

And what a rank does is not the end: its last I has its way to the first stage.

The first two are the argument of Zero Bubble about memory (Qi et al., 2023, arXiv 2401.10241), made
for any placement, unequal stages, and memory that I and W free in parts. With one chunk and memory
for p microbatches they add up to (p - 1)(F + I - W), the bubble of ZB-H1, which is thereby optimal.
"""

from functools import lru_cache
from math import floor, inf

from .._simulate import Time
from ._problem import F, I, Problem, W

_ROUNDING = 1e-9


@lru_cache(maxsize=64)
def lower_bound(problem: Problem) -> Time:
    """Returns a time that no schedule of a problem is faster than."""
    ranks = range(problem.num_ranks)
    heads = [problem.down[problem.stages[rank][0]] for rank in ranks]
    # Stage 0 begins the step, and its W ends what every other rank does.
    through = max(heads[rank] + _work_and_way(problem, rank) for rank in ranks)
    if problem.synchronous:
        return max(through, *(heads[rank] + _span(problem, rank) for rank in ranks))
    return max(through, *(_span(problem, rank) for rank in ranks))


def _span(problem: Problem, rank: int) -> Time:
    """Returns the least time from a rank's first start to its last end."""
    before, after = _wait_before(problem, rank), _wait_after(problem, rank)
    all_fit = problem.num_microbatches * problem.footprint[rank] <= problem.caps[rank]
    # If every F may come before the first I, the two waits may be one.
    wait = max(before, after) if all_fit else before + after
    return max(problem.work[rank] + wait, _residence(problem, rank), _area(problem, rank))


def _work_and_way(problem: Problem, rank: int) -> Time:
    """Returns the least time from a rank's first start to the end of stage 0's last W.

    The rank's last I comes behind all its F's and I's, and all its W's but those that the memory
    lets wait.
    """
    items = [(problem.kept[s], problem.times[W][s]) for s in problem.stages[rank]]
    waiting = _most_time(items, problem.caps[rank], problem.num_microbatches)
    way = problem.up[problem.stages[rank][0]]
    return problem.work[rank] - waiting + _wait_before(problem, rank) + way


def _wait_before(problem: Problem, rank: int) -> Time:
    """Returns the time between first F and first I that F's cannot fill."""
    stages = problem.stages[rank]
    items = [(problem.stored[s], problem.times[F][s]) for s in stages]
    filled = _most_time(items, problem.caps[rank], problem.num_microbatches)
    return max(0, problem.round_trip(stages[0], stages[-1]) - filled)


def _wait_after(problem: Problem, rank: int) -> Time:
    """Returns the time behind the last F that I's and W's cannot fill."""
    stages, (f, i, w) = problem.stages[rank], problem.times
    items = [(problem.stored[s], i[s] + w[s]) for s in stages]
    items += [(problem.kept[s], w[s]) for s in stages if problem.kept[s] < problem.stored[s]]
    filled = _most_time(items, problem.caps[rank], problem.num_microbatches)
    way = problem.round_trip(stages[-1], stages[0]) - f[stages[-1]]
    return max(0, way + i[stages[0]] + w[stages[0]] - filled)


def _residence(problem: Problem, rank: int) -> Time:
    """Returns the span of a rank whose memory holds K microbatches of its first stage."""
    stage, (f, i, w) = problem.stages[rank][0], problem.times
    to_input = problem.round_trip(stage, stage) + i[stage]
    whole = _in_turns(problem, rank, problem.kept[stage], to_input + w[stage], f[stage])
    return max(
        whole, w[stage] + _in_turns(problem, rank, problem.stored[stage], to_input, f[stage])
    )


def _in_turns(problem: Problem, rank: int, size: Time, life: Time, start: Time) -> Time:
    """Returns the time in which all microbatches of some bytes live, if each takes its turn."""
    if size <= 0:
        return 0
    fitting = max(1, floor(problem.caps[rank] / size + _ROUNDING))
    turns, rest = divmod(problem.num_microbatches - 1, fitting)
    return (turns + 1) * life + rest * start


def _area(problem: Problem, rank: int) -> Time:
    """Returns the time in which a rank can store all its bytes as long as they live."""
    stages, cap = problem.stages[rank], problem.caps[rank]
    sizes = {problem.stored[s] for s in stages} | {problem.kept[s] for s in stages}
    if len(sizes) == 1 and 0 not in sizes:
        cap = floor(cap / min(sizes) + _ROUNDING) * min(sizes)
    total: Time = 0
    for s in stages:
        life = problem.round_trip(s, s) + problem.times[I][s]
        total += problem.stored[s] * life + problem.kept[s] * problem.times[W][s]
    return problem.num_microbatches * total / cap if cap else 0


def _most_time(items: list[tuple[Time, Time]], room: Time, most: int) -> Time:
    """Returns the most time of items that fit into a room, fractions of them included."""
    sizes = {size for size, _ in items}
    if len(sizes) == 1 and 0 not in sizes:  # equal items fit as wholes
        room = floor(room / min(sizes) + _ROUNDING) * min(sizes)
    total: Time = 0
    for size, time in sorted(items, key=lambda it: it[1] / it[0] if it[0] else inf, reverse=True):
        count = most if size * most <= room else room / size
        total += count * time
        room -= count * size
    return total
