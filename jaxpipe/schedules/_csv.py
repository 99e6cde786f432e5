"""Torch's CSV of a schedule: one row per rank, one action per cell, empty cells idle.

The files `torch.distributed.pipelining` writes and loads as "compute only".
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from ._action import Step, parse_step
from ._check import check
from ._schedule import Schedule, from_programs


def to_csv(schedule: Schedule) -> str:
    """The text of a file. Order only: no cell is empty."""
    return "".join(",".join(map(str, program)) + "\n" for program in schedule.programs)


def from_csv(text: str) -> Schedule:
    """Reads and checks a file's text. Empty cells and lines that begin with `#` are skipped.

    Raises:
        ValueError: If a cell is not an action, naming its row and cell, both counted from 1.
        ScheduleError: If an action is missing, there twice, or could never run.
    """
    lines = [(i, line) for i, line in enumerate(io.StringIO(text), start=1) if _is_row(line)]
    programs = tuple(tuple(_row(line, number)) for number, line in lines)
    return check(from_programs(programs))


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Writes a file that torch and `read_csv` read."""
    Path(path).write_text(to_csv(schedule), encoding="utf-8")


def read_csv(path: str | Path) -> Schedule:
    """Reads and checks a file; errors begin with its name. See `from_csv`."""
    try:
        return from_csv(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise type(error)(f"{path}: {error}") from None


def _is_row(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _row(line: str, number: int) -> Iterator[Step]:
    """The steps of one line. A row of commas alone is a rank without actions."""
    for place, cell in enumerate(next(csv.reader([line])), start=1):
        if not cell.strip():
            continue
        try:
            yield parse_step(cell.strip())
        except ValueError as error:
            raise ValueError(f"Row {number}, cell {place}: {error}") from None
