"""How often a while loop runs, from its counter: where it starts, its step, and its limit.

XLA:CPU writes `known_trip_count`; XLA:TPU does not, and moves limits and starts through tuples,
copies and fusions. So values are followed to constants.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ._hlo import Computation, Instruction, Module, attribute, called, callee


@dataclass(frozen=True)
class Linear:
    """The number `offset`, plus, if it is not None, the value of one element of a loop's carry."""

    element: int | None
    offset: int


Argument = Callable[[int, int | None], Linear | None]
"""The value of `parameter(number)`, or of one of its elements, if it is known."""


@dataclass(frozen=True)
class Scope:
    """A computation where it is called: what its parameters are is known."""

    module: Module
    computation: Computation
    argument: Argument


def unknown_argument(number: int, element: int | None) -> None:
    """Nothing is known about the parameters of the entry."""


def enter(scope: Scope, call: Instruction, name: str) -> Scope:
    """The scope of a computation which is called with the operands of `call`."""

    def argument(number: int, element: int | None) -> Linear | None:
        return value(scope, scope.computation.instructions[call.operands[number]], element)

    return Scope(scope.module, scope.module.computations[name], argument)


def enter_branch(scope: Scope, call: Instruction, branch: int, name: str) -> Scope:
    """The scope of a branch of a conditional: its only parameter is operand `branch + 1`."""

    def argument(number: int, element: int | None) -> Linear | None:
        operand = call.operands[branch + 1 + number]
        return value(scope, scope.computation.instructions[operand], element)

    return Scope(scope.module, scope.module.computations[name], argument)


def enter_loop(scope: Scope, loop: Instruction, name: str) -> Scope:
    """The scope of a loop's body or condition: only what no iteration changes is known."""

    def argument(number: int, element: int | None) -> Linear | None:
        if element is None or _step(scope.module, loop, element) != 0:
            return None
        return _start(scope, loop, element)

    return Scope(scope.module, scope.module.computations[name], argument)


def trip_count(scope: Scope, loop: Instruction) -> int | None:
    """How often the body of `loop` runs, or None if the text does not tell."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    compared = _comparison(scope.module, loop)
    if compared is None:
        return None
    left, right, direction = compared
    if _moves(scope.module, loop, left):
        return _trips(scope, loop, left, right, direction)
    if _moves(scope.module, loop, right):
        return _trips(scope, loop, right, left, _MIRRORED[direction])
    return None


def _moves(module: Module, loop: Instruction, side: Linear) -> bool:
    """Whether this side of the comparison is a counter."""
    return side.element is not None and _step(module, loop, side.element) not in (None, 0)


def _trips(
    scope: Scope, loop: Instruction, counter: Linear, limit: Linear, direction: str
) -> int | None:
    assert counter.element is not None
    start, step = _start(scope, loop, counter.element), _step(scope.module, loop, counter.element)
    end = _fixed(scope, loop, limit)
    if start is None or step is None or end is None:
        return None
    return _iterations(start.offset + counter.offset, end, step, direction)


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def _iterations(start: int, end: int, step: int, direction: str) -> int | None:
    """Iterations of `for (i = start; i <direction> end; i += step)`."""
    if step < 0:
        return _iterations(-start, -end, -step, _MIRRORED[direction])
    if direction == "NE":
        rounds, rest = divmod(end - start, step)
        return None if rest or rounds < 0 else rounds
    if direction not in ("LT", "LE"):
        return None
    return max(0, -((start - end - (direction == "LE")) // step))


def _comparison(module: Module, loop: Instruction) -> tuple[Linear, Linear, str] | None:
    """What the condition compares, in terms of the carry."""
    scope = _symbolic(module, called(loop, "condition")[0])
    root = scope.computation.root
    while root.opcode in ("fusion", "call"):
        scope = enter(scope, root, callee(root))
        root = scope.computation.root
    if root.opcode != "compare":
        return None
    left, right = (value(scope, scope.computation.instructions[x]) for x in root.operands)
    if left is None or right is None:
        return None
    return left, right, attribute(root, "direction")


def _fixed(scope: Scope, loop: Instruction, limit: Linear) -> int | None:
    """The number a limit is, if no iteration changes it."""
    if limit.element is None:
        return limit.offset
    start = _start(scope, loop, limit.element)
    unchanged = _step(scope.module, loop, limit.element) == 0
    return start.offset + limit.offset if unchanged and start else None


def _start(scope: Scope, loop: Instruction, element: int) -> Linear | None:
    return value(scope, scope.computation.instructions[loop.operands[0]], element)


def _step(module: Module, loop: Instruction, element: int) -> int | None:
    """What an iteration adds to an element of the carry."""
    scope = _symbolic(module, called(loop, "body")[0])
    after = value(scope, scope.computation.root, element)
    return after.offset if after and after.element == element else None


def _symbolic(module: Module, name: str) -> Scope:
    def argument(number: int, element: int | None) -> Linear | None:
        return None if element is None else Linear(element, 0)

    return Scope(module, module.computations[name], argument)


_SAME_VALUE = {"copy", "copy-start", "copy-done", "bitcast", "reshape", "convert", "opt-barrier"}


def value(scope: Scope, instruction: Instruction, element: int | None = None) -> Linear | None:
    """The value of an integer, or of an integer in a tuple, if it can be followed."""
    opcode = instruction.opcode
    if opcode == "constant":
        return _constant(instruction)
    if opcode == "parameter":
        return scope.argument(int(instruction.literal), element)
    if opcode in ("fusion", "call"):
        inside = enter(scope, instruction, callee(instruction))
        return value(inside, inside.computation.root, element)
    operands = [scope.computation.instructions[name] for name in instruction.operands]
    if opcode in _SAME_VALUE:
        return value(scope, operands[0], element)
    if opcode in ("add", "subtract"):
        terms = (value(scope, operand) for operand in operands)
        return _sum(*terms, sign=-1 if opcode == "subtract" else 1)
    return _part(scope, instruction, operands, element)


def _part(
    scope: Scope, instruction: Instruction, operands: list[Instruction], element: int | None
) -> Linear | None:
    """The value of what makes tuples and takes them apart."""
    opcode = instruction.opcode
    if opcode == "get-tuple-element" and element is None:
        return value(scope, operands[0], int(attribute(instruction, "index")))
    if opcode == "tuple" and element is not None:
        return value(scope, operands[element])
    if opcode == "while" and element is not None:
        unchanged = _step(scope.module, instruction, element) == 0
        return value(scope, operands[0], element) if unchanged else None
    return None


def _constant(instruction: Instruction) -> Linear | None:
    literal = instruction.literal.strip("{ }")
    return Linear(None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None


def _sum(left: Linear | None, right: Linear | None, *, sign: int) -> Linear | None:
    if left is None or right is None:
        return None
    if right.element is None:
        return Linear(left.element, left.offset + sign * right.offset)
    if left.element is None and sign == 1:
        return Linear(right.element, left.offset + right.offset)
    return None
