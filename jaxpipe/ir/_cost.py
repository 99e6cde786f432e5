"""Classifies equations by cost: those that cost no more than memory traffic may be recomputed."""

from ._graph import Eqn, PrimitiveCall

_MOVES = """
broadcast_in_dim concatenate convert_element_type copy copy_p dynamic_slice expand_dims gather iota
name optimization_barrier pad pcast pvary reshape reshard rev sharding_constraint slice split
squeeze stop_gradient transpose axis_index bitcast_convert_type random_wrap random_unwrap
"""
_NUMBER_BY_NUMBER = """
abs add add_any and atan2 cbrt ceil clamp cos div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
imag integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow real
reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
sin sqrt square sub tan tanh xor
"""
_REDUCTIONS = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
"""


def _is_one_of(names: str, step: Eqn) -> bool:
    return isinstance(step.operation, PrimitiveCall) and step.operation.name in names.split()


def is_move(step: Eqn) -> bool:
    """Returns whether an equation only moves or casts numbers."""
    return _is_one_of(_MOVES, step)


def is_cheap(step: Eqn) -> bool:
    """Returns whether an equation moves numbers or is elementwise, so that it fuses."""
    return is_move(step) or _is_one_of(_NUMBER_BY_NUMBER, step)


def is_light(step: Eqn) -> bool:
    """Returns whether an equation costs no more than reading its inputs: cheap, or a reduction."""
    return is_cheap(step) or _is_one_of(_REDUCTIONS, step)
