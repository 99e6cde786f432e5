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

from ...ir.graph import Atom, Cond, Eqn, Graph, PrimitiveCall, Scan, ShardMap, Var
from ..ir._eqns import aval_of, substitute_inputs, with_outputs
from ..ir._marks import STAGE_END as MARK
from ..ir._reduce import TREDUCE as LOOP

MAX_UNROLLED_LENGTH = 64
"""Maximum length of a scan that is unrolled. A longer scan would take minutes to lower."""


def unroll_scans(outer: Graph) -> Graph:
    """Unrolls every `lax.scan` around a loop over microbatches.

    Args:
        outer: The function.

    Returns:
        The function without such scans.

    Raises:
        ValueError: If such a scan has more than `MAX_UNROLLED_LENGTH` iterations.
    """
    eqns: list[Eqn] = []
    known: dict[Var, Atom] = {}
    for eqn in outer.eqns:
        (eqn,) = substitute_inputs([eqn], known)
        eqns += _unroll_scan(eqn, known)
    return with_outputs(outer, eqns, known)


def check_reachable(graph: Graph, where: str) -> None:
    """Checks that no mark and no loop over microbatches is inside another construct.

    Args:
        graph: A function whose scans around loops are unrolled, or the body of a loop.
        where: The name of the program in errors: "the function" or "a stage".

    Returns:
        None.

    Raises:
        ValueError: If a mark or a loop is inside a construct such as `lax.cond`. The error names
            the construct and says how to avoid it.
    """
    for eqn in graph.eqns:
        if is_loop(eqn) and where == "a stage":
            raise ValueError(
                "`treduce` is called inside of the function that another `treduce` is given. Call "
                "the two one after the other, or use `lax.scan` for the inner one."
            )
        if any(_find_eqns(eqn, LOOP)):
            raise ValueError(
                f"`treduce` is called inside {_construct_name(eqn)}, where it would run without a "
                f"pipeline. {_advice(eqn)}"
            )
        if any(_find_eqns(eqn, MARK)):
            raise ValueError(
                f"A stage ends inside {_construct_name(eqn)} within {where}, where it cannot "
                "be cut. Mark stages in a Python loop, and leave `lax.scan`, `lax.cond` and "
                "`shard_map` to what is inside a stage."
            )


def is_loop(eqn: Eqn) -> bool:
    """Returns whether the equation is a loop over microbatches."""
    return isinstance(eqn.operation, PrimitiveCall) and eqn.operation.name == LOOP


def _unroll_scan(eqn: Eqn, known: dict[Var, Atom]) -> list[Eqn]:
    """Returns the equations that replace `eqn`, and maps its outputs to theirs in `known`."""
    if not isinstance(eqn.operation, Scan) or not any(_find_eqns(eqn, LOOP)):
        return [eqn]
    loop = eqn.operation
    if loop.length > MAX_UNROLLED_LENGTH:
        raise ValueError(
            f"`treduce` is called inside a `lax.scan` or `lax.fori_loop` of {loop.length} turns, "
            f"which is written out, and of more than {MAX_UNROLLED_LENGTH} that takes too long. "
            "Call the compiled function once for each turn, in a Python loop."
        )
    consts, carry, xs = _split_inputs(eqn.inputs, loop.num_consts, loop.num_carry)
    eqns: list[Eqn] = []
    ys: list[list[Atom]] = []
    for turn in range(loop.length):
        i = loop.length - 1 - turn if loop.reverse else turn
        slices = [_slice_eqn(x, i) for x in xs]
        eqns += slices
        of_turn = [s.outputs[0] for s in slices]
        inside, made = _iteration(loop.body, [*consts, *carry, *of_turn])
        eqns += inside
        carry, of_turn_ys = made[: loop.num_carry], made[loop.num_carry :]
        ys.append(list(of_turn_ys))
    known.update(zip(eqn.outputs[: loop.num_carry], carry, strict=True))
    in_order = ys[::-1] if loop.reverse else ys
    for i, output in enumerate(eqn.outputs[loop.num_carry :]):
        run = partial(_stack_results, output.aval)
        parts = tuple(y[i] for y in in_order)
        eqns.append(Eqn(PrimitiveCall("concatenate", run), parts, (output,)))
    return eqns


def _split_inputs(inputs: Sequence[Atom], num_consts: int, num_carry: int) -> Any:
    end = num_consts + num_carry
    return inputs[:num_consts], inputs[num_consts:end], inputs[end:]


def _slice_eqn(x: Atom, i: int) -> Eqn:
    aval = aval_of(x)
    out = Var(ShapedArray(aval.shape[1:], aval.dtype))
    return Eqn(PrimitiveCall("slice", partial(_index_leading, i)), (x,), (out,))


def _index_leading(i: int, x: Any) -> list[jax.Array]:
    return [jnp.asarray(x)[i]]


def _stack_results(aval: Any, *ys: Any) -> list[jax.Array]:
    return [jnp.stack([jnp.asarray(y, aval.dtype) for y in ys]) if ys else jnp.zeros(aval.shape)]


def _iteration(body: Graph, given: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """Returns the equations of one iteration with new variables, and its outputs.

    Unrolls inner scans too.
    """
    known: dict[Var, Atom] = dict(zip(body.inputs, given, strict=True))
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        outputs = tuple(Var(value.aval) for value in eqn.outputs)
        (own,) = substitute_inputs([replace(eqn, outputs=outputs)], known)
        known.update(zip(eqn.outputs, outputs, strict=True))
        later: dict[Var, Atom] = {}
        eqns += _unroll_scan(own, later)
        known |= {old: later.get(new, new) for old, new in zip(eqn.outputs, outputs, strict=True)}
    return eqns, list(with_outputs(body, eqns, known).outputs)


def _find_eqns(eqn: Eqn, name: str) -> Iterator[bool]:
    """Yields True for each equation named `name` inside `eqn`, at any depth."""
    match eqn.operation:
        case Scan(body=body) | ShardMap(body=body):
            bodies = [body]
        case Cond(branches=branches):
            bodies = list(branches)
        case PrimitiveCall(name=own, equation=equation):
            if own != LOOP and equation is not None and _is_in_jaxprs(equation.params, name):
                yield True
            return
    for body in bodies:
        for inner in body.eqns:
            if isinstance(inner.operation, PrimitiveCall) and inner.operation.name == name:
                yield True
            yield from _find_eqns(inner, name)


def _is_in_jaxprs(params: dict[str, Any], name: str) -> bool:
    return any(
        equation.primitive.name == name
        or (equation.primitive.name != LOOP and _is_in_jaxprs(equation.params, name))
        for jaxpr in jaxprs_in_params(params)
        for equation in jaxpr.eqns
    )


def _construct_name(eqn: Eqn) -> str:
    match eqn.operation:
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


def _advice(eqn: Eqn) -> str:
    match eqn.operation:
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
