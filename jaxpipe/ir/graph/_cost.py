"""Classifies equations: by cost, and by whether they move or cast numbers.

Those that cost no more than memory traffic may be recomputed.
"""

import math

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
