"""Unrolls scans around loops over microbatches, and refuses loops and marks that cannot be cut.

Only loops at the top level of a function can be pipelined, and only marks at the top level of the
body of `treduce` can be cut. Inside another construct they would run without a pipeline, so both
are errors that name the construct.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import jaxprs_in_params

from ...ir._graph import Atom, Cond, Eqn, Graph, PrimitiveCall, Scan, ShardMap, Var
from ..ir._marks import NAME as MARK
from ..ir._reduce import NAME as LOOP
from ..ir._steps import aval_of, substituted, with_outputs

MOST_TURNS = 64
"""Maximum length of a scan that is unrolled. A longer scan would take minutes to lower."""


def unrolled(outer: Graph) -> Graph:
    """Unrolls every `lax.scan` around a loop over microbatches.

    Args:
        outer: The function.

    Returns:
        The function without such scans.

    Raises:
        ValueError: If such a scan has more than `MOST_TURNS` iterations.
    """
    steps: list[Eqn] = []
    known: dict[Var, Atom] = {}
    for step in outer.steps:
        (step,) = substituted([step], known)
        steps += _unrolled(step, known)
    return with_outputs(outer, steps, known)


def check_reachable(program: Graph, where: str) -> None:
    """Checks that no mark and no loop over microbatches is inside another construct.

    Args:
        program: A function whose scans around loops are unrolled, or the body of a loop.
        where: The name of the program in errors: "the function" or "a stage".

    Raises:
        ValueError: If a mark or a loop is inside a construct such as `lax.cond`. The error names
            the construct and says how to avoid it.
    """
    for step in program.steps:
        if is_loop(step) and where == "a stage":
            raise ValueError(
                "`treduce` is called inside of the function that another `treduce` is given. Call "
                "the two one after the other, or use `lax.scan` for the inner one."
            )
        if any(_names_inside(step, LOOP)):
            raise ValueError(
                f"`treduce` is called inside {_construct(step)}, where it would run without a "
                f"pipeline. {_instead(step)}"
            )
        if any(_names_inside(step, MARK)):
            raise ValueError(
                f"A stage ends inside {_construct(step)} within {where}, where it cannot be cut. "
                "Mark stages in a Python loop, and leave `lax.scan`, `lax.cond` and `shard_map` "
                "to what is inside a stage."
            )


def is_loop(step: Eqn) -> bool:
    """Returns whether the equation is a loop over microbatches."""
    return isinstance(step.operation, PrimitiveCall) and step.operation.name == LOOP


def _unrolled(step: Eqn, known: dict[Var, Atom]) -> list[Eqn]:
    """Returns the equations that replace `step`, and maps its outputs to theirs in `known`."""
    if not isinstance(step.operation, Scan) or not any(_names_inside(step, LOOP)):
        return [step]
    loop = step.operation
    if loop.length > MOST_TURNS:
        raise ValueError(
            f"`treduce` is called inside a `lax.scan` or `lax.fori_loop` of {loop.length} turns, "
            f"which is written out, and of more than {MOST_TURNS} that takes too long. Call the "
            "compiled function once for each turn, in a Python loop."
        )
    consts, carry, xs = _cut(step.inputs, loop.num_consts, loop.num_carry)
    steps: list[Eqn] = []
    ys: list[list[Atom]] = []
    for turn in range(loop.length):
        i = loop.length - 1 - turn if loop.reverse else turn
        slices = [_slice(x, i) for x in xs]
        steps += slices
        of_turn = [s.outputs[0] for s in slices]
        inside, made = _turn(loop.body, [*consts, *carry, *of_turn])
        steps += inside
        carry, of_turn_ys = made[: loop.num_carry], made[loop.num_carry :]
        ys.append(list(of_turn_ys))
    known.update(zip(step.outputs[: loop.num_carry], carry, strict=True))
    in_order = ys[::-1] if loop.reverse else ys
    for i, output in enumerate(step.outputs[loop.num_carry :]):
        run = partial(_stacked, output.aval)
        parts = tuple(y[i] for y in in_order)
        steps.append(Eqn(PrimitiveCall("concatenate", run), parts, (output,)))
    return steps


def _cut(inputs: Sequence[Atom], num_consts: int, num_carry: int) -> Any:
    end = num_consts + num_carry
    return inputs[:num_consts], inputs[num_consts:end], inputs[end:]


def _slice(x: Atom, i: int) -> Eqn:
    aval = aval_of(x)
    out = Var(ShapedArray(aval.shape[1:], aval.dtype))
    return Eqn(PrimitiveCall("slice", partial(_indexed, i)), (x,), (out,))


def _indexed(i: int, x: Any) -> list[jax.Array]:
    return [jnp.asarray(x)[i]]


def _stacked(aval: Any, *ys: Any) -> list[jax.Array]:
    return [jnp.stack([jnp.asarray(y, aval.dtype) for y in ys]) if ys else jnp.zeros(aval.shape)]


def _turn(body: Graph, given: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """Returns the equations of one iteration with new variables, and its outputs.

    Unrolls inner scans too.
    """
    known: dict[Var, Atom] = dict(zip(body.inputs, given, strict=True))
    steps: list[Eqn] = []
    for step in body.steps:
        outputs = tuple(Var(value.aval) for value in step.outputs)
        (own,) = substituted([replace(step, outputs=outputs)], known)
        known.update(zip(step.outputs, outputs, strict=True))
        later: dict[Var, Atom] = {}
        steps += _unrolled(own, later)
        known |= {old: later.get(new, new) for old, new in zip(step.outputs, outputs, strict=True)}
    return steps, list(with_outputs(body, steps, known).outputs)


def _names_inside(step: Eqn, name: str) -> Iterator[bool]:
    """Yields True for each equation named `name` inside `step`, at any depth."""
    match step.operation:
        case Scan(body=body) | ShardMap(body=body):
            bodies = [body]
        case Cond(branches=branches):
            bodies = list(branches)
        case PrimitiveCall(name=own, equation=equation):
            if own != LOOP and equation is not None and _in_jaxprs(equation.params, name):
                yield True
            return
    for body in bodies:
        for inner in body.steps:
            if isinstance(inner.operation, PrimitiveCall) and inner.operation.name == name:
                yield True
            yield from _names_inside(inner, name)


def _in_jaxprs(params: dict[str, Any], name: str) -> bool:
    return any(
        equation.primitive.name == name
        or (equation.primitive.name != LOOP and _in_jaxprs(equation.params, name))
        for jaxpr in jaxprs_in_params(params)
        for equation in jaxpr.eqns
    )


def _construct(step: Eqn) -> str:
    match step.operation:
        case Scan():
            return "`lax.scan`"
        case Cond():
            return "`lax.cond`"
        case ShardMap():
            return "`jax.shard_map`"
        case PrimitiveCall(name="while"):
            return "`lax.while_loop`, or `lax.fori_loop` with traced bounds"
        case PrimitiveCall(name="jit"):
            return "`jax.jit` with shardings of its own"
        case PrimitiveCall(name=name):
            return f"`{name}`"


def _instead(step: Eqn) -> str:
    match step.operation:
        case Cond():
            return (
                "Choose in Python, or run the loop in any case and choose between results with "
                "`jnp.where`."
            )
        case PrimitiveCall(name="while"):
            return (
                "Use `lax.scan`, or `lax.fori_loop` with Python integers as bounds, which are "
                "written out; or call the compiled function once for each turn."
            )
        case PrimitiveCall(name="jit"):
            return "Leave out its shardings, and give them to `mpmd_jit_with_loop` instead."
    return "Call `treduce` outside of it."
