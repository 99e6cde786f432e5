"""Finds how often a while loop runs, from its counter's start, step and limit.

XLA:CPU writes `known_trip_count`; XLA:TPU does not, and passes starts and limits through tuples,
copies and fusions. So values are traced back to constants.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ._parse import Computation, Instruction, Module, attribute, called_computations, callee


@dataclass(frozen=True)
class CarryOffset:
    """An integer: `offset`, plus the carry's element `element` unless that is None."""

    element: int | None
    offset: int


Argument = Callable[[int, int | None], CarryOffset | None]
"""Returns the value of `parameter(number)`, or of one of its elements, if it is known."""


@dataclass(frozen=True)
class Scope:
    """A computation at one call site, with the known values of its parameters."""

    module: Module
    computation: Computation
    argument: Argument


def unknown_argument(index: int, element: int | None) -> None:
    """Returns None: the parameters of the entry are unknown."""


def call_scope(scope: Scope, call: Instruction, name: str, first: int = 0) -> Scope:
    """Returns the scope of a computation that is called with the operands from `first` on."""

    def argument(index: int, element: int | None) -> CarryOffset | None:
        operand = call.operands[first + index]
        return resolve(scope, scope.computation.instructions[operand], element)

    return Scope(scope.module, scope.module.computations[name], argument)


def loop_scope(scope: Scope, loop: Instruction, name: str) -> Scope:
    """Returns the scope of a loop's body or condition, in which only invariants are known."""

    def argument(index: int, element: int | None) -> CarryOffset | None:
        if element is None or _step(scope.module, loop, element) != 0:
            return None
        return _start(scope, loop, element)

    return Scope(scope.module, scope.module.computations[name], argument)


def trip_count(scope: Scope, loop: Instruction) -> int | None:
    """Returns the iterations of `loop`, or None if the text does not tell."""
    stated = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if stated:
        return int(stated[1])
    compared = _comparison(scope.module, loop)
    if compared is None:
        return None
    left, right, direction = compared
    if _is_counter(scope.module, loop, left):
        return _trips(scope, loop, left, right, direction)
    if _is_counter(scope.module, loop, right):
        return _trips(scope, loop, right, left, _MIRRORED[direction])
    return None


def _is_counter(module: Module, loop: Instruction, operand: CarryOffset) -> bool:
    """Returns whether this side of the comparison is a counter."""
    return operand.element is not None and _step(module, loop, operand.element) not in (None, 0)


def _trips(
    scope: Scope, loop: Instruction, counter: CarryOffset, limit: CarryOffset, direction: str
) -> int | None:
    assert counter.element is not None
    start, step = _start(scope, loop, counter.element), _step(scope.module, loop, counter.element)
    end = _invariant_value(scope, loop, limit)
    if start is None or step is None or end is None:
        return None
    return _iterations(start.offset + counter.offset, end, step, direction)


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def _iterations(start: int, end: int, step: int, direction: str) -> int | None:
    """Returns the iterations of `for (i = start; i <direction> end; i += step)`."""
    if step < 0:
        return _iterations(-start, -end, -step, _MIRRORED[direction])
    if direction == "NE":
        rounds, rest = divmod(end - start, step)
        return None if rest or rounds < 0 else rounds
    if direction not in ("LT", "LE"):
        return None
    return max(0, -((start - end - (direction == "LE")) // step))


def _comparison(module: Module, loop: Instruction) -> tuple[CarryOffset, CarryOffset, str] | None:
    """Returns both sides of the condition in terms of the carry, and the direction."""
    scope = _symbolic(module, called_computations(loop, "condition")[0])
    root = scope.computation.root
    while root.opcode in ("fusion", "call"):
        scope = call_scope(scope, root, callee(root))
        root = scope.computation.root
    if root.opcode != "compare":
        return None
    left, right = (resolve(scope, scope.computation.instructions[x]) for x in root.operands)
    if left is None or right is None:
        return None
    return left, right, attribute(root, "direction")


def _invariant_value(scope: Scope, loop: Instruction, limit: CarryOffset) -> int | None:
    """Returns the value of a limit, or None if an iteration changes it."""
    if limit.element is None:
        return limit.offset
    start = _start(scope, loop, limit.element)
    unchanged = _step(scope.module, loop, limit.element) == 0
    return start.offset + limit.offset if unchanged and start else None


def _start(scope: Scope, loop: Instruction, element: int) -> CarryOffset | None:
    return resolve(scope, scope.computation.instructions[loop.operands[0]], element)


def _step(module: Module, loop: Instruction, element: int) -> int | None:
    """Returns the amount that an iteration adds to an element of the carry, if it is constant."""
    scope = _symbolic(module, called_computations(loop, "body")[0])
    after = resolve(scope, scope.computation.root, element)
    return after.offset if after and after.element == element else None


def _symbolic(module: Module, name: str) -> Scope:
    def argument(index: int, element: int | None) -> CarryOffset | None:
        return None if element is None else CarryOffset(element, 0)

    return Scope(module, module.computations[name], argument)


_SAME_VALUE = {"copy", "copy-start", "copy-done", "bitcast", "reshape", "convert", "opt-barrier"}


def resolve(
    scope: Scope, instruction: Instruction, element: int | None = None
) -> CarryOffset | None:
    """Returns the value of an integer, or of an integer in a tuple, or None if it is unknown."""
    opcode = instruction.opcode
    if opcode == "constant":
        return _constant(instruction)
    if opcode == "parameter":
        return scope.argument(int(instruction.literal), element)
    if opcode in ("fusion", "call"):
        inside = call_scope(scope, instruction, callee(instruction))
        return resolve(inside, inside.computation.root, element)
    operands = [scope.computation.instructions[name] for name in instruction.operands]
    if opcode in _SAME_VALUE:
        return resolve(scope, operands[0], element)
    if opcode in ("add", "subtract"):
        terms = (resolve(scope, operand) for operand in operands)
        return _sum(*terms, sign=-1 if opcode == "subtract" else 1)
    if opcode == "get-tuple-element" and element is None:
        return resolve(scope, operands[0], int(attribute(instruction, "index")))
    if opcode == "tuple" and element is not None:
        return resolve(scope, operands[element])
    if opcode == "while" and element is not None:
        unchanged = _step(scope.module, instruction, element) == 0
        return resolve(scope, operands[0], element) if unchanged else None
    return None


def _constant(instruction: Instruction) -> CarryOffset | None:
    literal = instruction.literal.strip("{ }")
    return CarryOffset(None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None


def _sum(left: CarryOffset | None, right: CarryOffset | None, *, sign: int) -> CarryOffset | None:
    if left is None or right is None:
        return None
    if right.element is None:
        return CarryOffset(left.element, left.offset + sign * right.offset)
    if left.element is None and sign == 1:
        return CarryOffset(right.element, left.offset + right.offset)
    return None
