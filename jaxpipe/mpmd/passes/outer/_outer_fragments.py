"""Pass 9, `outer_fragments`: groups the equations outside of loops into few programs.

Before: a function whose equations have ranks.

After: the same function with `fragments`: for each segment, the part of the function before the
first loop, between two loops, or after the last one, the programs of all ranks.

Why here: the programs depend on which equations need values of other ranks, which `assign_ranks`
decides. The next pass leaves the graph, and writes fragments and loops as one list of instructions.

The equations of a segment are sorted into levels: an equation that reads a value of another rank is
at least one level later than the equation that computes this value. A rank runs one program for
each level, and thus one between two transfers.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ....ir.graph import Eqn, Graph, Var, free_variables, has_print, variables
from ...ir._mpmd_graph import MpmdGraph, PipelinedLoop, RankAssignment
from ...ir._program import Buffer, RunTask

EqnOnRank = tuple[Eqn, int]
"""An equation, and one of the ranks that run it."""

ValueOnRank = tuple[Var, int]
"""A value, and one of the ranks that have it."""


def outer_fragments(graph: MpmdGraph) -> MpmdGraph:
    """Groups equations outside of loops into programs, each behind those whose values it reads."""
    assignment = graph.ranks
    count = 1 + len(graph.loops)
    segment_of = _hoist_eqns(graph, _latest_segments(graph))
    exported = _exported_values(graph, segment_of)
    fragments = []
    for segment in range(count):
        eqns = [eqn for eqn, its_segment in segment_of.items() if its_segment == segment]
        levels = _levels_of_eqns(eqns, assignment, exported)
        fragments.append(tuple(_run_tasks(levels, exported, _fragment_name(segment, count))))
    return replace(graph, fragments=tuple(fragments))


def _fragment_name(segment: int, count: int) -> str:
    if count == 1:
        return "step"
    if segment == 0:
        return "before_loop"
    return "after_loop" if segment == count - 1 else f"between_loops_{segment}"


def _latest_segments(graph: MpmdGraph) -> dict[Eqn, int]:
    """Returns the latest segment in which each equation may run, so that few values cross loops.

    An equation that prints stays in the segment in which the user wrote it.
    """
    last = len(graph.loops)
    latest: dict[Var, int] = dict.fromkeys(variables(graph.outputs), last)
    segment_of: dict[Eqn, int] = {}
    num_loops_before = last
    for eqn in reversed(graph.eqns):
        if isinstance(eqn, PipelinedLoop):
            num_loops_before -= 1
            segment = num_loops_before
        else:
            segment = min((latest[v] for v in eqn.outputs if v in latest), default=last)
            segment = num_loops_before if has_print(eqn) else segment
            segment_of[eqn] = segment
        for value in variables(eqn.inputs):
            latest[value] = min(latest.get(value, segment), segment)
    return dict(reversed(segment_of.items()))


def _hoist_eqns(graph: MpmdGraph, latest: Mapping[Eqn, int]) -> dict[Eqn, int]:
    """Moves equations to their earliest segment where this does not increase the bytes kept alive.

    This holds if the outputs are no larger than the inputs that no other equation reads, as in an
    addition of gradients. Inputs of the function do not count: its caller keeps them in any case.
    """
    segment_of = dict(latest)
    uses = Counter(value for eqn in graph.eqns for value in set(variables(eqn.inputs)))
    uses.update(variables(graph.outputs))
    made_in: dict[Var, int] = {}
    num_loops_before = 0
    for eqn in graph.eqns:
        if isinstance(eqn, PipelinedLoop):
            num_loops_before += 1
            made_in |= dict.fromkeys(eqn.outputs, num_loops_before)
            continue
        inputs = {value for value in variables(eqn.inputs) if value in made_in}
        taken = sum(value.num_bytes for value in inputs if uses[value] == 1)
        num_bytes = sum(value.num_bytes for value in eqn.outputs)
        if not has_print(eqn) and inputs and num_bytes <= taken:
            segment_of[eqn] = max(made_in[value] for value in inputs)
        made_in |= dict.fromkeys(eqn.outputs, segment_of[eqn])
    return segment_of


def _exported_values(graph: MpmdGraph, segment_of: Mapping[Eqn, int]) -> set[ValueOnRank]:
    """Returns the values that loops, other ranks or segments, or the caller read from a rank."""
    assignment = graph.ranks
    exported: set[ValueOnRank] = set()
    made_in = {value: segment for eqn, segment in segment_of.items() for value in eqn.outputs}
    for eqn, segment in segment_of.items():
        later = [v for v in variables(eqn.inputs) if made_in.get(v, segment) != segment]
        exported |= {(v, rank) for v in later for rank in assignment.runs_on[eqn]}
    loop_inputs = (atom for loop in graph.loops for atom in loop.inputs)
    for value in variables([*loop_inputs, *graph.outputs]):
        exported |= {(value, rank) for rank in assignment.needed_on[value]}
    for value, ranks in assignment.produced_on.items():
        if ranks and set(assignment.needed_on.get(value, ())) - set(ranks):
            exported.add((value, ranks[0]))
    return exported


def _levels_of_eqns(
    eqns: Sequence[Eqn], assignment: RankAssignment, exported: Collection[ValueOnRank]
) -> dict[EqnOnRank, int]:
    """Returns each equation's level on each rank: the earliest if exported, else the latest."""
    makers = {value: eqn for eqn in eqns for value in eqn.outputs}
    earliest: dict[EqnOnRank, int] = {}

    def source(value: Var, rank: int) -> tuple[EqnOnRank, int] | None:
        """Returns the equation that computes a value, and the transfers to the rank: 0 or 1."""
        maker = makers.get(value)
        if maker is None:
            return None
        ranks = assignment.runs_on[maker]
        return ((maker, rank), 0) if rank in ranks else ((maker, ranks[0]), 1)

    for eqn in eqns:
        for rank in assignment.runs_on[eqn]:
            sources = [s for v in variables(eqn.inputs) if (s := source(v, rank)) is not None]
            levels = (earliest[maker] + transfers for maker, transfers in sources)
            earliest[eqn, rank] = max(levels, default=0)

    latest: dict[EqnOnRank, int] = {}
    for eqn in reversed(eqns):
        for rank in assignment.runs_on[eqn]:
            instance = eqn, rank
            leaves = any((value, rank) in exported for value in eqn.outputs)
            level = latest.get(instance, earliest[instance])
            latest[instance] = earliest[instance] if leaves else max(level, earliest[instance])
            for value in variables(eqn.inputs):
                if (origin := source(value, rank)) is not None:
                    maker, transfers = origin
                    bound = latest[instance] - transfers
                    latest[maker] = min(latest.get(maker, bound), bound)
    return {(eqn, rank): latest[eqn, rank] for eqn in eqns for rank in assignment.runs_on[eqn]}


def _run_tasks(
    levels: Mapping[EqnOnRank, int], exported: Collection[ValueOnRank], name: str
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
        computed = [value for eqn in eqns for value in eqn.outputs]
        writes = tuple(v for v in computed if (v, rank) in exported or v in used)
        reads = tuple(free_variables(eqns, writes))
        label = f"{name}_{level}" if several else name
        graph = Graph(reads, tuple(eqns), writes)
        yield RunTask(rank, label, graph, tuple(map(Buffer, reads)), tuple(map(Buffer, writes)))
