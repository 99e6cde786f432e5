"""Groups the equations outside of loops into few programs: one per rank between two transfers.

A segment is the part of a function before the first loop, between two loops, or after the last
one. The equations of a segment are sorted into levels: an equation that reads a value of another
rank is at least one level later than the equation that computes this value.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ...ir.graph import Eqn, Graph, Var, free_variables, has_print, variables
from ..ir._program import Buffer, RunTask
from ._assign_ranks import RankAssignment
from ._pipelined_loops import loop_of

EqnOnRank = tuple[Eqn, int]
"""Equation on one rank."""


def outer_fragments(outer: Graph, assignment: RankAssignment) -> list[list[RunTask]]:
    """Groups the equations outside of loops into programs.

    Args:
        outer: A function whose loops are split into tasks.
        assignment: The ranks of its other equations.

    Returns:
        [num_loops + 1] the programs of each segment, ordered so that each one follows the programs
        whose values it reads.
    """
    count = 1 + sum(loop_of(eqn) is not None for eqn in outer.eqns)
    of_segment = _hoist_eqns(outer, _latest_fragments(outer, count - 1))
    exported = _exported_values(outer, assignment, of_segment)
    found = []
    for segment in range(count):
        eqns = [eqn for eqn, s in of_segment.items() if s == segment]
        levels = _levels_of_eqns(eqns, assignment, exported)
        found.append(list(_run_tasks(levels, assignment, exported, _fragment_name(segment, count))))
    return found


def _fragment_name(segment: int, count: int) -> str:
    if count == 1:
        return "step"
    if segment == 0:
        return "before_loop"
    return "after_loop" if segment == count - 1 else f"between_loops_{segment}"


def _latest_fragments(outer: Graph, last: int) -> dict[Eqn, int]:
    """Returns the latest segment in which each equation may run, so that few values cross loops.

    An equation that prints stays in the segment in which the user wrote it.
    """
    latest: dict[Var, int] = dict.fromkeys(variables(outer.outputs), last)
    of_step: dict[Eqn, int] = {}
    loops = last
    for eqn in reversed(outer.eqns):
        if loop_of(eqn) is not None:
            loops -= 1
            segment = loops
        else:
            segment = min((latest[v] for v in eqn.outputs if v in latest), default=last)
            segment = loops if has_print(eqn) else segment
            of_step[eqn] = segment
        for value in variables(eqn.inputs):
            latest[value] = min(latest.get(value, segment), segment)
    return dict(reversed(of_step.items()))


def _hoist_eqns(outer: Graph, of_step: Mapping[Eqn, int]) -> dict[Eqn, int]:
    """Moves equations to their earliest segment where this does not increase the bytes kept alive.

    This holds if the outputs are no larger than the inputs that no other equation reads, as in an
    addition of gradients. Inputs of the function do not count: its caller keeps them in any case.

    Returns:
        The segment of each equation.
    """
    found = dict(of_step)
    uses = Counter(value for eqn in outer.eqns for value in set(variables(eqn.inputs)))
    uses.update(variables(outer.outputs))
    made_in: dict[Var, int] = {}
    loops = 0
    for eqn in outer.eqns:
        if loop_of(eqn) is not None:
            loops += 1
            made_in |= dict.fromkeys(eqn.outputs, loops)
            continue
        inputs = {value for value in variables(eqn.inputs) if value in made_in}
        taken = sum(value.num_bytes for value in inputs if uses[value] == 1)
        made = sum(value.num_bytes for value in eqn.outputs)
        if not has_print(eqn) and inputs and made <= taken:
            found[eqn] = max(made_in[value] for value in inputs)
        made_in |= dict.fromkeys(eqn.outputs, found[eqn])
    return found


def _exported_values(
    outer: Graph, assignment: RankAssignment, of_segment: Mapping[Eqn, int]
) -> dict[tuple[Var, int], bool]:
    """Returns the (value, rank) pairs that loops, other ranks or segments, or the caller read."""
    found: dict[tuple[Var, int], bool] = {}
    made_in = {value: segment for eqn, segment in of_segment.items() for value in eqn.outputs}
    for eqn, segment in of_segment.items():
        later = [v for v in variables(eqn.inputs) if made_in.get(v, segment) != segment]
        found |= {(value, rank): True for value in later for rank in assignment.runs_on[eqn]}
    for eqn in outer.eqns:
        if loop_of(eqn) is not None:
            for value in variables(eqn.inputs):
                found |= dict.fromkeys(((value, r) for r in assignment.needed_on[value]), True)
    for value in variables(outer.outputs):
        found |= dict.fromkeys(((value, r) for r in assignment.needed_on[value]), True)
    for value, ranks in assignment.made_on.items():
        if ranks and set(assignment.needed_on.get(value, ())) - set(ranks):
            found[value, ranks[0]] = True
    return found


def _levels_of_eqns(
    eqns: Sequence[Eqn], assignment: RankAssignment, exported: Mapping[tuple[Var, int], bool]
) -> dict[EqnOnRank, int]:
    """Returns each equation's level on each rank: the earliest if exported, else the latest."""
    makers = {value: eqn for eqn in eqns for value in eqn.outputs}
    earliest: dict[EqnOnRank, int] = {}

    def source(value: Var, rank: int) -> tuple[EqnOnRank, int] | None:
        """Returns the instance that computes a value for a rank, and its distance in levels."""
        maker = makers.get(value)
        if maker is None:
            return None
        ranks = assignment.runs_on[maker]
        return ((maker, rank), 0) if rank in ranks else ((maker, ranks[0]), 1)

    for eqn in eqns:
        for rank in assignment.runs_on[eqn]:
            sources = [s for v in variables(eqn.inputs) if (s := source(v, rank)) is not None]
            earliest[eqn, rank] = max((earliest[i] + hops for i, hops in sources), default=0)

    latest: dict[EqnOnRank, int] = {}
    for eqn in reversed(eqns):
        for rank in assignment.runs_on[eqn]:
            instance = eqn, rank
            leaves = any((value, rank) in exported for value in eqn.outputs)
            level = latest.get(instance, earliest[instance])
            latest[instance] = earliest[instance] if leaves else max(level, earliest[instance])
            for value in variables(eqn.inputs):
                found = source(value, rank)
                if found is not None:
                    maker, hops = found
                    bound = latest[instance] - hops
                    latest[maker] = min(latest.get(maker, bound), bound)
    return {(eqn, rank): latest[eqn, rank] for eqn in eqns for rank in assignment.runs_on[eqn]}


def _run_tasks(
    levels: Mapping[EqnOnRank, int],
    assignment: RankAssignment,
    exported: Mapping[tuple[Var, int], bool],
    name: str,
) -> Iterator[RunTask]:
    """Yields one program per level and rank, in order of levels."""
    groups: defaultdict[tuple[int, int], list[Eqn]] = defaultdict(list)
    for (eqn, rank), level in levels.items():
        groups[level, rank].append(eqn)
    several = len({level for level, _ in groups}) > 1
    for level, rank in sorted(groups):
        eqns = groups[level, rank]
        inside = set(eqns)
        used = {
            value
            for (eqn, r), _ in levels.items()
            if r == rank and eqn not in inside
            for value in variables(eqn.inputs)
        }
        made = [value for eqn in eqns for value in eqn.outputs]
        writes = tuple(v for v in made if (v, rank) in exported or v in used)
        reads = tuple(free_variables(eqns, writes))
        label = f"{name}_{level}" if several else name
        graph = Graph(reads, tuple(eqns), writes)
        yield RunTask(rank, label, graph, tuple(map(Buffer, reads)), tuple(map(Buffer, writes)))
