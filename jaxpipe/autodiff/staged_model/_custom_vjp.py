"""Whether functions have backwards of their own, which need not be linear."""

from collections.abc import Callable
from typing import Any

import jax

from ...ir.graph import any_equation


def has_custom_vjp(function: Callable, *arguments: Any) -> bool:
    """Returns whether tracing a function finds a `jax.custom_vjp`, which need not be linear."""
    program = jax.make_jaxpr(function)(*arguments)
    return any_equation(program, lambda e: e.primitive.name == "custom_vjp_call")
