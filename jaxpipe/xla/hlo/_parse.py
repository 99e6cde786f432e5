"""Reads optimized HLO text, as `compiled.as_text()` prints it, into instructions by name.

Names, shapes, opcodes and operands are parsed, as an audit needs them. Attributes stay text. The
tables before the first computation say from which line of Python an instruction comes.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str  # its name, without the `%`
    opcode: str  # its opcode, such as `all-gather-start`
    shape: str  # its shape with layouts, such as `(f32[8,128]{1,0:T(8,128)}, u32[])`
    operands: tuple[str, ...]  # names of its operands; empty for a constant or parameter
    literal: str  # the text between the parentheses
    attributes: str  # the text after the parentheses


@dataclass(frozen=True)
class Computation:
    """Instructions in program order; `root` is the one whose value is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction


@dataclass(frozen=True)
class Module:
    """All computations by name, and the one that runs."""

    computations: dict[str, Computation]
    entry: Computation


_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
_END = re.compile(r'\}(, execution_thread="[^"]*")?')
_START = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_PARENTHESIS = re.compile(r"[()]")
_OPERAND = re.compile(r"%([^\s,(){}]+)")
_LITERALS = ("constant", "parameter")


def parse_hlo(hlo_text: str) -> Module:
    """Parses a module."""
    computations, entry = {}, None
    for is_entry, name, lines in _blocks(hlo_text):
        computations[name] = _computation(name, lines)
        if is_entry:
            entry = computations[name]
    if entry is None:
        raise ValueError(
            f"`hlo_text` starts with {hlo_text[:40]!r} and has no ENTRY computation. "
            "Give the text of a compiled program: `jax.jit(f).lower(...).compile().as_text()`."
        )
    return Module(computations, entry)


def _blocks(hlo_text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """Yields, for each computation, whether it is the entry, its name and its lines."""
    header, lines = None, []
    for line in hlo_text.splitlines():
        if header is None:
            header, lines = _HEADER.match(line), []
        elif _END.fullmatch(line):
            yield header[1] is not None, header[2], lines
            header = None
        elif _START.match(line):
            lines.append(line)
        else:  # the attributes of a Pallas kernel go on over several lines
            lines[-1] += line


def _computation(name: str, lines: list[str]) -> Computation:
    instructions, root = {}, None
    for line in lines:
        start = _START.match(line)
        assert start is not None
        instruction = _instruction(start[2], line[start.end() :])
        instructions[instruction.name] = instruction
        if start[1]:
            root = instruction
    assert root is not None, f"{name} has no ROOT"
    return Computation(name, instructions, root)


def _instruction(name: str, text: str) -> Instruction:
    """Parses `shape opcode(operands), attributes`."""
    shape_end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opening = text.index("(", shape_end)
    opcode, closing = text[shape_end:opening].strip(), _closing(text, opening)
    literal = text[opening + 1 : closing]
    operands = () if opcode in _LITERALS else tuple(_OPERAND.findall(literal))
    return Instruction(
        name=name,
        opcode=opcode,
        shape=text[:shape_end],
        operands=operands,
        literal=literal,
        attributes=text[closing + 1 :],
    )


def _closing(text: str, opening: int) -> int:
    """Returns the index at which the parenthesis at `opening` is closed."""
    depth = 0
    for parenthesis in _PARENTHESIS.finditer(text, opening):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    raise ValueError(f"`hlo_text` has a parenthesis that is never closed: {text[:80]!r}.")


_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<= ]*)\]")


def without_layouts(shape: str) -> str:
    """Returns a shape without its layouts: `(f32[8,128], u32[])`."""
    arrays = ", ".join(f"{dtype}[{sizes}]" for dtype, sizes in _ARRAY.findall(shape))
    return f"({arrays})" if shape.startswith("(") else arrays


def shape_bytes(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple, without padding of layouts."""
    return sum(_array_bytes(dtype, sizes) for dtype, sizes in _ARRAY.findall(shape))


def array_sizes(shape: str) -> list[int]:
    """Returns the sizes of an array, or of the first array of a tuple."""
    array = _ARRAY.search(shape)
    return [int(size) for size in re.findall(r"\d+", array[2])] if array else []


def _array_bytes(dtype: str, sizes: str) -> int:
    count = math.prod(int(size) for size in re.findall(r"\d+", sizes))
    bits = re.match(r"[a-z]+(\d+)", dtype)
    if bits is None:
        return count if dtype == "pred" else 0  # tokens and opaque values have no bytes
    return math.ceil(count * int(bits[1]) / 8)


def tuple_elements(shape: str) -> list[str]:
    """Returns the elements of a tuple's shape."""
    parts, depth, start = [], 0, 1
    for mark in re.finditer(r"[(){}\[\],]", shape):
        depth += {"(": 1, "{": 1, "[": 1, ",": 0}.get(mark[0], -1)
        if depth == 0 or (depth == 1 and mark[0] == ","):
            parts.append(shape[start : mark.start()].strip())
            start = mark.end()
    return [part for part in parts if part]


def attribute(instruction: Instruction, name: str) -> str:
    """Returns the value of an attribute as text, or ""."""
    match = re.search(rf"\b{name}=(.*?)(?=, [a-z_-]+=|$)", instruction.attributes)
    return match[1] if match else ""


def called_computations(instruction: Instruction, name: str) -> list[str]:
    """Returns the computations in an attribute such as `calls` or `branch_computations`."""
    return _OPERAND.findall(attribute(instruction, name))


def callee(instruction: Instruction) -> str:
    """Returns the computation that a fusion, a call or an asynchronous start runs."""
    calls = called_computations(instruction, "calls")
    return (calls or called_computations(instruction, "to_apply"))[0]


def op_name(instruction: Instruction) -> str:
    """Returns the place in the Python program that the instruction comes from, or ""."""
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return match[1] if match else ""


_TABLES = ("FileNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Sources:
    """The stack frames of a program."""

    lines: dict[int, tuple[str, int]]  # file and line of every frame
    parents: dict[int, int]  # the frame that called it

    def line(self, instruction: Instruction) -> str:
        """Returns the innermost line that is not JAX's own or another library's, as `file:line`."""
        frame = _field(instruction.attributes, "stack_frame_id")
        inline = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        if inline:
            return f"{PurePath(inline[1]).name}:{inline[2]}"
        innermost = frame
        while frame in self.lines and "site-packages" in self.lines[frame][0]:
            frame = self.parents.get(frame, 0)
        file, line = self.lines.get(frame) or self.lines.get(innermost, ("", 0))
        return f"{PurePath(file).name}:{line}" if file else ""


def read_sources(hlo_text: str) -> Sources:
    """Reads the tables before the first computation."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] = {}
    for row in hlo_text.splitlines():
        if row.endswith("{") and " (" in row:
            break
        number, _, rest = row.partition(" ")
        if not rest:
            current = tables.get(row, {})
        elif number.isdecimal():
            current[int(number)] = rest
    files = {i: text.strip('"') for i, text in tables["FileNames"].items()}
    places = {
        i: (files.get(_field(text, "file_name_id"), ""), _field(text, "line"))
        for i, text in tables["FileLocations"].items()
    }
    frames = tables["StackFrames"].items()
    return Sources(
        {i: places.get(_field(text, "file_location_id"), ("", 0)) for i, text in frames},
        {i: _field(text, "parent_frame_id") - 1 for i, text in frames},  # counted from 1 there
    )


def _field(text: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", text)
    return int(match[1]) if match else 0
