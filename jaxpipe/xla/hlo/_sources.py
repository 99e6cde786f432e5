"""Finds the line of Python that an instruction comes from, in the tables of a program's text."""

import re
from dataclasses import dataclass
from pathlib import PurePath

from ._parse import Instruction

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
