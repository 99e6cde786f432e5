"""What JAX says of a step: whether it belongs to the transposed, backward part of a program."""

from ...ir import Choice, Loop, Plain, Shards, Step


def is_transposed(step: Step) -> bool:
    """Whether the step came from transposing, as its name scopes tell."""
    match step.operation:
        case Plain(equation=equation):
            return equation is not None and "transpose(" in str(equation.source_info.name_stack)
        case Loop(body=body) | Shards(body=body):
            return any(map(is_transposed, body.steps))
        case Choice(branches=branches):
            return any(is_transposed(inner) for branch in branches for inner in branch.steps)
