"""What JAX says of a step: whether it belongs to the transposed, backward part of a program."""

from ...ir import Cond, Eqn, PrimitiveCall, Scan, ShardMap


def is_transposed(step: Eqn) -> bool:
    """Whether the step came from transposing, as its name scopes tell."""
    match step.operation:
        case PrimitiveCall(equation=equation):
            return equation is not None and "transpose(" in str(equation.source_info.name_stack)
        case Scan(body=body) | ShardMap(body=body):
            return any(map(is_transposed, body.steps))
        case Cond(branches=branches):
            return any(is_transposed(inner) for branch in branches for inner in branch.steps)
