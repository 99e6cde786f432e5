"""Partitions a program: into the equations that some outputs need, and the remaining ones.

The second half is given the inputs again, and residuals: values that the first half has computed.
An equation that costs much is never computed twice. An equation that costs little, such as a cast
or a product of arrays, is computed again if this reduces the bytes of the residuals.

Scans, conds and shard_maps are partitioned too, each into two of its kind: the first one computes
the wanted outputs, and residuals for the second, which computes the others. Residuals leave a scan
stacked by iteration, a cond in variables that its branches share, and a shard_map stacked by
device. Any other equation stays whole, in the first half if that needs one of its outputs.
"""

import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import unmapped_aval
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from ..._compat import ClosedJaxpr
from ..graph import (
    Atom,
    Cond,
    Eqn,
    Graph,
    Literal,
    PrimitiveCall,
    Scan,
    ShardMap,
    Var,
    bind,
    free_variables,
    is_cast,
    is_cheap,
    is_light,
    is_move,
    jaxpr_of,
    pvary_like,
    select,
    to_graph,
    variables,
)
from ._minimal_cut import minimal_cut

InputKind = typing.Literal["recomputable", "saved", "dead", "deferred"]
"""Availability of an input to the second half. An input that is "recomputable" is always available,
one that is "saved" on request, and it is then kept in memory until the second half runs. One that
is "dead" is not available, so values that depend on it must be residuals. One that is "deferred" is
available to the second half only, not to the first."""


@dataclass(frozen=True)
class EqnPartition:
    """Equations of both halves, some in both, and the residuals between the halves.

    Residuals are values that the first half computes and the second reads, without inputs that are
    available to the second half in any case.
    """

    first: list[Eqn]
    second: list[Eqn]
    residuals: list[Var]


@dataclass(frozen=True)
class Partition:
    """Two programs that together compute one."""

    first: Graph  # `(inputs) -> (the outputs that were asked for, residuals)`
    second: Graph  # `(some of the inputs, residuals) -> the other outputs`
    reads: tuple[bool, ...]  # [num_inputs] whether `second` reads each input


def partition(program: Graph, first: Sequence[bool], kinds: Sequence[InputKind]) -> Partition:
    """Partitions a program into two halves, the first of which computes the outputs `first`."""
    # A "saved" input weighs as much as a residual: it is kept until the second half runs.
    halves = partition_eqns(program, first, kinds)
    other_outputs = select(program.outputs, _not(first))
    used = set(free_variables(halves.second, other_outputs)) - set(halves.residuals)
    reads = tuple(value in used for value in program.inputs)
    inputs = [value for value in program.inputs if value in used]
    return Partition(
        Graph(
            program.inputs,
            tuple(halves.first),
            (*select(program.outputs, first), *halves.residuals),
        ),
        Graph((*inputs, *halves.residuals), tuple(halves.second), other_outputs),
        reads,
    )


def partition_eqns(
    program: Graph, wanted: Sequence[bool], kinds: Sequence[InputKind]
) -> EqnPartition:
    """Partitions a program into the equations that the `wanted` outputs need, and the others."""
    by_kind = {kind: set(select(program.inputs, [k == kind for k in kinds])) for kind in _KINDS}
    recomputable = _recomputable(program, by_kind["recomputable"])
    first, second = _assign(program, wanted, recomputable)
    early, late = _early(second, by_kind["deferred"])
    other_outputs = select(program.outputs, _not(wanted))
    deferred = by_kind["deferred"].union(*(eqn.outputs for eqn in late))
    needs = [value for value in free_variables(late, other_outputs) if value not in deferred]

    cheap = [eqn for eqn in first if is_cheap(eqn)]
    kept_anyway = by_kind["saved"].union(variables(select(program.outputs, wanted)))
    chosen = _cut(cheap, early, needs, recomputable, kept_anyway)
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
            in_first, in_second = _split_eqn(eqn, outputs, recomputable)
        first += in_first
        second += [eqn for eqn in in_second if eqn.outputs]
        needed.update(value for eqn in in_first for value in variables(eqn.inputs))
    return first[::-1], second[::-1]


def _early(second: Sequence[Eqn], deferred: set[Var]) -> tuple[list[Eqn], list[Eqn]]:
    """Splits off late equations: those that cost much, or that read late or `deferred` values."""
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
    kept_anyway: set[Var],
) -> list[Var]:
    """Returns the values with the fewest bytes that the second half must have."""
    # From these values, cheap equations of the first half and early equations of the second compute
    # all values that the late equations need.
    parents = {
        v: tuple(dict.fromkeys(variables(s.inputs))) for s in (*first, *early) for v in s.outputs
    }
    parents |= dict.fromkeys(recomputable, ())
    moves = [eqn for eqn in (*first, *early) if is_move(eqn) and not is_cast(eqn)]
    moved = {value for eqn in moves for value in eqn.outputs}

    def cost(value: Var) -> int:
        # Of two values with equal bytes, prefers an input or an output of the first half, and then
        # the one whose layout is as it was computed.
        return 3 * value.num_bytes + (value not in kept_anyway) + (value in moved) or 1

    kept = minimal_cut(needs, parents, cost)
    # What only the second half needs is computed there, if it keeps no more bytes for it.
    for eqn in reversed([eqn for eqn in early if is_cheap(eqn)]):
        freed = [value for value in kept if value in eqn.outputs]
        others = [value for value in kept if value not in freed]
        if not freed or eqn in _leading_to(others, early):
            continue
        inputs = dict.fromkeys(variables(eqn.inputs))
        missing = [value for value in inputs if value not in others and value not in recomputable]
        if sum(v.num_bytes for v in missing) <= sum(v.num_bytes for v in freed):
            kept = [*others, *missing]
    return kept


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


EqnLists = tuple[list[Eqn], list[Eqn]]


def _split_eqn(eqn: Eqn, wanted: Sequence[bool], recomputable: set[Var]) -> EqnLists:
    """Partitions an equation: its first half may compute more outputs than are wanted."""
    kinds: list[InputKind] = [
        "recomputable" if isinstance(atom, Literal) or atom in recomputable else "saved"
        for atom in eqn.inputs
    ]
    match eqn.operation:
        case Scan() as loop:
            return _split_scan(eqn, loop, list(wanted), kinds)
        case Cond() as cond:
            return _split_cond(eqn, cond, list(wanted), kinds[1:])
        case ShardMap() as shards:
            return _split_shard_map(eqn, shards, list(wanted), kinds)
        case PrimitiveCall("custom_vmap_call"):
            return _split_custom_vmap(eqn, list(wanted))
    return [eqn], []


def _split_scan(eqn: Eqn, loop: Scan, wanted: list[bool], kinds: list[InputKind]) -> EqnLists:
    body, n = loop.body, loop.num_carry
    carried = slice(loop.num_consts, loop.num_consts + n)
    # The carry of the first loop is not available in the second.
    carry_kinds: list[InputKind] = ["dead" if want else "deferred" for want in wanted[:n]]
    kinds[carried] = carry_kinds
    halves = partition_eqns(body, wanted, kinds)
    needed = free_variables(halves.first, select(body.outputs, wanted))
    more = [value in needed for value in body.inputs[carried]]
    more += [atom in halves.residuals for atom in body.outputs[n:]]
    if (together := _union(more, wanted)) != wanted:
        return _split_scan(eqn, loop, together, kinds)

    returned = _returned(body.outputs[n:], eqn.outputs[n:], wanted[n:])
    produced = {v: _stacked(v, loop.length) for v in halves.residuals if v not in returned}
    first = _part_of_scan(eqn, loop, halves.first, wanted, produced=produced)
    residuals = {v: (returned | produced)[v] for v in halves.residuals}
    second = _part_of_scan(eqn, loop, halves.second, _not(wanted), residuals=residuals)
    return [first], [second]


def _part_of_scan(
    eqn: Eqn,
    loop: Scan,
    eqns: Sequence[Eqn],
    wanted: Sequence[bool],
    *,
    residuals: dict[Var, Var] | None = None,
    produced: dict[Var, Var] | None = None,
) -> Eqn:
    """Returns a scan of some of the equations of a scan.

    It takes `residuals` as additional inputs and returns the wanted outputs and `produced`; both
    map the value in one iteration to the stacked value outside.
    """
    residuals, produced, body = residuals or {}, produced or {}, loop.body
    outputs = (*select(body.outputs, wanted), *produced)
    needed = free_variables(eqns, outputs)
    ends = loop.num_consts, loop.num_consts + loop.num_carry
    pairs = list(zip(body.inputs, eqn.inputs, strict=True))
    consts = [pair for pair in pairs[: ends[0]] if pair[0] in needed]
    carry = select(pairs[ends[0] : ends[1]], wanted[: loop.num_carry])
    xs = [pair for pair in pairs[ends[1] :] if pair[0] in needed]
    inputs = [*consts, *carry, *xs, *residuals.items()]
    inner = Graph(tuple(v for v, _ in inputs), tuple(eqns), outputs)
    part = replace(loop, body=inner, num_consts=len(consts), num_carry=len(carry))
    outer = (*select(eqn.outputs, wanted), *produced.values())
    return Eqn(part, tuple(atom for _, atom in inputs), outer)


def _split_cond(eqn: Eqn, cond: Cond, wanted: list[bool], kinds: list[InputKind]) -> EqnLists:
    branches = cond.branches
    halves = [partition_eqns(branch, wanted, kinds) for branch in branches]
    both = list(zip(branches, halves, strict=True))
    more = [any(b.outputs[i] in h.residuals for b, h in both) for i in range(len(wanted))]
    if (together := _union(more, wanted)) != wanted:
        return _split_cond(eqn, cond, together, kinds)

    produced: list[Var] = []
    residuals_by_branch = [
        _share(half.residuals, _returned(branch.outputs, eqn.outputs, wanted), produced)
        for branch, half in both
    ]
    triples = [(*b, r) for b, r in zip(both, residuals_by_branch, strict=True)]
    firsts = [_first_branch(b, half, wanted, r, produced) for b, half, r in triples]
    passed = list(dict.fromkeys(outer for r in residuals_by_branch for outer in r))
    seconds = [_second_branch(b, half, _not(wanted), r, passed) for b, half, r in triples]
    first = Eqn(Cond(tuple(firsts)), eqn.inputs, (*select(eqn.outputs, wanted), *produced))
    second = Eqn(Cond(tuple(seconds)), (*eqn.inputs, *passed), select(eqn.outputs, _not(wanted)))
    return [_only_read(first)], [_only_read(second)]


def _share(
    residuals: Sequence[Var], returned: dict[Var, Var], produced: list[Var]
) -> dict[Var, Var]:
    """Returns the residuals of a branch by the variables that hold them outside of the cond.

    Such a variable is a `returned` output, one of `produced` of the same type that another branch
    needs, or a new one, which is appended to `produced`.
    """
    vacant, outer_vars = list(produced), {}
    for value in residuals:
        outer_var = returned.get(value) or next((v for v in vacant if v.aval == value.aval), None)
        if outer_var is None:
            outer_var = Var(value.aval)
            produced.append(outer_var)
        elif outer_var in vacant:
            vacant.remove(outer_var)
        outer_vars[outer_var] = value
    return outer_vars


def _first_branch(
    branch: Graph,
    half: EqnPartition,
    wanted: Sequence[bool],
    residuals: dict[Var, Var],
    produced: Sequence[Var],
) -> Graph:
    """Returns a branch of the first cond. It returns zeros for the residuals of other branches."""
    zeros = {outer_var: Var(outer_var.aval) for outer_var in produced if outer_var not in residuals}
    eqns = [Eqn(_zeros(value.aval), (), (value,)) for value in zeros.values()]
    returned = [(residuals | zeros)[outer_var] for outer_var in produced]
    outputs = (*select(branch.outputs, wanted), *returned)
    return Graph(branch.inputs, (*half.first, *eqns), outputs)


def _second_branch(
    branch: Graph,
    half: EqnPartition,
    others: Sequence[bool],
    residuals: dict[Var, Var],
    passed: Sequence[Var],
) -> Graph:
    """Returns a branch of the second cond. It ignores the residuals of other branches."""
    inputs = [residuals.get(outer_var) or Var(outer_var.aval) for outer_var in passed]
    return Graph((*branch.inputs, *inputs), tuple(half.second), select(branch.outputs, others))


def _zeros(aval: Any) -> PrimitiveCall:
    def run() -> list[jax.Array]:
        return [pvary_like(aval, jnp.zeros(aval.shape, aval.dtype))]

    return PrimitiveCall("zeros", run)


def _split_shard_map(
    eqn: Eqn, shards: ShardMap, wanted: list[bool], kinds: list[InputKind]
) -> EqnLists:
    body = shards.body
    halves = partition_eqns(body, wanted, kinds)
    more = [atom in halves.residuals for atom in body.outputs]
    if (together := _union(more, wanted)) != wanted:
        return _split_shard_map(eqn, shards, together, kinds)

    axes = [_varying_axes(value, shards) for value in halves.residuals]
    specs = tuple(PartitionSpec(names or None) for names in axes)
    rows = [_stacked(value, 1) for value in halves.residuals]
    counts = [math.prod(shards.mesh.shape[name] for name in names) for names in axes]
    # Outside of the shard_map only the shape and dtype of a residual are read.
    residuals = [
        Var(ShapedArray((count, *value.aval.shape), value.aval.dtype))
        for value, count in zip(halves.residuals, counts, strict=True)
    ]
    pairs = list(zip(halves.residuals, rows, strict=True))
    put = [Eqn(_ADD_DIM, (value,), (row,)) for value, row in pairs]
    take = [Eqn(_DROP_DIM, (row,), (value,)) for value, row in pairs]

    outputs = (*select(body.outputs, wanted), *rows)
    first = replace(
        shards,
        body=Graph(body.inputs, (*halves.first, *put), outputs),
        out_specs=(*select(shards.out_specs, wanted), *specs),
    )
    in_second = _not(wanted)
    second = replace(
        shards,
        body=Graph((*body.inputs, *rows), (*take, *halves.second), select(body.outputs, in_second)),
        in_specs=(*shards.in_specs, *specs),
        out_specs=select(shards.out_specs, in_second),
    )
    first_eqn = Eqn(first, eqn.inputs, (*select(eqn.outputs, wanted), *residuals))
    second_eqn = Eqn(second, (*eqn.inputs, *residuals), select(eqn.outputs, in_second))
    return [_only_read(first_eqn)], [_only_read(second_eqn)]


_ADD_DIM = PrimitiveCall("expand_dims", lambda x: [jnp.expand_dims(x, 0)])
_DROP_DIM = PrimitiveCall("squeeze", lambda x: [jnp.squeeze(x, 0)])


def _varying_axes(value: Var, shards: ShardMap) -> tuple[str, ...]:
    """Returns the manual axes along which a value may differ between devices."""
    varying = value.aval.manual_axis_type.varying if shards.check_vma else shards.axes
    return tuple(name for name in shards.mesh.axis_names if name in varying & shards.axes)


def _split_custom_vmap(eqn: Eqn, wanted: list[bool]) -> EqnLists:
    """Partitions a `custom_vmap` call if it needs no residuals: its batching rule has none."""
    assert isinstance(eqn.operation, PrimitiveCall) and eqn.operation.equation is not None
    equation = eqn.operation.equation
    call = to_graph(equation.params["call"])
    first, second = (
        _leading_to(variables(select(call.outputs, mask)), call.eqns)
        for mask in (wanted, _not(wanted))
    )
    if any(inner in first and not is_cheap(inner) for inner in second):
        return [eqn], []
    return [_only_outputs(eqn, wanted)], [_only_outputs(eqn, _not(wanted))]


def _only_outputs(eqn: Eqn, wanted: Sequence[bool]) -> Eqn:
    """Returns a `custom_vmap` call without the outputs that are not wanted."""
    assert isinstance(eqn.operation, PrimitiveCall) and eqn.operation.equation is not None
    equation = eqn.operation.equation
    params = equation.params
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr_of(params["call"]), list(wanted), instantiate=True)

    def rule(*arguments: Any) -> tuple[list[Any], list[bool]]:
        result, is_mapped = map(jax.tree.leaves, params["rule"](*arguments))
        return list(select(result, wanted)), list(select(is_mapped, wanted))

    outputs = select(equation.outvars, wanted)
    part = equation.replace(
        outvars=list(outputs),
        params=params
        | {
            "call": ClosedJaxpr(jaxpr, params["call"].consts),
            "rule": rule,
            "out_tree": jax.tree.structure([0] * len(outputs)),
        },
    )
    operation = PrimitiveCall(part.primitive.name, bind(part, jaxpr), part.params, part)
    return Eqn(operation, eqn.inputs, select(eqn.outputs, wanted))


def _only_read(eqn: Eqn) -> Eqn:
    """Returns a cond or a shard_map without the inputs that its programs do not read."""
    operation = eqn.operation
    if isinstance(operation, Cond):
        used = [set(free_variables(b.eqns, b.outputs)) for b in operation.branches]
        indices = range(len(eqn.inputs) - 1)
        is_read = [
            any(b.inputs[i] in u for b, u in zip(operation.branches, used, strict=True))
            for i in indices
        ]
        branches = tuple(replace(b, inputs=select(b.inputs, is_read)) for b in operation.branches)
        return replace(eqn, operation=Cond(branches), inputs=select(eqn.inputs, (True, *is_read)))
    assert isinstance(operation, ShardMap)
    body = operation.body
    used = free_variables(body.eqns, body.outputs)
    is_read = [value in used for value in body.inputs]
    operation = replace(
        operation,
        body=replace(body, inputs=select(body.inputs, is_read)),
        in_specs=select(operation.in_specs, is_read),
    )
    return replace(eqn, operation=operation, inputs=select(eqn.inputs, is_read))


def _returned(
    inner: Sequence[Atom], outer: Sequence[Var], wanted: Sequence[bool]
) -> dict[Var, Var]:
    """Returns the values inside that the first half returns anyway, with their outer variables."""
    pairs = select(zip(inner, outer, strict=True), wanted)
    return {atom: value for atom, value in pairs if isinstance(atom, Var)}


def _stacked(value: Var, length: int) -> Var:
    return Var(unmapped_aval(length, 0, value.aval))


def _not(wanted: Sequence[bool]) -> list[bool]:
    return [not want for want in wanted]


def _union(a: Sequence[bool], b: Sequence[bool]) -> list[bool]:
    return [x or y for x, y in zip(a, b, strict=True)]
