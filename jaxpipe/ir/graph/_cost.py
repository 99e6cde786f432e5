"""The cost of equations: classes, by which passes choose, and floating-point operations.

Equations that cost no more than memory traffic may be recomputed.
"""

import math
from collections.abc import Iterator
from typing import Any

from ..._compat import jaxprs_in_params
from ._graph import Eqn, PrimitiveCall, variables

_MOVES = """
broadcast_in_dim concatenate convert_element_type copy dynamic_slice expand_dims gather iota
name optimization_barrier pad pcast pvary reshape reshard rev sharding_constraint slice split
squeeze stop_gradient transpose axis_index bitcast_convert_type random_wrap random_unwrap
"""
_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj cos cosh
div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to log
log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or polynomial
population_count pow real reduce_precision rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
"""
_REDUCTIONS = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
"""

MOVES = frozenset(_MOVES.split())
"""Names of primitives that only move or cast numbers."""
_CASTS = "convert_element_type copy sharding_constraint"
_INVERTIBLE_MOVES = _CASTS + " expand_dims reshape squeeze transpose"


def _is_one_of(names: str, eqn: Eqn) -> bool:
    return isinstance(eqn.operation, PrimitiveCall) and eqn.operation.name in names.split()


def is_move(eqn: Eqn) -> bool:
    """Returns whether an equation only moves or casts numbers."""
    return _is_one_of(_MOVES, eqn)


def is_cheap(eqn: Eqn) -> bool:
    """Returns whether an equation moves numbers or is elementwise, so that it fuses."""
    return is_move(eqn) or _is_one_of(_ELEMENTWISE, eqn)


def is_entrywise(eqn: Eqn) -> bool:
    """Returns whether an entry of an equation's output depends on no input at another index."""
    return _is_one_of(_ELEMENTWISE + _CASTS + " name pcast pvary", eqn)


def is_light(eqn: Eqn) -> bool:
    """Returns whether an equation costs no more than reading its inputs: cheap, or a reduction."""
    return is_cheap(eqn) or _is_one_of(_REDUCTIONS, eqn)


def is_cast(eqn: Eqn) -> bool:
    """Returns whether an equation keeps every number at its index."""
    return _is_one_of(_CASTS, eqn)


def is_invertible_move(eqn: Eqn) -> bool:
    """Returns whether an equation only moves or casts the numbers of one array, and keeps all."""
    if not isinstance(eqn.operation, PrimitiveCall) or len(eqn.inputs) != 1:
        return False
    adds_dims = eqn.operation.name == "broadcast_in_dim"
    if adds_dims and math.prod(shape_in(eqn)) == math.prod(shape_out(eqn)):
        return True
    return _is_one_of(_INVERTIBLE_MOVES, eqn)


def shape_in(eqn: Eqn) -> tuple[int, ...]:
    """Returns the shape of the only input of an equation that is a variable."""
    (value,) = variables(eqn.inputs)
    return value.aval.shape


def shape_out(eqn: Eqn) -> tuple[int, ...]:
    """Returns the shape of the first output of an equation."""
    return eqn.outputs[0].aval.shape


def flops(jaxpr: Any) -> float:
    """Counts floating-point operations.

    They are two for each term of a matrix product, none for equations that only move or cast
    numbers, and one for each other number that is computed. A `while` loop counts one iteration, as
    its jaxpr does not say how many there are, and a `cond` its dearest branch.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [flops(sub) for sub in jaxprs_in_params(eqn.params)]
        if not inner:
            total += _flops(eqn)
        elif eqn.primitive.name == "cond":
            total += max(inner)
        else:
            is_custom = eqn.primitive.name == "custom_vjp_call"
            total += _repeats(eqn) * (inner[0] if is_custom else sum(inner))
    return total


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


def taps_of_product(eqn: Any) -> int:
    """Returns the positions of a convolution's kernel; 1 of other products."""
    if eqn.primitive.name != "conv_general_dilated":
        return 1
    _, _, *spatial = eqn.params["dimension_numbers"].rhs_spec
    return math.prod(eqn.invars[1].aval.shape[dim] for dim in spatial)


def _repeated_equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields the equations that compute, with how often they run."""
    for eqn in jaxpr.eqns:
        yield from repeats_of(eqn, times)


def repeats_of(eqn: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields an equation, or those inside of it, with how often they run."""
    inner = list(jaxprs_in_params(eqn.params))
    if not inner:
        if all(hasattr(v.aval, "dtype") and hasattr(v.aval, "size") for v in eqn.outvars):
            yield eqn, times
        return
    branches = inner[:1] if eqn.primitive.name in ("cond", "custom_vjp_call") else inner
    for sub in branches:
        yield from _repeated_equations(sub, times * _repeats(eqn))


def _flops(eqn: Any) -> float:
    terms = terms_of_product(eqn)
    if terms is not None:
        return 2.0 * terms * eqn.outvars[0].aval.size
    if eqn.primitive.name in MOVES:
        return 0.0
    return float(sum(v.aval.size for v in eqn.outvars))


def _repeats(eqn: Any) -> int:
    """Returns the iterations of a loop or of a kernel, or the devices that run a program.

    Returns:
        The number; 1 where the jaxpr does not say.
    """
    if eqn.primitive.name == "pallas_call":
        grid = eqn.params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    if eqn.primitive.name == "shard_map":
        mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
        return math.prod(mesh.shape[axis] for axis in manual)
    return eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
