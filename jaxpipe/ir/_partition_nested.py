"""A step with programs inside, divided: two loops for a loop, two choices for a choice.

The first computes what is wanted of the step, and links for the second, which computes the rest.
Links leave a loop stacked by its turns, a choice in places that its branches share, and a map over
shards stacked by devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

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
    Choice,
    Constant,
    Loop,
    Plain,
    Program,
    Shards,
    Step,
    Value,
    pick,
    program,
    read,
    values,
)

Kind = Literal["free", "kept", "gone", "own"]
"""What an input is to the second half: there in any case; there if it asks for it, and then kept
until it runs; gone, so that what it needs of it is a link; or its own, so that the first half must
do without."""


@dataclass(frozen=True)
class Halves:
    """The steps of a program by halves, some in both, and the values of the first that the second
    reads and that are not there anyway."""

    first: list[Step]
    second: list[Step]
    links: list[Value]


Divide = Callable[[Program, Sequence[bool], Sequence[Kind]], Halves]
Pair = tuple[list[Step], list[Step]]


def split_step(step: Step, wanted: Sequence[bool], free: set[Value], divide: Divide) -> Pair:
    """A step as steps of both halves. The first may compute more than what is wanted of it.

    Args:
        step: Of some outputs more are wanted than of others.
        wanted: Which outputs the first half needs.
        free: Values that the second half has, or can compute at no cost.
        divide: `fission` for the programs inside.
    """
    kinds: list[Kind] = [
        "free" if isinstance(atom, Constant) or atom in free else "kept" for atom in step.inputs
    ]
    match step.operation:
        case Loop() as loop:
            return _split_loop(step, loop, list(wanted), kinds, divide)
        case Choice() as choice:
            return _split_choice(step, choice, list(wanted), kinds[1:], divide)
        case Shards() as shards:
            return _split_shards(step, shards, list(wanted), kinds, divide)
        case Plain("custom_vmap_call"):
            return _split_custom_vmap(step, list(wanted))
    return [step], []


def _split_loop(
    step: Step, loop: Loop, wanted: list[bool], kinds: list[Kind], divide: Divide
) -> Pair:
    body, n = loop.body, loop.num_carry
    carried = slice(loop.num_consts, loop.num_consts + n)
    # What goes from turn to turn in the first loop is not there in the second.
    of_carry: list[Kind] = ["gone" if want else "own" for want in wanted[:n]]
    kinds[carried] = of_carry
    halves = divide(body, wanted, kinds)
    needed = read(halves.first, pick(body.outputs, wanted))
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
    step: Step,
    loop: Loop,
    steps: Sequence[Step],
    wanted: Sequence[bool],
    *,
    links: dict[Value, Value] | None = None,
    made: dict[Value, Value] | None = None,
) -> Step:
    """A loop of some of the steps. It is given `links`, and returns what is wanted and `made`:
    of both the value in a turn, and that of all turns out here."""
    links, made, body = links or {}, made or {}, loop.body
    outputs = (*pick(body.outputs, wanted), *made)
    needed = read(steps, outputs)
    ends = loop.num_consts, loop.num_consts + loop.num_carry
    pairs = list(zip(body.inputs, step.inputs, strict=True))
    consts = [pair for pair in pairs[: ends[0]] if pair[0] in needed]
    carry = pick(pairs[ends[0] : ends[1]], wanted[: loop.num_carry])
    xs = [pair for pair in pairs[ends[1] :] if pair[0] in needed]
    given = [*consts, *carry, *xs, *links.items()]
    inner = Program(tuple(v for v, _ in given), tuple(steps), outputs)
    part = replace(loop, body=inner, num_consts=len(consts), num_carry=len(carry))
    outer = (*pick(step.outputs, wanted), *made.values())
    return Step(part, tuple(atom for _, atom in given), outer)


def _split_choice(
    step: Step, choice: Choice, wanted: list[bool], kinds: list[Kind], divide: Divide
) -> Pair:
    branches = choice.branches
    halves = [divide(branch, wanted, kinds) for branch in branches]
    both = list(zip(branches, halves, strict=True))
    more = [any(b.outputs[i] in h.links for b, h in both) for i in range(len(wanted))]
    if any(_news(more, wanted)):
        return _split_choice(step, choice, _either(more, wanted), kinds, divide)

    made: list[Value] = []
    links = [
        _share(half.links, _known_outside(branch.outputs, step.outputs, wanted), made)
        for branch, half in both
    ]
    firsts = [_first_branch(*b, wanted, link, made) for b, link in zip(both, links, strict=True)]
    passed = list(dict.fromkeys(outer for link in links for outer in link))
    seconds = [
        _second_branch(*b, _not(wanted), link, passed) for b, link in zip(both, links, strict=True)
    ]
    first = Step(Choice(tuple(firsts)), step.inputs, (*pick(step.outputs, wanted), *made))
    second = Step(Choice(tuple(seconds)), (*step.inputs, *passed), pick(step.outputs, _not(wanted)))
    return [_only_read(first)], [_only_read(second)]


def _share(
    links: Sequence[Value], known: dict[Value, Value], made: list[Value]
) -> dict[Value, Value]:
    """The links of a branch by where they lie out here: in an output that is `known`, in a link
    that is `made` for other branches and has the same type, or in one that is made now."""
    vacant, places = list(made), {}
    for value in links:
        place = known.get(value) or next((v for v in vacant if v.aval == value.aval), None)
        if place is None:
            place = Value(value.aval)
            made.append(place)
        elif place in vacant:
            vacant.remove(place)
        places[place] = value
    return places


def _first_branch(
    branch: Program,
    half: Halves,
    wanted: Sequence[bool],
    links: dict[Value, Value],
    made: Sequence[Value],
) -> Program:
    """It returns zeros for links of other branches."""
    zeros = {place: Value(place.aval) for place in made if place not in links}
    steps = [Step(_zeros(value.aval), (), (value,)) for value in zeros.values()]
    returned = [(links | zeros)[place] for place in made]
    outputs = (*pick(branch.outputs, wanted), *returned)
    return Program(branch.inputs, (*half.first, *steps), outputs)


def _second_branch(
    branch: Program,
    half: Halves,
    others: Sequence[bool],
    links: dict[Value, Value],
    passed: Sequence[Value],
) -> Program:
    given = [links[place] if place in links else Value(place.aval) for place in passed]
    return Program((*branch.inputs, *given), tuple(half.second), pick(branch.outputs, others))


def _zeros(aval: Any) -> Plain:
    def run() -> list[jax.Array]:
        zeros, axes = (
            jnp.zeros(aval.shape, aval.dtype),
            tuple(sorted(aval.manual_axis_type.varying)),
        )
        return [lax.pcast(zeros, axes, to="varying") if axes else zeros]

    return Plain("zeros", run)


def _split_shards(
    step: Step, shards: Shards, wanted: list[bool], kinds: list[Kind], divide: Divide
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
    # Outside, nobody asks for more of their type than this.
    links = [
        Value(ShapedArray((count, *value.aval.shape), value.aval.dtype))
        for value, count in zip(halves.links, counts, strict=True)
    ]
    pairs = list(zip(halves.links, rows, strict=True))
    put = [Step(_ADD_DIM, (value,), (row,)) for value, row in pairs]
    take = [Step(_DROP_DIM, (row,), (value,)) for value, row in pairs]

    outputs = (*pick(body.outputs, wanted), *rows)
    first = replace(
        shards,
        body=Program(body.inputs, (*halves.first, *put), outputs),
        out_specs=(*pick(shards.out_specs, wanted), *specs),
    )
    others = _not(wanted)
    second = replace(
        shards,
        body=Program((*body.inputs, *rows), (*take, *halves.second), pick(body.outputs, others)),
        in_specs=(*shards.in_specs, *specs),
        out_specs=pick(shards.out_specs, others),
    )
    ours = Step(first, step.inputs, (*pick(step.outputs, wanted), *links))
    theirs = Step(second, (*step.inputs, *links), pick(step.outputs, others))
    return [_only_read(ours)], [_only_read(theirs)]


_ADD_DIM = Plain("expand_dims", lambda x: [jnp.expand_dims(x, 0)])
_DROP_DIM = Plain("squeeze", lambda x: [jnp.squeeze(x, 0)])


def _apart(value: Value, shards: Shards) -> tuple[str, ...]:
    """The axes that tell devices apart which may have different values."""
    varying = value.aval.manual_axis_type.varying if shards.check_vma else shards.axes
    return tuple(name for name in shards.mesh.axis_names if name in varying & shards.axes)


def _split_custom_vmap(step: Step, wanted: list[bool]) -> Pair:
    """Its own rule for `jax.vmap` knows no links: it is divided only where it needs none."""
    assert isinstance(step.operation, Plain) and step.operation.equation is not None
    equation = step.operation.equation
    call = program(equation.params["call"])
    ours, theirs = (_needed(call, mask) for mask in (wanted, _not(wanted)))
    if any(inner in ours and not is_cheap(inner) for inner in theirs):
        return [step], []
    return [_only_outputs(step, wanted)], [_only_outputs(step, _not(wanted))]


def _only_outputs(step: Step, wanted: Sequence[bool]) -> Step:
    """A call with its own rule for `jax.vmap`, without the outputs that are not wanted."""
    assert isinstance(step.operation, Plain) and step.operation.equation is not None
    equation = step.operation.equation
    params = equation.params
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr_of(params["call"]), list(wanted), instantiate=True)

    def rule(*arguments: Any) -> tuple[list[Any], list[bool]]:
        result, is_mapped = map(jax.tree.leaves, params["rule"](*arguments))
        return list(pick(result, wanted)), list(pick(is_mapped, wanted))

    outputs = pick(equation.outvars, wanted)
    part = equation.replace(
        outvars=list(outputs),
        params=params
        | {
            "call": ClosedJaxpr(jaxpr, params["call"].consts),
            "rule": rule,
            "out_tree": jax.tree.structure([0] * len(outputs)),
        },
    )
    operation = Plain(part.primitive.name, bind(part, jaxpr), part.params, part)
    return Step(operation, step.inputs, pick(step.outputs, wanted))


def _needed(body: Program, wanted: Sequence[bool]) -> list[Step]:
    needed, steps = set(values(pick(body.outputs, wanted))), []
    for step in reversed(body.steps):
        if needed.intersection(step.outputs):
            steps.append(step)
            needed.update(values(step.inputs))
    return steps


def _only_read(step: Step) -> Step:
    """A choice or a map over shards without the inputs that its programs do not read."""
    operation = step.operation
    if isinstance(operation, Choice):
        used = [set(read(b.steps, b.outputs)) for b in operation.branches]
        indices = range(len(step.inputs) - 1)
        kept = [
            any(b.inputs[i] in u for b, u in zip(operation.branches, used, strict=True))
            for i in indices
        ]
        branches = tuple(replace(b, inputs=pick(b.inputs, kept)) for b in operation.branches)
        return replace(step, operation=Choice(branches), inputs=pick(step.inputs, (True, *kept)))
    assert isinstance(operation, Shards)
    body = operation.body
    used = read(body.steps, body.outputs)
    kept = [value in used for value in body.inputs]
    operation = replace(
        operation,
        body=replace(body, inputs=pick(body.inputs, kept)),
        in_specs=pick(operation.in_specs, kept),
    )
    return replace(step, operation=operation, inputs=pick(step.inputs, kept))


def _known_outside(
    inner: Sequence[Atom], outer: Sequence[Value], wanted: Sequence[bool]
) -> dict[Value, Value]:
    """Values inside that the first half returns in any case, and what they are out here."""
    pairs = pick(zip(inner, outer, strict=True), wanted)
    return {atom: value for atom, value in pairs if isinstance(atom, Value)}


def _stacked(value: Value, length: int) -> Value:
    return Value(unmapped_aval(length, 0, value.aval))


def _not(wanted: Sequence[bool]) -> list[bool]:
    return [not want for want in wanted]


def _either(a: Sequence[bool], b: Sequence[bool]) -> list[bool]:
    return [x or y for x, y in zip(a, b, strict=True)]


def _news(more: Sequence[bool], wanted: Sequence[bool]) -> list[bool]:
    return [new and not old for new, old in zip(more, wanted, strict=True)]
