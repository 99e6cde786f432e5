"""Counts the floating-point operations of a jaxpr."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params

from ._cost import MOVES


def flops(jaxpr: Any) -> float:
    """Counts operations: two for each term of a product, else one for each number that is made."""
    return sum(times * _flops(eqn) for eqn, times in repeated_equations(jaxpr))


def terms_of_product(eqn: Any) -> int | None:
    """Returns the terms that are summed for a number of a matrix product; None of other equations.

    Convolutions and ragged products are matrix products too.
    """
    match eqn.primitive.name:
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            return math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
        case "ragged_dot_general":
            (contracted, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
            return math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
        case "conv_general_dilated":
            kernel, dims = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec
            return kernel.size // kernel.shape[dims[0]]
    return None


def repeated_equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields the equations that compute, with how often they run."""
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        if not inner:
            if all(hasattr(v.aval, "dtype") and hasattr(v.aval, "size") for v in eqn.outvars):
                yield eqn, times
            continue
        repeats = _repeats(eqn)
        branches = inner[:1] if eqn.primitive.name in ("cond", "custom_vjp_call") else inner
        for sub in branches:
            yield from repeated_equations(sub, times * repeats)


def _flops(eqn: Any) -> float:
    terms = terms_of_product(eqn)
    if terms is not None:
        return 2.0 * terms * eqn.outvars[0].aval.size
    if eqn.primitive.name in MOVES:
        return 0.0
    return float(sum(v.aval.size for v in eqn.outvars))


def _repeats(eqn: Any) -> int:
    """Returns the iterations of a loop or of a kernel; 1 where the jaxpr does not say."""
    if eqn.primitive.name == "pallas_call":
        grid = eqn.params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    return eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
