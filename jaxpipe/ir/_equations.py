"""Equations of jaxprs: what they call, and each as a function of its own."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun


def jaxpr_of(closed: Any) -> Jaxpr:
    return getattr(closed, "jaxpr", closed)


def scoped(equation: JaxprEqn, names: Any) -> JaxprEqn:
    """`equation` with the name scopes of the call that it is taken out of."""
    if not names:
        return equation
    info = equation.source_info
    return equation.replace(source_info=info.replace(name_stack=names + info.name_stack))


_CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that only call a jaxpr, and the parameter that has it."""


def called_jaxpr(equation: JaxprEqn) -> Any:
    """The jaxpr that an equation calls, if that is all it does."""
    shardings = (
        *equation.params.get("in_shardings", ()),
        *equation.params.get("out_shardings", ()),
    )
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        return None
    return equation.params.get(_CALLS.get(equation.primitive.name, ""))


def bind(equation: JaxprEqn, jaxpr: Jaxpr) -> Callable[..., Sequence[Any]]:
    """A function of the inputs of an equation that are no literals. It may come from any jaxpr."""
    inputs = [x for x in equation.invars if isinstance(x, Var)]
    outputs = [Var(x.aval) for x in equation.outvars]  # some may be dropped
    alone = jaxpr.replace(
        constvars=[],
        invars=inputs,
        outvars=outputs,
        eqns=[equation.replace(outvars=outputs)],
        effects=equation.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))
