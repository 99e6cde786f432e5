"""Splits scalar sums over values of several ranks: each rank then sends a single scalar.

The norm of all gradients is such a sum.
"""

from collections.abc import Mapping
from dataclasses import replace

from ....ir.graph import Eqn, Var, variables
from ...ir._eqns import ADD, eliminate_dead_code, is_sum
from ...ir._loop import PipelinedLoop
from ...ir._mpmd_graph import MpmdGraph, Ranks


def split_sums_by_rank(graph: MpmdGraph, computed_on: Mapping[Var, set[int]]) -> MpmdGraph:
    """Splits a scalar sum over values of several ranks into sums per rank and one over ranks."""
    makers = {value: eqn for eqn in graph.eqns for value in eqn.outputs}
    uses: dict[Var, int] = {}
    for value in variables([*(a for eqn in graph.eqns for a in eqn.inputs), *graph.outputs]):
        uses[value] = uses.get(value, 0) + 1

    def terms(value: Var, *, is_root: bool = False) -> list[Var]:
        eqn = makers.get(value)
        if eqn is None or (uses.get(value) != 1 and not is_root) or not is_sum(eqn):
            return [value]
        return [term for part in variables(eqn.inputs) for term in terms(part)]

    replaced: dict[Eqn | PipelinedLoop, list[Eqn]] = {}
    inner: set[Eqn | PipelinedLoop] = set()
    for eqn in reversed(graph.eqns):
        if eqn in inner or not is_sum(eqn) or eqn.outputs[0].aval.shape != ():
            continue
        parts = terms(eqn.outputs[0], is_root=True)
        by_ranks: dict[Ranks, list[Var]] = {}
        for part in parts:
            by_ranks.setdefault(tuple(sorted(computed_on.get(part, set()))), []).append(part)
        _inner_sums(eqn, makers, uses, inner)
        if 1 < len(by_ranks) < len(parts):
            replaced[eqn] = _sums_by_ranks(eqn, by_ranks)
    eqns = (new for eqn in graph.eqns for new in replaced.get(eqn) or [eqn])
    return eliminate_dead_code(replace(graph, eqns=tuple(eqns)))


def _inner_sums(
    eqn: Eqn,
    makers: Mapping[Var, Eqn | PipelinedLoop],
    uses: Mapping[Var, int],
    inner: set[Eqn | PipelinedLoop],
) -> None:
    """Adds to `inner` the additions whose only use is within the sum that `eqn` computes."""
    for value in variables(eqn.inputs):
        maker = makers.get(value)
        if maker is not None and uses.get(value) == 1 and is_sum(maker):
            inner.add(maker)
            _inner_sums(maker, makers, uses, inner)


def _sums_by_ranks(eqn: Eqn, by_ranks: Mapping[Ranks, list[Var]]) -> list[Eqn]:
    """Returns the equations that add the terms of each rank first, and then the partial sums."""
    eqns: list[Eqn] = []

    def add(parts: list[Var], last: Var | None) -> Var:
        total = parts[0]
        for i, part in enumerate(parts[1:], 1):
            new = last if last is not None and i == len(parts) - 1 else Var(part.aval)
            eqns.append(Eqn(ADD, (total, part), (new,)))
            total = new
        return total

    partial = [add(parts, None) for parts in by_ranks.values()]
    add(partial, eqn.outputs[0])
    return eqns
