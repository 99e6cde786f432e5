"""Refuses loops and marks inside constructs in which they cannot be pipelined or cut.

Only loops at the top level of a function can be pipelined, and only marks at the top level of the
body of `treduce` can be cut. Inside another construct they would run without a pipeline, so both
are errors that name the construct.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from ...._compat import jaxprs_in_params
from ....ir.graph import Cond, Eqn, PrimitiveCall, Scan, ShardMap
from ...ir._eqns import params_of, primitive_of
from ...ir._marks import STAGE_END as MARK
from ...ir._reduce import TREDUCE as LOOP


def check_reachable(eqns: Iterable[Eqn], where: str) -> None:
    """Checks that no mark and no loop over microbatches is inside another construct."""
    for eqn in eqns:
        if primitive_of(eqn) == LOOP and where == "a stage":
            caller = params_of(eqn)["caller"]
            raise ValueError(
                f"`{caller}` is called inside of a stage, by a function that another `{caller}` "
                "runs. Call the two one after the other, or use `lax.scan` for the inner one."
            )
        for caller in find_eqns(eqn, LOOP):
            raise ValueError(
                f"`{caller}` is called inside {_construct_name(eqn)}, where it would run without a "
                f"pipeline. {_advice(eqn, caller)}"
            )
        if any(find_eqns(eqn, MARK)):
            raise ValueError(
                f"A stage ends inside {_construct_name(eqn)} within {where}, where it cannot "
                "be cut. Mark stages in a Python loop, and leave `lax.scan`, `lax.cond` and "
                "`shard_map` to what is inside a stage."
            )


def find_eqns(eqn: Eqn, name: str) -> Iterator[str]:
    """Yields what the user called for each equation named `name` inside `eqn`, at any depth."""
    match eqn.operation:
        case Scan(body=body) | ShardMap(body=body):
            bodies = [body]
        case Cond(branches=branches):
            bodies = list(branches)
        case PrimitiveCall(name=own, equation=equation):
            if own != LOOP and equation is not None:
                yield from _in_jaxprs(equation.params, name)
            return
    for body in bodies:
        for inner in body.eqns:
            if primitive_of(inner) == name:
                yield params_of(inner).get("caller", name)
            yield from find_eqns(inner, name)


def _in_jaxprs(params: dict[str, Any], name: str) -> Iterator[str]:
    for jaxpr in jaxprs_in_params(params):
        for equation in jaxpr.eqns:
            if equation.primitive.name == name:
                yield equation.params.get("caller", name)
            elif equation.primitive.name != LOOP:
                yield from _in_jaxprs(equation.params, name)


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


def _advice(eqn: Eqn, caller: str) -> str:
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
            return "Leave out its shardings" + (
                ", and give them to `mpmd_jit_with_loop` instead." if caller == LOOP else "."
            )
    return f"Call `{caller}` outside of it."
