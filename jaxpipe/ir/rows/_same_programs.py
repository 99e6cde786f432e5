"""Compares programs and values: whether they are the same, derivatives of programs included."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._compat import ClosedJaxpr
from ._control import DERIVATIVES

_RULES = ("jvp", "fwd", "bwd", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "out_trees")
"""Parameters of custom derivatives that are functions, new in every trace."""


def is_same(a: Any, b: Any) -> bool:
    """Returns whether two values are the same: programs, arrays, trees of these, other objects.

    Programs are the same if they compute the same of equal arguments, constants of inner programs
    included. It is false where that is not known, such as for callbacks of different functions.
    """
    return _is_equal(a, b, with_derivatives=True)


def _is_equal(a: Any, b: Any, *, with_derivatives: bool) -> bool:
    """Returns whether parameters of equations are the same."""

    def same(x: Any, y: Any) -> bool:
        return _is_equal(x, y, with_derivatives=with_derivatives)

    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, ClosedJaxpr):  # from jax 0.12 on every jaxpr is one
        return same(tuple(a.consts), tuple(b.consts)) and _equal_jaxprs(
            a.jaxpr, b.jaxpr, with_derivatives
        )
    if isinstance(a, Jaxpr):
        return _equal_jaxprs(a, b, with_derivatives)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray | jax.Array):
        return a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
    try:
        return bool(a == b)
    except Exception:  # objects that cannot be compared
        return False


def _equal_jaxprs(a: Jaxpr, b: Jaxpr, with_derivatives: bool) -> bool:
    partner: dict[Any, Any] = {}

    def bind(xs: Any, ys: Any) -> bool:
        partner.update(zip(xs, ys, strict=False))
        return len(xs) == len(ys) and all(x.aval == y.aval for x, y in zip(xs, ys, strict=True))

    def read(xs: Any, ys: Any) -> bool:
        return len(xs) == len(ys) and all(
            isinstance(y, Literal) and x.aval == y.aval and _equal_values(x.val, y.val)
            if isinstance(x, Literal)
            else partner.get(x) is y
            for x, y in zip(xs, ys, strict=True)
        )

    def equations(e: JaxprEqn, f: JaxprEqn) -> bool:
        return (
            e.primitive is f.primitive
            and read(e.invars, f.invars)
            and _equal_parameters(e, f, with_derivatives)
            and bind(e.outvars, f.outvars)
        )

    return (
        bind(a.constvars, b.constvars)
        and bind(a.invars, b.invars)
        and len(a.eqns) == len(b.eqns)
        and all(map(equations, a.eqns, b.eqns))
        and read(a.outvars, b.outvars)
    )


def _equal_parameters(e: JaxprEqn, f: JaxprEqn, with_derivatives: bool) -> bool:
    derivative = DERIVATIVES.get(e.primitive.name)
    parameters = [
        {name: x for name, x in equation.params.items() if not derivative or name not in _RULES}
        for equation in (e, f)
    ]
    if not _is_equal(*parameters, with_derivatives=with_derivatives):
        return False
    if derivative is None or not with_derivatives:
        return True
    # A derivative may call its function, and is not differentiated again.
    return _is_equal(derivative(e), derivative(f), with_derivatives=False)


def _equal_values(x: Any, y: Any) -> bool:
    return np.array_equal(np.asarray(x), np.asarray(y), equal_nan=np.asarray(x).dtype.kind == "f")
