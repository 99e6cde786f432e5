"""Partitions a program: into the equations that some outputs need, and the remaining ones.

The second half is given the inputs again, and residuals: values that the first half has computed.
An equation that costs much is never computed twice. An equation that costs little, such as a cast
or a product of arrays, is computed again if this reduces the bytes of the residuals.

Scans, conds and shard_maps are partitioned too, each into two of its kind. Any other equation stays
whole, in the first half if that needs one of its outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ..graph import Eqn, Graph, Var, free_variables, is_cheap, is_light, is_move, select, variables
from ._minimal_cut import minimal_cut
from ._partition_nested import EqnPartition, InputKind, split_eqn


@dataclass(frozen=True)
class Partition:
    """Two programs that together compute one.

    Attributes:
        first: `(inputs) -> (the outputs that were asked for, residuals)`.
        second: `(some of the inputs, residuals) -> the other outputs`.
        reads: [num_inputs] whether `second` reads each input.
    """

    first: Graph
    second: Graph
    reads: tuple[bool, ...]


def partition(program: Graph, first: Sequence[bool], kinds: Sequence[InputKind]) -> Partition:
    """Partitions a program into two halves.

    Args:
        first: [num_outputs] whether the first half computes each output. It computes nothing else
            but residuals.
        kinds: [num_inputs] how each input is available to the second half. An input that is
            "saved" until the second half runs weighs as much as a residual.
    """
    halves = partition_eqns(program, first, kinds)
    others = select(program.outputs, [not is_first for is_first in first])
    used = set(free_variables(halves.second, others)) - set(halves.residuals)
    reads = tuple(value in used for value in program.inputs)
    inputs = [value for value in program.inputs if value in used]
    return Partition(
        Graph(
            program.inputs,
            tuple(halves.first),
            (*select(program.outputs, first), *halves.residuals),
        ),
        Graph((*inputs, *halves.residuals), tuple(halves.second), others),
        reads,
    )


def partition_eqns(
    program: Graph, wanted: Sequence[bool], kinds: Sequence[InputKind]
) -> EqnPartition:
    """Partitions a program into the equations that the wanted outputs need, and the others.

    Args:
        wanted: [num_outputs] whether the first half computes each output.
        kinds: [num_inputs] how each input is available to the second half.
    """
    by_kind = {kind: set(select(program.inputs, [k == kind for k in kinds])) for kind in _KINDS}
    recomputable = _recomputable(program, by_kind["recomputable"])
    first, second = _assign(program, wanted, recomputable)
    early, late = _early(second, by_kind["deferred"])
    others = select(program.outputs, [not want for want in wanted])
    deferred = by_kind["deferred"].union(*(eqn.outputs for eqn in late))
    needs = [value for value in free_variables(late, others) if value not in deferred]

    cheap = [eqn for eqn in first if is_cheap(eqn)]
    chosen = _cut(cheap, early, needs, recomputable, by_kind["saved"])
    moved = _leading_to(chosen, early)
    late_inputs = _leading_to(needs, [*cheap, *early], available=chosen)
    residuals = [value for value in chosen if value not in by_kind["saved"]]
    return EqnPartition([*first, *moved], [*late_inputs, *late], residuals)


_KINDS = get_args(InputKind)


def _recomputable(program: Graph, available: set[Var]) -> set[Var]:
    """Returns the values that the second half has, or can compute from those at little cost."""
    recomputable = set(available)
    for eqn in program.eqns:
        if is_cheap(eqn) and recomputable.issuperset(variables(eqn.inputs)):
            recomputable.update(eqn.outputs)
    return recomputable


def _assign(
    program: Graph, wanted: Sequence[bool], recomputable: set[Var]
) -> tuple[list[Eqn], list[Eqn]]:
    """Returns the equations that the wanted outputs need, and the others."""
    needed = set(variables(select(program.outputs, wanted)))
    first: list[Eqn] = []
    second: list[Eqn] = []
    for eqn in reversed(program.eqns):
        outputs = [value in needed for value in eqn.outputs]
        if not any(outputs):
            second.append(eqn)
            continue
        in_first, in_second = [eqn], []
        if not all(outputs):
            in_first, in_second = split_eqn(eqn, outputs, recomputable, partition_eqns)
        first += in_first
        second += [eqn for eqn in in_second if eqn.outputs]
        needed.update(value for eqn in in_first for value in variables(eqn.inputs))
    return first[::-1], second[::-1]


def _early(second: Sequence[Eqn], deferred: set[Var]) -> tuple[list[Eqn], list[Eqn]]:
    """Splits the second half by whether an equation must run late.

    It must if it costs much, if it depends on an equation that costs much, or if it reads an input
    that only the second half has (`deferred`).
    """
    late_values = set(deferred)
    early: list[Eqn] = []
    late: list[Eqn] = []
    for eqn in second:
        if is_light(eqn) and late_values.isdisjoint(variables(eqn.inputs)):
            early.append(eqn)
        else:
            late.append(eqn)
            late_values.update(eqn.outputs)
    return early, late


def _cut(
    first: Sequence[Eqn],
    early: Sequence[Eqn],
    needs: Sequence[Var],
    recomputable: set[Var],
    saved: set[Var],
) -> list[Var]:
    """Returns the values with the fewest bytes that the second half must have.

    From these values, cheap equations of the first half and early equations of the second compute
    all values that the late equations need.
    """
    parents = {
        v: tuple(dict.fromkeys(variables(s.inputs))) for s in (*first, *early) for v in s.outputs
    }
    parents |= dict.fromkeys(recomputable, ())
    moved = {v for eqn in (*filter(is_move, first), *early) for v in eqn.outputs}

    def cost(value: Var) -> int:
        # Of two values with equal bytes, prefers an input, which is kept already, and then the
        # one that is computed first.
        return 3 * value.num_bytes + (value not in saved) + (value in moved) or 1

    return minimal_cut(needs, parents, cost)


def _leading_to(
    ends: Sequence[Var], eqns: Sequence[Eqn], *, available: Sequence[Var] = ()
) -> list[Eqn]:
    """Returns the equations that compute `ends` from `available`."""
    missing = set(ends).difference(available)
    leading: list[Eqn] = []
    for eqn in reversed(eqns):
        if missing.intersection(eqn.outputs):
            leading.append(eqn)
            missing.update(set(variables(eqn.inputs)).difference(available))
    return leading[::-1]
