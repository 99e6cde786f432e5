"""Assigns every equation outside of loops to the ranks that hold the values it reads.

A loop determines which ranks need its inputs and which rank holds each output. After a loop, an
equation runs where the largest of its inputs is held, so an optimizer update runs on the rank that
has the gradient. Values that depend on no loop, such as a step count or a cast of weights, are
cheap to compute twice: every rank that needs such a value computes it itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.graph import Eqn, Graph, PrimitiveCall, Var, has_print, variables
from ...schedules import language
from ..api._across import STACK, SUM, WITH
from ..ir._eqns import ADD, eliminate_dead_code, is_sum
from ._pipelined_loops import PipelinedLoop, loop_of

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RankAssignment:
    """Ranks that compute each value and ranks that need it.

    Attributes:
        runs_on: The ranks that run each equation outside of loops, empty if no rank needs it.
        needed_on: The ranks that need each value, which is computed there or sent there.
        made_on: The ranks that hold each value first: the ranks of its equation, or, for an input
            of the function, the ranks that need it.
    """

    runs_on: Mapping[Eqn, Ranks]
    needed_on: Mapping[Var, Ranks]
    made_on: Mapping[Var, Ranks]


def rank_of_stage(loop: PipelinedLoop, stage: int) -> int:
    """Returns the rank that runs a stage of a loop."""
    (rank,) = language.ranks_of_stage(loop.schedule, stage)
    return rank


def assign_ranks(
    outer: Graph, num_ranks: int, out_ranks: Sequence[Ranks | None]
) -> tuple[Graph, RankAssignment]:
    """Assigns every equation to ranks, and sums scalars on each rank before summing over ranks.

    Args:
        outer: A function whose loops are split into tasks.
        num_ranks: Number of pipeline ranks.
        out_ranks: [num_outputs] the ranks on which the caller wants each output; None leaves the
            choice to this pass.

    Returns:
        The function with these partial sums, and the ranks of its equations and values.
    """
    wanted = _ranks_of_loop_inputs(outer)
    homes = _ranks_after_loops(outer, wanted)
    outer = _with_partial_sums(outer, homes)
    homes = _ranks_after_loops(outer, wanted)
    asked = _ranks_of_outputs(outer, homes, out_ranks)
    homes |= _ranks_of_prints(outer, homes, _ranks_that_need(outer, homes, asked))
    asked = _ranks_of_outputs(outer, homes, out_ranks)
    needed = _ranks_that_need(outer, homes, asked)
    asked |= _ranks_of_open_outputs(outer, asked, needed, num_ranks)
    needed = _ranks_that_need(outer, homes, asked)
    runs_on = {
        eqn: _sorted_ranks(
            homes.get(eqn.outputs[0]) or set().union(*(needed[v] for v in eqn.outputs))
        )
        for eqn in outer.eqns
        if eqn.outputs and loop_of(eqn) is None
    }
    made_on = {value: _sorted_ranks(needed[value]) for value in outer.inputs}
    for eqn in outer.eqns:
        loop = loop_of(eqn)
        for i, value in enumerate(eqn.outputs):
            made_on[value] = runs_on[eqn] if loop is None else (_rank_of_output(loop, i),)
    return outer, RankAssignment(runs_on, {v: _sorted_ranks(r) for v, r in needed.items()}, made_on)


def _sorted_ranks(ranks: set[int]) -> Ranks:
    return tuple(sorted(ranks))


def _rank_of_output(loop: PipelinedLoop, i: int) -> int:
    share = list(loop.reductions)[i]
    for stage, tasks in enumerate(loop.tasks):
        if any(share in task.sums for task in tasks.values()):
            return rank_of_stage(loop, stage)
    raise AssertionError("every share is made by a stage")


def invariants_by_rank(loop: PipelinedLoop) -> dict[int, set[Var]]:
    """Returns the loop invariants that each rank reads."""
    found: dict[int, set[Var]] = {}
    for stage, tasks in enumerate(loop.tasks):
        reads = {value for task in tasks.values() for value in task.reads}
        rank = rank_of_stage(loop, stage)
        found.setdefault(rank, set()).update(reads.intersection(loop.invariants))
    return found


def _ranks_of_loop_inputs(outer: Graph) -> dict[Var, set[int]]:
    """Returns the ranks whose loops read a value, directly or through values computed from it."""
    wanted: dict[Var, set[int]] = {}
    for eqn in reversed(outer.eqns):
        loop = loop_of(eqn)
        if loop is not None:
            by_rank = invariants_by_rank(loop)
            for atom, invariant in zip(eqn.inputs, loop.invariants, strict=True):
                ranks = {rank for rank, needs in by_rank.items() if invariant in needs}
                for value in variables([atom]):
                    wanted.setdefault(value, set()).update(ranks)
        else:
            ranks = set().union(*(wanted.get(value, set()) for value in eqn.outputs))
            for value in variables(eqn.inputs) if ranks else ():
                wanted.setdefault(value, set()).update(ranks)
    return wanted


def _ranks_after_loops(outer: Graph, wanted: Mapping[Var, set[int]]) -> dict[Var, set[int]]:
    """Returns the ranks on which each value that depends on a loop is computed.

    An equation that depends on a loop runs on the ranks that hold the largest of its inputs. An
    input of the function that loops read counts as held by the ranks of these loops.
    """
    homes: dict[Var, set[int]] = {}
    behind: set[Var] = set()  # values that depend on a loop
    for eqn in outer.eqns:
        loop = loop_of(eqn)
        if loop is not None:
            homes |= {value: {_rank_of_output(loop, i)} for i, value in enumerate(eqn.outputs)}
            behind.update(eqn.outputs)
            continue
        given = variables(eqn.inputs)
        if behind.isdisjoint(given):
            continue
        behind.update(eqn.outputs)
        placed = [(v, homes.get(v) or wanted.get(v, set())) for v in given]
        home = _ranks_of_eqn(eqn, [(v, r) for v, r in placed if r])
        homes |= dict.fromkeys(eqn.outputs, {min(home)} if has_print(eqn) else home)
    return homes


def _ranks_of_prints(
    outer: Graph, homes: Mapping[Var, set[int]], needed: Mapping[Var, set[int]]
) -> dict[Var, set[int]]:
    """Returns the single rank of each equation that prints and depends on no loop.

    That rank holds the printed values, or the inputs of the function that they are computed from.
    """
    found: dict[Var, set[int]] = {}
    made_of = _source_inputs(outer)
    for eqn in outer.eqns:
        if has_print(eqn) and eqn.outputs[-1] not in homes:
            sources = set().union(*(made_of[value] for value in variables(eqn.inputs)))
            places = [needed[source] for source in sources if needed[source]]
            ranks = _common_ranks(places) if places else {0}
            found |= {value: {min(ranks)} for value in eqn.outputs}
    return found


def _source_inputs(outer: Graph) -> dict[Var, set[Var]]:
    """Returns the inputs of the function that each value depends on."""
    made_of: dict[Var, set[Var]] = {value: {value} for value in outer.inputs}
    for eqn in outer.eqns:
        sources = set().union(*(made_of[value] for value in variables(eqn.inputs)))
        made_of |= dict.fromkeys(eqn.outputs, sources)
    return made_of


def _common_ranks(places: Sequence[set[int]]) -> set[int]:
    """Returns the ranks that all sets have in common; if none, the set with the lowest ranks."""
    return set.intersection(*places) or min(places, key=sorted)


def _ranks_of_eqn(eqn: Eqn, placed: Sequence[tuple[Var, set[int]]]) -> set[int]:
    """Returns the ranks that run an equation, given the ranks that hold its inputs."""
    name = eqn.operation.name if isinstance(eqn.operation, PrimitiveCall) else ""
    if name in (SUM, STACK):
        return set().union(*(ranks for _, ranks in placed))
    if name == WITH:
        found = [ranks for value, ranks in placed if value is eqn.inputs[-1]]
        if found:
            return found[0]
    return max(placed, key=lambda pair: (pair[0].num_bytes, len(pair[1])))[1]


def _ranks_of_outputs(
    outer: Graph, homes: Mapping[Var, set[int]], out_ranks: Sequence[Ranks | None]
) -> dict[Var, set[int]]:
    """Returns the ranks of outputs: as the caller asks, else the ranks that compute the output."""
    found: dict[Var, set[int]] = {}
    for atom, ranks in zip(outer.outputs, out_ranks, strict=True):
        if ranks is not None:
            for value in variables([atom]):
                found.setdefault(value, set()).update(ranks)
    at_home = {value: homes[value] for value in variables(outer.outputs) if value in homes}
    return at_home | found


def _ranks_that_need(
    outer: Graph, homes: Mapping[Var, set[int]], asked: Mapping[Var, set[int]]
) -> dict[Var, set[int]]:
    """Returns the ranks that need each value, by one walk from the outputs to the inputs."""
    needed: dict[Var, set[int]] = {value: set() for value in outer.inputs}
    needed |= {value: set() for eqn in outer.eqns for value in eqn.outputs}
    for value in variables(outer.outputs):
        needed[value] |= asked.get(value, set())
    for eqn in reversed(outer.eqns):
        loop = loop_of(eqn)
        if loop is not None:
            by_rank = invariants_by_rank(loop)
            for atom, invariant in zip(eqn.inputs, loop.invariants, strict=True):
                for value in variables([atom]):
                    needed[value] |= {r for r, needs in by_rank.items() if invariant in needs}
            continue
        if has_print(eqn):
            needed[eqn.outputs[-1]] |= homes.get(eqn.outputs[-1], set())
        ranks = set().union(*(needed[value] for value in eqn.outputs))
        if ranks:
            ranks = homes.get(eqn.outputs[0]) or ranks
            for value in variables(eqn.inputs):
                needed[value] |= ranks
    return needed


def _ranks_of_open_outputs(
    outer: Graph,
    asked: Mapping[Var, set[int]],
    needed: Mapping[Var, set[int]],
    num_ranks: int,
) -> dict[Var, set[int]]:
    """Returns the ranks of outputs that depend on no loop and that the caller leaves open.

    Such an output is stored on the ranks that hold the inputs it is computed from. If no rank holds
    any of them, a scalar is stored on all ranks and an array on rank 0.
    """
    made_of = _source_inputs(outer)
    found: dict[Var, set[int]] = {}
    for value in variables(outer.outputs):
        if value in asked:
            continue
        places = [needed[source] for source in made_of[value] if needed[source]]
        everywhere = set(range(num_ranks)) if value.aval.shape == () else {0}
        found[value] = _common_ranks(places) if places else everywhere
    return found


def _with_partial_sums(outer: Graph, homes: Mapping[Var, set[int]]) -> Graph:
    """Splits a scalar sum over values of several ranks into one sum per rank and a sum over ranks.

    The norm of all gradients is such a sum. Each rank then sends a single scalar.

    Returns:
        `outer` with its scalar sums split.
    """
    makers = {value: eqn for eqn in outer.eqns for value in eqn.outputs}
    uses: dict[Var, int] = {}
    for value in variables([*(a for eqn in outer.eqns for a in eqn.inputs), *outer.outputs]):
        uses[value] = uses.get(value, 0) + 1

    def terms(value: Var, *, is_root: bool = False) -> list[Var]:
        eqn = makers.get(value)
        if eqn is None or (uses.get(value) != 1 and not is_root) or not is_sum(eqn):
            return [value]
        return [term for part in variables(eqn.inputs) for term in terms(part)]

    replaced: dict[Eqn, list[Eqn]] = {}
    inner: set[Eqn] = set()
    for eqn in reversed(outer.eqns):
        if eqn in inner or not is_sum(eqn) or eqn.outputs[0].aval.shape != ():
            continue
        parts = terms(eqn.outputs[0], is_root=True)
        by_home: dict[Ranks, list[Var]] = {}
        for part in parts:
            by_home.setdefault(_sorted_ranks(homes.get(part, set())), []).append(part)
        _inner_sums(eqn, makers, uses, inner)
        if 1 < len(by_home) < len(parts):
            replaced[eqn] = _sums_by_home(eqn, by_home)
    eqns = [new for eqn in outer.eqns for new in replaced.get(eqn, [eqn])]
    return eliminate_dead_code(replace(outer, eqns=tuple(eqns)))


def _inner_sums(
    eqn: Eqn, makers: Mapping[Var, Eqn], uses: Mapping[Var, int], inner: set[Eqn]
) -> None:
    """Adds to `inner` the additions whose only use is within the sum that `eqn` computes."""
    for value in variables(eqn.inputs):
        maker = makers.get(value)
        if maker is not None and uses.get(value) == 1 and is_sum(maker):
            inner.add(maker)
            _inner_sums(maker, makers, uses, inner)


def _sums_by_home(eqn: Eqn, by_home: Mapping[Ranks, list[Var]]) -> list[Eqn]:
    """Returns the equations that add the terms of each rank first, and then the partial sums."""
    eqns: list[Eqn] = []

    def add(parts: list[Var], last: Var | None) -> Var:
        total = parts[0]
        for i, part in enumerate(parts[1:], 1):
            new = last if last is not None and i == len(parts) - 1 else Var(part.aval)
            eqns.append(Eqn(ADD, (total, part), (new,)))
            total = new
        return total

    partial = [add(parts, None) for parts in by_home.values()]
    add(partial, eqn.outputs[0])
    return eqns
