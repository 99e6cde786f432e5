"""Draws the random numbers of a block out of those that all rows draw with the same key.

The program of a block draws bits [n, ...] where that of all rows draws [n * D, ...]. Its bits are
those that all rows would draw for it, so that a key means the same on every mesh.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._compat import ClosedJaxpr, jaxprs_in_params
from ..graph import bind, closed_jaxpr

Draws = Mapping[tuple[int, ...], int]
"""From the shape of what a block draws to its dim of rows."""

OwnRows = Callable[[Callable[[Any, tuple[int, ...]], Any], Any, tuple[int, ...], int], Any]
"""`(draw, key, shape, dim) -> bits`, where `draw(key, shape)` returns bits."""

_CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr"}


def can_draw_own(closed: ClosedJaxpr, draws: Draws) -> bool:
    """Returns whether all draws with rows are where `with_own_draws` can replace them."""

    def is_replaceable(equation: JaxprEqn) -> bool:
        if equation.primitive.name in _CALLS:
            return all(map(is_replaceable, _inner(equation).jaxpr.eqns))
        return _is_draw(equation, draws) or not _has_draws(equation, draws)

    return all(map(is_replaceable, closed.jaxpr.eqns))


def draws_by_other_keys(jaxpr: Jaxpr, is_key: Sequence[bool]) -> bool:
    """Returns whether some draw does not depend on the inputs that are keys.

    If it cannot be told, it does: a loop may carry a key in a place that begins with a constant.
    """
    depends = {var for var, key in zip(jaxpr.invars, is_key, strict=True) if key}
    for equation in jaxpr.eqns:
        by_keys = [not isinstance(x, Literal) and x in depends for x in equation.invars]
        if equation.primitive.name == "random_bits" and not any(by_keys):
            return True
        for inner in jaxprs_in_params(equation.params):
            num_missing = len(inner.invars) - len(by_keys)  # of a condition, its predicate
            own = [False] * num_missing + by_keys[max(0, -num_missing) :]
            if draws_by_other_keys(inner, own):
                return True
        depends.update(equation.outvars if any(by_keys) else ())
    return False


def with_own_draws(closed: ClosedJaxpr, draws: Draws, own: OwnRows) -> Callable[..., list[Any]]:
    """Returns the program of a block, which draws what all rows would draw for it."""

    def run(*arguments: Any) -> list[Any]:
        return _evaluate(closed, arguments, draws, own)

    return run


def _evaluate(
    closed: ClosedJaxpr, arguments: Sequence[Any], draws: Draws, own: OwnRows
) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else env[x]

    for equation in jaxpr.eqns:
        results = _apply(equation, jaxpr, [*map(read, equation.invars)], draws, own)
        env |= dict(zip(equation.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def _apply(
    equation: JaxprEqn, jaxpr: Jaxpr, inputs: list[Any], draws: Draws, own: OwnRows
) -> Sequence[Any]:
    if _is_draw(equation, draws):
        params, (key,) = equation.params, inputs

        def draw(key: Any, shape: tuple[int, ...]) -> Any:
            return equation.primitive.bind(key, **params | {"shape": shape})

        shape = tuple(params["shape"])
        return [own(draw, key, shape, draws[shape])]
    if _has_draws(equation, draws):
        inner = _inner(equation)

        def run(*arguments: Any) -> list[Any]:
            return _evaluate(inner, arguments, draws, own)

        if equation.primitive.name == "remat2":
            options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
            run = jax.checkpoint(run, **options)
        return run(*inputs)
    pairs = zip(inputs, equation.invars, strict=True)
    return bind(equation, jaxpr)(*[x for x, var in pairs if not isinstance(var, Literal)])


def _is_draw(equation: JaxprEqn, draws: Draws) -> bool:
    """Returns whether an equation draws bits with rows by one key."""
    if equation.primitive.name != "random_bits":
        return False
    key: Any = equation.invars[0].aval
    return key.shape == () and tuple(equation.params["shape"]) in draws


def _inner(equation: JaxprEqn) -> ClosedJaxpr:
    return closed_jaxpr(equation.params[_CALLS[equation.primitive.name]])


def _has_draws(equation: JaxprEqn, draws: Draws) -> bool:
    """Returns whether an equation draws bits with rows, anywhere in the programs that it runs."""
    if _is_draw(equation, draws):
        return True
    inner = jaxprs_in_params(equation.params)
    return any(_has_draws(e, draws) for jaxpr in inner for e in jaxpr.eqns)
