"""Whether functions have backwards of their own, which need not be linear."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr

from ..._compat import jaxprs_in_params


def has_custom_vjp(function: Callable, *arguments: Any) -> bool:
    """Returns whether tracing a function finds a `jax.custom_vjp`, which need not be linear."""

    def calls_one(jaxpr: Jaxpr) -> bool:
        return any(
            equation.primitive.name == "custom_vjp_call"
            or any(calls_one(getattr(x, "jaxpr", x)) for x in jaxprs_in_params(equation.params))
            for equation in jaxpr.eqns
        )

    return calls_one(jax.make_jaxpr(function)(*arguments).jaxpr)
