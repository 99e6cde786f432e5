"""Tells equations of the backward, which JAX made by transposition, from the other equations."""

from ...ir._graph import Cond, Eqn, PrimitiveCall, Scan, ShardMap


def is_transposed(step: Eqn) -> bool:
    """Returns whether JAX made the equation by transposition, according to its name stack."""
    match step.operation:
        case PrimitiveCall(equation=equation):
            return equation is not None and "transpose(" in str(equation.source_info.name_stack)
        case Scan(body=body) | ShardMap(body=body):
            return any(map(is_transposed, body.steps))
        case Cond(branches=branches):
            return any(is_transposed(inner) for branch in branches for inner in branch.steps)
