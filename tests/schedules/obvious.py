"""The rules of a schedule once more, as a graph, to compare with.

A node is an action; an edge says what must end before. A pair is one node.
"""

from functools import cache
from graphlib import CycleError, TopologicalSorter

from jaxpipe.schedules import Action, Op, Schedule
from jaxpipe.schedules.language import actions_of, enumerate_actions, num_slices


def kinds(op: Op) -> str:
    return {"F": "F", "B": "IW", "I": "I", "W": "W"}[op.value]


def is_complete(schedule: Schedule) -> bool:
    """Every F, I and W once, those of a microbatch on one rank."""
    found = [
        (a.stage, kind, a.microbatch, a.slice)
        for _, a in enumerate_actions(schedule)
        for kind in kinds(a.op)
    ]
    slices = (
        range(num_slices(schedule))
        if any(a.slice is not None for _, a in enumerate_actions(schedule))
        else [None]
    )
    wanted = {
        (stage, kind, m, s)
        for stage in range(schedule.num_stages)
        for kind in "FIW"
        for m in range(schedule.num_microbatches)
        for s in slices
    }
    homes = {(a.stage, a.microbatch, a.slice, rank) for rank, a in enumerate_actions(schedule)}
    return len(found) == len(wanted) and set(found) == wanted and 3 * len(homes) == len(wanted)


def graph(schedule: Schedule) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """(rank, place) of every step to those of the steps it comes after."""
    where = {
        (a.stage, kind, a.microbatch, a.slice): (rank, place)
        for rank, program in enumerate(schedule.programs)
        for place, step in enumerate(program)
        for a in actions_of(step)
        for kind in kinds(a.op)
    }

    def before(a: Action) -> set[tuple]:
        s, m, c = a.stage, a.microbatch, a.slice
        left, right = (None, None) if c is None else (c - 1, c + 1)
        if a.op is Op.F:
            return {(s - 1, "F", m, c), (s, "F", m, left if c else -1)}
        if a.op is Op.W:
            return {(s, "I", m, c)}
        return {(s, "F", m, c), (s + 1, "I", m, c), (s, "I", m, right if c is not None else -1)}

    return {
        (rank, place): {where[key] for a in actions_of(step) for key in before(a) if key in where}
        | ({(rank, place - 1)} if place else set())
        for rank, program in enumerate(schedule.programs)
        for place, step in enumerate(program)
    }


def is_valid(schedule: Schedule) -> bool:
    try:
        TopologicalSorter(graph(schedule)).prepare()
    except CycleError:
        return False
    return is_complete(schedule)


def makespan(schedule: Schedule, cost: dict[str, int], transfer: int) -> int:
    """The longest path; every step costs the sum of its actions."""
    edges = graph(schedule)

    @cache
    def end(node: tuple[int, int]) -> int:
        rank, place = node
        step = schedule.programs[rank][place]
        start = max((end(b) + (transfer if b[0] != rank else 0) for b in edges[node]), default=0)
        return start + sum(cost[kind] for a in actions_of(step) for kind in kinds(a.op))

    for node in TopologicalSorter(edges).static_order():
        end(node)
    return max(map(end, edges))
