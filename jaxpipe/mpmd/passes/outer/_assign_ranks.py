"""Pass 7, `assign_ranks`: assigns every equation outside of loops to ranks.

Before: a function whose loops have tasks, and thus ranks for their inputs and results. All other
equations have no rank.

After: a function with a `RankAssignment`. A scalar sum over values of several ranks has become one
sum per rank and a sum over ranks.

Why here: which rank reads an input of a loop, and which one has a result, is known since
`split_tasks`. All later passes work on equations of one rank.

A loop determines which ranks need its inputs and which rank holds each output. After a loop, an
equation runs where the largest of its inputs is held, so an optimizer update runs on the rank that
has the gradient. Scalars count alike: of a gradient and a norm of all gradients, the gradient
decides, as it was computed from values of fewer ranks. Values that depend on no loop, such as a
step count or a cast of weights, are cheap to compute twice: every rank that needs such a value
computes it itself. Scalars that are computed from arrays which loops read, such as the distance of
weights from the first weights, are an exception: they are computed on the ranks whose loops read
the largest of these arrays, so the arrays are not sent.

In a function without loops an equation runs where the largest of its inputs is, as if a loop had
put the arguments where they are.

If several ranks run a stage, its owner is given the arguments that the stage reads, such as
weights, and sends them to the others. So each weight and its optimizer state are on one rank.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

import jax
import jax.numpy as jnp

from ....ir.graph import Eqn, Var, variables
from ...api._across import CONCAT, STACK, SUM, WITH
from ...ir._eqns import chain_eqns, eliminate_dead_code, is_sum, primitive_of, prints
from ...ir._mpmd_graph import MpmdGraph, PipelinedLoop, RankAssignment, Ranks

RankSets = Mapping[Var, set[int]]
"""The ranks of values; a value that is absent has none."""


@dataclass(frozen=True)
class _OnRanks:
    """The ranks that hold a value, and those whose values it was computed from."""

    ranks: set[int]
    origins: set[int]


def assign_ranks(graph: MpmdGraph) -> MpmdGraph:
    """Assigns every equation to ranks, and sums scalars on each rank before summing over ranks."""
    read_by_loops, held_on = _ranks_of_loop_inputs(graph), _ranks_of_arguments(graph)
    computed_on = _ranks_after_loops(graph, read_by_loops, held_on)
    graph = _split_sums_by_rank(graph, computed_on)
    computed_on = _ranks_after_loops(graph, read_by_loops, held_on)
    returned_on = _ranks_of_outputs(graph, computed_on)
    needed_on = _ranks_that_need(graph, computed_on, returned_on)
    computed_on |= _ranks_of_prints(graph, computed_on, needed_on)
    returned_on = _ranks_of_outputs(graph, computed_on)
    needed_on = _ranks_that_need(graph, computed_on, returned_on)
    given_to = _ranks_that_need(graph, computed_on, returned_on, by_owners=True)
    returned_on |= _ranks_of_open_outputs(graph, returned_on, given_to)
    needed_on = _ranks_that_need(graph, computed_on, returned_on)
    given_to = _ranks_that_need(graph, computed_on, returned_on, by_owners=True)
    given_to |= {value: ranks for value, ranks in held_on.items() if given_to[value]}
    return replace(graph, ranks=_rank_assignment(graph, computed_on, needed_on, given_to))


def _rank_assignment(
    graph: MpmdGraph, computed_on: RankSets, needed_on: RankSets, given_to: RankSets
) -> RankAssignment:
    """Returns the ranks of all equations and values; `given_to` has those of the arguments."""
    runs_on: dict[Eqn, Ranks] = {}
    produced_on: dict[Var, Ranks] = {v: _sorted_ranks(given_to[v]) for v in graph.inputs}
    for eqn in graph.eqns:
        if isinstance(eqn, PipelinedLoop):
            pairs = zip(eqn.outputs, eqn.output_ranks, strict=True)
            produced_on |= {value: (rank,) for value, rank in pairs}
        elif eqn.outputs:
            needing = set().union(*(needed_on[value] for value in eqn.outputs))
            runs_on[eqn] = _sorted_ranks(computed_on.get(eqn.outputs[0]) or needing)
            produced_on |= dict.fromkeys(eqn.outputs, runs_on[eqn])
    needed = {value: _sorted_ranks(ranks) for value, ranks in needed_on.items()}
    return RankAssignment(runs_on, needed, produced_on)


def _sorted_ranks(ranks: set[int]) -> Ranks:
    return tuple(sorted(ranks))


def _ranks_of_loop_inputs(graph: MpmdGraph) -> dict[Var, set[int]]:
    """Returns the owners of stages that read a value, or read values computed from it."""
    ranks_of: dict[Var, set[int]] = {}
    for eqn in reversed(graph.eqns):
        if isinstance(eqn, PipelinedLoop):
            for value, ranks in _ranks_of_inputs(eqn, by_owners=True).items():
                ranks_of.setdefault(value, set()).update(ranks)
        else:
            ranks = set().union(*(ranks_of.get(value, set()) for value in eqn.outputs))
            for value in variables(eqn.inputs) if ranks else ():
                ranks_of.setdefault(value, set()).update(ranks)
    return ranks_of


def _ranks_of_arguments(graph: MpmdGraph) -> dict[Var, set[int]]:
    """Returns the ranks that hold each argument, if they are known and there is no loop."""
    if any(isinstance(eqn, PipelinedLoop) for eqn in graph.eqns):
        return {}
    pairs = zip(graph.inputs, graph.options.in_ranks, strict=True)
    return {value: set(ranks) for value, ranks in pairs if ranks}


def _ranks_of_inputs(loop: PipelinedLoop, *, by_owners: bool = False) -> dict[Var, set[int]]:
    """Returns the ranks whose tasks read each input of a loop, or those that own these tasks."""
    ranks_of: dict[Var, set[int]] = {}
    readers = loop.owner_ranks if by_owners else loop.input_ranks
    for atom, ranks in zip(loop.inputs, readers, strict=True):
        for value in variables([atom]):
            ranks_of.setdefault(value, set()).update(ranks)
    return ranks_of


def _ranks_after_loops(
    graph: MpmdGraph, read_by_loops: RankSets, held_on: RankSets
) -> dict[Var, set[int]]:
    """Returns the ranks on which some values are computed; others are wherever they are needed.

    These are values that depend on a loop or are held, and scalars that are computed from arrays
    which loops read.

    An equation that depends on one runs on the ranks that hold the largest of its inputs. An
    input of the function that loops read counts as held by the ranks of these loops.
    """
    held = {value: _OnRanks(ranks, ranks) for value, ranks in held_on.items()}
    array_ranks = {v: ranks for v in graph.inputs if (ranks := read_by_loops.get(v))}
    for eqn in graph.eqns:
        if isinstance(eqn, PipelinedLoop):
            pairs = zip(eqn.outputs, eqn.output_ranks, strict=True)
            held |= {value: _OnRanks({rank}, {rank}) for value, rank in pairs}
            continue
        operands = variables(eqn.inputs)
        if held.keys().isdisjoint(operands):
            arrays: list[Var] = [v for v in operands if v in array_ranks and v.aval.shape]
            if not arrays or prints(eqn):
                continue
            ranks = array_ranks[max(arrays, key=attrgetter("num_bytes"))]
            if any(v.aval.shape or _is_key(v) for v in eqn.outputs):
                array_ranks |= dict.fromkeys(eqn.outputs, ranks)
            else:
                held |= dict.fromkeys(eqn.outputs, _OnRanks(ranks, ranks))
            continue
        read = {v: _OnRanks(ranks, ranks) for v in operands if (ranks := read_by_loops.get(v))}
        chosen = _where_eqn_runs(eqn, {v: h for v in operands if (h := held.get(v) or read.get(v))})
        if prints(eqn):
            chosen = replace(chosen, ranks={min(chosen.ranks)})
        held |= dict.fromkeys(eqn.outputs, chosen)
    return {value: set(chosen.ranks) for value, chosen in held.items()}


def _is_key(value: Var) -> bool:
    return jnp.issubdtype(value.aval.dtype, jax.dtypes.extended)


def _ranks_of_prints(
    graph: MpmdGraph, computed_on: RankSets, needed_on: RankSets
) -> dict[Var, set[int]]:
    """Returns the single rank of each equation that prints and depends on no loop.

    That rank holds the printed values, or the inputs of the function that they are computed from.
    """
    ranks_of: dict[Var, set[int]] = {}
    sources = _source_inputs(graph)
    for eqn in graph.eqns:
        if prints(eqn) and eqn.outputs[-1] not in computed_on:
            inputs = set().union(*(sources[value] for value in variables(eqn.inputs)))
            rank = min(_common_ranks(inputs, needed_on, {0}))
            ranks_of |= {value: {rank} for value in eqn.outputs}
    return ranks_of


def _source_inputs(graph: MpmdGraph) -> dict[Var, set[Var]]:
    """Returns the inputs of the function that each value depends on."""
    inputs_of: dict[Var, set[Var]] = {value: {value} for value in graph.inputs}
    for eqn in graph.eqns:
        sources = set().union(*(inputs_of[value] for value in variables(eqn.inputs)))
        inputs_of |= dict.fromkeys(eqn.outputs, sources)
    return inputs_of


def _common_ranks(values: set[Var], needed_on: RankSets, otherwise: set[int]) -> set[int]:
    """Returns the ranks that need all of the values that any rank needs.

    If no rank needs all of them, it returns the ranks of the value whose ranks are the lowest, and
    if no rank needs any of them, `otherwise`.
    """
    rank_sets = [needed_on[value] for value in values if needed_on[value]]
    if not rank_sets:
        return otherwise
    return set.intersection(*rank_sets) or min(rank_sets, key=sorted)


def _where_eqn_runs(eqn: Eqn, operands: Mapping[Var, _OnRanks]) -> _OnRanks:
    """Returns the ranks that run an equation, given the ranks that hold its inputs.

    If inputs are equally large, those decide whose values come from ranks that all others come
    from, too; a sum is of the ranks of all its terms.
    """
    name = primitive_of(eqn)
    of_last = [held for value, held in operands.items() if value is eqn.inputs[-1]]
    if name == WITH and of_last:
        return of_last[0]
    origins = set().union(*(held.origins for held in operands.values()))
    if name in (SUM, STACK, CONCAT):
        return _OnRanks(set().union(*(held.ranks for held in operands.values())), origins)
    size = {value: value.num_bytes if value.aval.shape else 0 for value in operands}
    largest = [held for value, held in operands.items() if size[value] == max(size.values())]
    common = set.intersection(*(held.origins for held in largest))
    if any(held.origins == common for held in largest) and not is_sum(eqn):
        largest = [held for held in largest if held.origins == common]
    origins = set().union(*(held.origins for held in largest))
    return _OnRanks(max((held.ranks for held in largest), key=len), origins)


def _ranks_of_outputs(graph: MpmdGraph, computed_on: RankSets) -> dict[Var, set[int]]:
    """Returns the ranks of outputs: as the caller asks, else the ranks that compute the output."""
    ranks_of: dict[Var, set[int]] = {}
    for atom, ranks in zip(graph.outputs, graph.options.out_ranks, strict=True):
        if ranks is not None:
            for value in variables([atom]):
                ranks_of.setdefault(value, set()).update(ranks)
    outputs = variables(graph.outputs)
    return {value: computed_on[value] for value in outputs if value in computed_on} | ranks_of


def _ranks_that_need(
    graph: MpmdGraph, computed_on: RankSets, returned_on: RankSets, *, by_owners: bool = False
) -> dict[Var, set[int]]:
    """Returns the ranks that need each value, by one walk from the outputs to the inputs.

    With `by_owners`, as if only the owner of each stage ran it.
    """
    ranks_of: dict[Var, set[int]] = {value: set() for value in graph.inputs}
    ranks_of |= {value: set() for eqn in graph.eqns for value in eqn.outputs}
    for value in variables(graph.outputs):
        ranks_of[value] |= returned_on.get(value, set())
    for eqn in reversed(graph.eqns):
        if isinstance(eqn, PipelinedLoop):
            for value, ranks in _ranks_of_inputs(eqn, by_owners=by_owners).items():
                ranks_of[value] |= ranks
            continue
        if prints(eqn):
            ranks_of[eqn.outputs[-1]] |= computed_on.get(eqn.outputs[-1], set())
        ranks = set().union(*(ranks_of[value] for value in eqn.outputs))
        if ranks:
            ranks = computed_on.get(eqn.outputs[0]) or ranks
            for value in variables(eqn.inputs):
                ranks_of[value] |= ranks
    return ranks_of


def _ranks_of_open_outputs(
    graph: MpmdGraph, returned_on: RankSets, needed_on: RankSets
) -> dict[Var, set[int]]:
    """Returns the ranks of outputs that depend on no loop and that the caller leaves open.

    Such an output is stored on the ranks that hold the inputs it is computed from. If no rank holds
    any of them, a scalar is stored on all ranks and an array on rank 0.
    """
    sources = _source_inputs(graph)
    ranks_of: dict[Var, set[int]] = {}
    for value in variables(graph.outputs):
        if value not in returned_on:
            is_scalar = value.aval.shape == ()
            otherwise = set(range(graph.options.num_ranks)) if is_scalar else {0}
            ranks_of[value] = _common_ranks(sources[value], needed_on, otherwise)
    return ranks_of


def _split_sums_by_rank(graph: MpmdGraph, computed_on: RankSets) -> MpmdGraph:
    """Splits a scalar sum over values of several ranks into sums per rank and one over ranks.

    Each rank then sends a single scalar. The norm of all gradients is such a sum.
    """
    makers = {value: eqn for eqn in graph.eqns for value in eqn.outputs}
    uses = Counter(variables([*(a for eqn in graph.eqns for a in eqn.inputs), *graph.outputs]))

    def inner_sum(value: Var) -> Eqn | None:
        """Returns the addition that computes a value whose only use is within another sum."""
        eqn = makers.get(value)
        return eqn if eqn is not None and uses[value] == 1 and is_sum(eqn) else None

    def terms(eqn: Eqn) -> list[Var]:
        """Returns the terms of a sum, whose inner sums are then `seen`."""
        parts: list[Var] = []
        for value in variables(eqn.inputs):
            inner = inner_sum(value)
            seen.add(inner)
            parts += [value] if inner is None else terms(inner)
        return parts

    replaced: dict[Eqn | PipelinedLoop, list[Eqn]] = {}
    seen: set[Eqn | None] = set()
    for eqn in reversed(graph.eqns):
        if eqn in seen or not is_sum(eqn) or eqn.outputs[0].aval.shape != ():
            continue
        parts = terms(eqn)
        by_ranks: dict[Ranks, list[Var]] = {}
        for part in parts:
            by_ranks.setdefault(_sorted_ranks(computed_on.get(part, set())), []).append(part)
        if 1 < len(by_ranks) < len(parts):
            (total,) = eqn.outputs
            sums = [p[0] if len(p) == 1 else Var(total.aval) for p in by_ranks.values()]
            of_ranks = map(chain_eqns, by_ranks.values(), sums)
            replaced[eqn] = [*chain.from_iterable(of_ranks), *chain_eqns(sums, total)]
    eqns = (new for eqn in graph.eqns for new in replaced.get(eqn) or [eqn])
    return eliminate_dead_code(replace(graph, eqns=tuple(eqns)))
