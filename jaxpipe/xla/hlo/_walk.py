"""Walks through what a step executes: loops, branches, calls and fusions are entered.

Of the branches of a conditional, the one that is largest by the caller's measure counts.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

from ._parse import Instruction, Module, called_computations, callee, op_name
from ._trips import Scope, call_scope, loop_scope, trip_count, unknown_argument

T = TypeVar("T")


@dataclass(frozen=True)
class CallContext:
    """The context that a computation is called in."""

    # How often a step executes it, if every branch were taken. A loop with an unknown trip count
    # counts once.
    executions: int
    executed_share: Fraction  # the share of the executions that take place
    loops: tuple[str, ...]  # names of the loops around it, outermost first
    conditional: bool  # whether it is in a branch
    asynchronous: bool  # whether other instructions may run while it does
    fused: bool  # whether it is the body of a fusion
    op_name: str  # the place in the Python program of the call

    def times_in(self, outer: "CallContext") -> float:
        """Returns the executions in one execution of the context around it."""
        times = self.executions * self.executed_share
        return float(times / (outer.executions * outer.executed_share)) if times else 0.0


ENTRY = CallContext(
    executions=1,
    executed_share=Fraction(1),
    loops=(),
    conditional=False,
    asynchronous=False,
    fused=False,
    op_name="",
)

Visit = Callable[[Scope, Instruction, CallContext], tuple[Sequence[T], bool]]
"""Returns what is found at an instruction, and whether what it calls is walked through."""


def walk(module: Module, visit: Visit[T], size: Callable[[Sequence[T]], Any]) -> Iterator[T]:
    """Walks through a program from its entry, and yields the results of `visit`."""
    yield from walk_scope(Scope(module, module.entry, unknown_argument), ENTRY, visit, size)


def walk_scope(
    scope: Scope, context: CallContext, visit: Visit[T], size: Callable[[Sequence[T]], Any]
) -> Iterator[T]:
    """Walks through one computation and what it calls; of branches the largest by `size`."""
    for instruction in scope.computation.instructions.values():
        results, enter = visit(scope, instruction, context)
        yield from results
        if enter:
            branches = (
                tuple(item for part in sequence for item in walk_scope(*part, visit, size))
                for sequence in called_scopes(scope, instruction, context)
            )
            yield from max(branches, key=size, default=())


def called_scopes(
    scope: Scope, instruction: Instruction, context: CallContext
) -> list[list[tuple[Scope, CallContext]]]:
    """Returns the branches of a conditional, of another instruction at most one sequence.

    A sequence has computations that run one after the other, such as a loop's condition and body.
    """
    if instruction.opcode == "while":
        return [list(_loop(scope, instruction, context))]
    if instruction.opcode == "conditional":
        return [[branch] for branch in _branches(scope, instruction, context)]
    if instruction.opcode in CALLS:
        inside = call_scope(scope, instruction, callee(instruction))
        return [[(inside, _called_context(context, instruction))]]
    return []


CALLS = ("call", "fusion", "call-start", "async-start")


def _called_context(context: CallContext, call: Instruction) -> CallContext:
    return replace(
        context,
        asynchronous=context.asynchronous or call.opcode.endswith("-start"),
        fused=call.opcode == "fusion",
        op_name=op_name(call) or context.op_name,
    )


def _loop(
    scope: Scope, loop: Instruction, context: CallContext
) -> Iterator[tuple[Scope, CallContext]]:
    if is_conditional(loop):
        share = min(context.executed_share, _executed_share(loop))
        inside = loop_scope(scope, loop, called_computations(loop, "body")[0])
        yield inside, replace(context, conditional=True, executed_share=share)
        return
    trips = trip_count(scope, loop)
    times = 1 if trips is None else trips
    loops = (*context.loops, loop.name)
    # A condition is asked once more than its body runs. It seldom communicates.
    for part, executions in (("condition", times + 1), ("body", times)):
        inside = loop_scope(scope, loop, called_computations(loop, part)[0])
        executions *= context.executions
        yield inside, replace(context, executions=executions, loops=loops)


def is_conditional(loop: Instruction) -> bool:
    """Returns whether a loop is a condition with one branch, which runs once or not at all."""
    return re.search(r"/taken_\d+_of_\d+/while$", op_name(loop)) is not None


def _branches(
    scope: Scope, conditional: Instruction, context: CallContext
) -> Iterator[tuple[Scope, CallContext]]:
    two = ("true_computation", "false_computation")
    names = called_computations(conditional, "branch_computations")
    names = names or [called_computations(conditional, key)[0] for key in two]
    share = min(context.executed_share, _executed_share(conditional))
    for index, name in enumerate(names):
        inside = call_scope(scope, conditional, name, first=index + 1)
        yield inside, replace(context, conditional=True, executed_share=share)


def _executed_share(instruction: Instruction) -> Fraction:
    """Returns the share of executions in the innermost name scope `taken_N_of_M`, 1 if none."""
    shares = re.findall(r"taken_(\d+)_of_(\d+)/", op_name(instruction))
    return Fraction(int(shares[-1][0]), int(shares[-1][1])) if shares else Fraction(1)
