"""Divides an equation with programs inside: a scan into two scans, a cond into two conds.

The first one computes the wanted outputs, and links for the second, which computes the others.
Links leave a scan stacked by iteration, a cond in variables that its branches share, and a
shard_map stacked by device.
"""

import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, unmapped_aval
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from ._cost import is_cheap
from ._equations import bind, jaxpr_of
from ._graph import (
    Atom,
    Cond,
    Eqn,
    Graph,
    Literal,
    PrimitiveCall,
    Scan,
    ShardMap,
    Var,
    free_variables,
    select,
    to_graph,
    variables,
)

Kind = typing.Literal["free", "kept", "gone", "own"]
"""Availability of an input to the second half. "free": always available. "kept": available on
request, and then kept in memory until the second half runs. "gone": not available, so values that
depend on it must be links. "own": available to the second half only, not to the first."""


@dataclass(frozen=True)
class Halves:
    """Equations of both halves, some in both, and the links between the halves.

    Links are values that the first half computes and the second reads, without inputs that are
    available to the second half in any case.
    """

    first: list[Eqn]
    second: list[Eqn]
    links: list[Var]


Divide = Callable[[Graph, Sequence[bool], Sequence[Kind]], Halves]
Pair = tuple[list[Eqn], list[Eqn]]


def split_step(step: Eqn, wanted: Sequence[bool], free: set[Var], divide: Divide) -> Pair:
    """Divides an equation between both halves. The first may compute more outputs than are wanted.

    Args:
        step: An equation some of whose outputs are wanted.
        wanted: [num_outputs] whether the first half needs each output.
        free: Values that the second half has, or can compute at little cost.
        divide: The function that divides the programs inside, `_partition.divide`.

    Returns:
        The equations of the first half and those of the second.
    """
    kinds: list[Kind] = [
        "free" if isinstance(atom, Literal) or atom in free else "kept" for atom in step.inputs
    ]
    match step.operation:
        case Scan() as loop:
            return _split_loop(step, loop, list(wanted), kinds, divide)
        case Cond() as choice:
            return _split_choice(step, choice, list(wanted), kinds[1:], divide)
        case ShardMap() as shards:
            return _split_shards(step, shards, list(wanted), kinds, divide)
        case PrimitiveCall("custom_vmap_call"):
            return _split_custom_vmap(step, list(wanted))
    return [step], []


def _split_loop(
    step: Eqn, loop: Scan, wanted: list[bool], kinds: list[Kind], divide: Divide
) -> Pair:
    body, n = loop.body, loop.num_carry
    carried = slice(loop.num_consts, loop.num_consts + n)
    # The carry of the first loop is not available in the second.
    carry_kinds: list[Kind] = ["gone" if want else "own" for want in wanted[:n]]
    kinds[carried] = carry_kinds
    halves = divide(body, wanted, kinds)
    needed = free_variables(halves.first, select(body.outputs, wanted))
    more = [value in needed for value in body.inputs[carried]]
    more += [atom in halves.links for atom in body.outputs[n:]]
    if any(_news(more, wanted)):
        return _split_loop(step, loop, _either(more, wanted), kinds, divide)

    known = _known_outside(body.outputs[n:], step.outputs[n:], wanted[n:])
    made = {v: _stacked(v, loop.length) for v in halves.links if v not in known}
    first = _part_of_loop(step, loop, halves.first, wanted, made=made)
    links = {v: (known | made)[v] for v in halves.links}
    second = _part_of_loop(step, loop, halves.second, _not(wanted), links=links)
    return [first], [second]


def _part_of_loop(
    step: Eqn,
    loop: Scan,
    steps: Sequence[Eqn],
    wanted: Sequence[bool],
    *,
    links: dict[Var, Var] | None = None,
    made: dict[Var, Var] | None = None,
) -> Eqn:
    """Returns a scan of some of the equations of a scan.

    It takes `links` as additional inputs, and returns the wanted outputs and `made`. Both map the
    value in one iteration to the stacked value outside.
    """
    links, made, body = links or {}, made or {}, loop.body
    outputs = (*select(body.outputs, wanted), *made)
    needed = free_variables(steps, outputs)
    ends = loop.num_consts, loop.num_consts + loop.num_carry
    pairs = list(zip(body.inputs, step.inputs, strict=True))
    consts = [pair for pair in pairs[: ends[0]] if pair[0] in needed]
    carry = select(pairs[ends[0] : ends[1]], wanted[: loop.num_carry])
    xs = [pair for pair in pairs[ends[1] :] if pair[0] in needed]
    given = [*consts, *carry, *xs, *links.items()]
    inner = Graph(tuple(v for v, _ in given), tuple(steps), outputs)
    part = replace(loop, body=inner, num_consts=len(consts), num_carry=len(carry))
    outer = (*select(step.outputs, wanted), *made.values())
    return Eqn(part, tuple(atom for _, atom in given), outer)


def _split_choice(
    step: Eqn, choice: Cond, wanted: list[bool], kinds: list[Kind], divide: Divide
) -> Pair:
    branches = choice.branches
    halves = [divide(branch, wanted, kinds) for branch in branches]
    both = list(zip(branches, halves, strict=True))
    more = [any(b.outputs[i] in h.links for b, h in both) for i in range(len(wanted))]
    if any(_news(more, wanted)):
        return _split_choice(step, choice, _either(more, wanted), kinds, divide)

    made: list[Var] = []
    links = [
        _share(half.links, _known_outside(branch.outputs, step.outputs, wanted), made)
        for branch, half in both
    ]
    firsts = [_first_branch(*b, wanted, link, made) for b, link in zip(both, links, strict=True)]
    passed = list(dict.fromkeys(outer for link in links for outer in link))
    seconds = [
        _second_branch(*b, _not(wanted), link, passed) for b, link in zip(both, links, strict=True)
    ]
    first = Eqn(Cond(tuple(firsts)), step.inputs, (*select(step.outputs, wanted), *made))
    second = Eqn(Cond(tuple(seconds)), (*step.inputs, *passed), select(step.outputs, _not(wanted)))
    return [_only_read(first)], [_only_read(second)]


def _share(links: Sequence[Var], known: dict[Var, Var], made: list[Var]) -> dict[Var, Var]:
    """Returns the links of a branch by the variables that hold them outside of the cond.

    Such a variable is an output that is `known`, a link in `made` of the same type that another
    branch needs, or a new one, which is appended to `made`.
    """
    vacant, places = list(made), {}
    for value in links:
        place = known.get(value) or next((v for v in vacant if v.aval == value.aval), None)
        if place is None:
            place = Var(value.aval)
            made.append(place)
        elif place in vacant:
            vacant.remove(place)
        places[place] = value
    return places


def _first_branch(
    branch: Graph,
    half: Halves,
    wanted: Sequence[bool],
    links: dict[Var, Var],
    made: Sequence[Var],
) -> Graph:
    """Returns a branch of the first cond. It returns zeros for the links of other branches."""
    zeros = {place: Var(place.aval) for place in made if place not in links}
    steps = [Eqn(_zeros(value.aval), (), (value,)) for value in zeros.values()]
    returned = [(links | zeros)[place] for place in made]
    outputs = (*select(branch.outputs, wanted), *returned)
    return Graph(branch.inputs, (*half.first, *steps), outputs)


def _second_branch(
    branch: Graph,
    half: Halves,
    others: Sequence[bool],
    links: dict[Var, Var],
    passed: Sequence[Var],
) -> Graph:
    """Returns a branch of the second cond. It ignores the links of other branches."""
    given = [links[place] if place in links else Var(place.aval) for place in passed]
    return Graph((*branch.inputs, *given), tuple(half.second), select(branch.outputs, others))


def _zeros(aval: Any) -> PrimitiveCall:
    def run() -> list[jax.Array]:
        zeros, axes = (
            jnp.zeros(aval.shape, aval.dtype),
            tuple(sorted(aval.manual_axis_type.varying)),
        )
        return [lax.pcast(zeros, axes, to="varying") if axes else zeros]

    return PrimitiveCall("zeros", run)


def _split_shards(
    step: Eqn, shards: ShardMap, wanted: list[bool], kinds: list[Kind], divide: Divide
) -> Pair:
    body = shards.body
    halves = divide(body, wanted, kinds)
    more = [atom in halves.links for atom in body.outputs]
    if any(_news(more, wanted)):
        return _split_shards(step, shards, _either(more, wanted), kinds, divide)

    axes = [_apart(value, shards) for value in halves.links]
    specs = tuple(PartitionSpec(names or None) for names in axes)
    rows = [_stacked(value, 1) for value in halves.links]
    counts = [math.prod(shards.mesh.shape[name] for name in names) for names in axes]
    # Outside of the shard_map only the shape and dtype of a link are read.
    links = [
        Var(ShapedArray((count, *value.aval.shape), value.aval.dtype))
        for value, count in zip(halves.links, counts, strict=True)
    ]
    pairs = list(zip(halves.links, rows, strict=True))
    put = [Eqn(_ADD_DIM, (value,), (row,)) for value, row in pairs]
    take = [Eqn(_DROP_DIM, (row,), (value,)) for value, row in pairs]

    outputs = (*select(body.outputs, wanted), *rows)
    first = replace(
        shards,
        body=Graph(body.inputs, (*halves.first, *put), outputs),
        out_specs=(*select(shards.out_specs, wanted), *specs),
    )
    others = _not(wanted)
    second = replace(
        shards,
        body=Graph((*body.inputs, *rows), (*take, *halves.second), select(body.outputs, others)),
        in_specs=(*shards.in_specs, *specs),
        out_specs=select(shards.out_specs, others),
    )
    ours = Eqn(first, step.inputs, (*select(step.outputs, wanted), *links))
    theirs = Eqn(second, (*step.inputs, *links), select(step.outputs, others))
    return [_only_read(ours)], [_only_read(theirs)]


_ADD_DIM = PrimitiveCall("expand_dims", lambda x: [jnp.expand_dims(x, 0)])
_DROP_DIM = PrimitiveCall("squeeze", lambda x: [jnp.squeeze(x, 0)])


def _apart(value: Var, shards: ShardMap) -> tuple[str, ...]:
    """Returns the manual axes along which a value may differ between devices."""
    varying = value.aval.manual_axis_type.varying if shards.check_vma else shards.axes
    return tuple(name for name in shards.mesh.axis_names if name in varying & shards.axes)


def _split_custom_vmap(step: Eqn, wanted: list[bool]) -> Pair:
    """Divides a `custom_vmap` call only if no link is needed: its batching rule knows no links."""
    assert isinstance(step.operation, PrimitiveCall) and step.operation.equation is not None
    equation = step.operation.equation
    call = to_graph(equation.params["call"])
    ours, theirs = (_needed(call, mask) for mask in (wanted, _not(wanted)))
    if any(inner in ours and not is_cheap(inner) for inner in theirs):
        return [step], []
    return [_only_outputs(step, wanted)], [_only_outputs(step, _not(wanted))]


def _only_outputs(step: Eqn, wanted: Sequence[bool]) -> Eqn:
    """Returns a `custom_vmap` call without the outputs that are not wanted."""
    assert isinstance(step.operation, PrimitiveCall) and step.operation.equation is not None
    equation = step.operation.equation
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
    return Eqn(operation, step.inputs, select(step.outputs, wanted))


def _needed(body: Graph, wanted: Sequence[bool]) -> list[Eqn]:
    """Returns the equations on which the wanted outputs depend, last equation first."""
    needed, steps = set(variables(select(body.outputs, wanted))), []
    for step in reversed(body.steps):
        if needed.intersection(step.outputs):
            steps.append(step)
            needed.update(variables(step.inputs))
    return steps


def _only_read(step: Eqn) -> Eqn:
    """Returns a cond or a shard_map without the inputs that its programs do not read."""
    operation = step.operation
    if isinstance(operation, Cond):
        used = [set(free_variables(b.steps, b.outputs)) for b in operation.branches]
        indices = range(len(step.inputs) - 1)
        kept = [
            any(b.inputs[i] in u for b, u in zip(operation.branches, used, strict=True))
            for i in indices
        ]
        branches = tuple(replace(b, inputs=select(b.inputs, kept)) for b in operation.branches)
        return replace(step, operation=Cond(branches), inputs=select(step.inputs, (True, *kept)))
    assert isinstance(operation, ShardMap)
    body = operation.body
    used = free_variables(body.steps, body.outputs)
    kept = [value in used for value in body.inputs]
    operation = replace(
        operation,
        body=replace(body, inputs=select(body.inputs, kept)),
        in_specs=select(operation.in_specs, kept),
    )
    return replace(step, operation=operation, inputs=select(step.inputs, kept))


def _known_outside(
    inner: Sequence[Atom], outer: Sequence[Var], wanted: Sequence[bool]
) -> dict[Var, Var]:
    """Returns the values inside that the first half returns anyway, with their outer variables."""
    pairs = select(zip(inner, outer, strict=True), wanted)
    return {atom: value for atom, value in pairs if isinstance(atom, Var)}


def _stacked(value: Var, length: int) -> Var:
    return Var(unmapped_aval(length, 0, value.aval))


def _not(wanted: Sequence[bool]) -> list[bool]:
    return [not want for want in wanted]


def _either(a: Sequence[bool], b: Sequence[bool]) -> list[bool]:
    return [x or y for x, y in zip(a, b, strict=True)]


def _news(more: Sequence[bool], wanted: Sequence[bool]) -> list[bool]:
    return [new and not old for new, old in zip(more, wanted, strict=True)]
