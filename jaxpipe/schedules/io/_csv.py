"""Torch's CSV of a schedule: one row per rank, one action per cell, empty cells idle.

The files `torch.distributed.pipelining` writes and loads as "compute only".
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from ..._input import MEGABYTE, clause, read_text, short_repr
from ..builders._require import MAX_FORWARDS, MAX_RANKS, require
from ..language._action import ScheduleStep, parse_step
from ..language._check import check
from ..language._schedule import Schedule, from_programs, num_slices


def to_csv(schedule: Schedule) -> str:
    """Returns the text of a CSV file. It has the order only: no cell is empty.

    Args:
        schedule: A schedule that passes `check`.

    Returns:
        One row per rank, one action per cell.

    Example:
        >>> from jaxpipe.schedules import build
        >>> print(to_csv(build("1f1b", ranks=2, microbatches=2)), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    return "".join(",".join(map(str, program)) + "\n" for program in schedule.programs)


def from_csv(text: str) -> Schedule:
    """Reads and checks the text of a CSV file.

    Empty cells and lines that begin with `#` are skipped.

    Args:
        text: One row per rank.

    Returns:
        A schedule that passes `check`.

    Raises:
        ValueError: If a cell is not an action, naming its row and cell, both counted from 1.
        ScheduleError: If an action is missing, duplicated, or could never run.

    Example:
        >>> from jaxpipe.schedules import build
        >>> schedule = build("zbv", ranks=2, microbatches=4)
        >>> from_csv(to_csv(schedule)) == schedule
        True
    """
    lines = [(i, line) for i, line in enumerate(io.StringIO(text), start=1) if _is_row(line)]
    require(
        len(lines) <= MAX_RANKS,
        f"There are {len(lines)} rows, one for each rank.",
        f"Give at most {MAX_RANKS}.",
    )
    programs = tuple(tuple(_row(line, number)) for number, line in lines)
    num_steps = sum(map(len, programs))
    require(
        num_steps <= 3 * MAX_FORWARDS,
        f"There are {num_steps} actions.",
        f"Give at most {3 * MAX_FORWARDS}.",
    )
    schedule = from_programs(programs)
    for name, count in (
        ("stages", schedule.num_stages),
        ("microbatches", schedule.num_microbatches),
        ("slices", num_slices(schedule)),
    ):
        # Nothing is made as large as a number says before all actions are known to be there.
        require(
            count <= num_steps * 2,
            f"The actions are of {short_repr(count)} {name}, and there are {num_steps} of them.",
            "Some are missing, or a number is wrong.",
        )
    return check(schedule)


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Writes a file that torch and `read_csv` read.

    Args:
        schedule: The schedule that is written.
        path: The new file. A file that exists is replaced.

    Example:
        >>> import tempfile
        >>> from jaxpipe.schedules import build
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "gpipe.csv")
        ...     write_csv(build("gpipe", ranks=1, microbatches=2), file)
        ...     print(file.read_text().strip())
        0F0,0F1,0B0,0B1
    """
    Path(path).write_text(to_csv(schedule), encoding="utf-8")


def read_csv(path: str | Path) -> Schedule:
    """Reads and checks a CSV file; errors begin with its name.

    Args:
        path: A file in the format of `torch.distributed.pipelining`, one row per rank.

    Returns:
        A schedule that passes `check`.

    Raises:
        ValueError: If it is no regular file of UTF-8 or is larger than 16 MiB; or if a cell is not
            an action.
        ScheduleError: If an action is missing, duplicated, or could never run.

    Example:
        >>> import tempfile
        >>> from jaxpipe.schedules import build, write_csv
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "gpipe.csv")
        ...     write_csv(build("gpipe", ranks=1, microbatches=2), file)
        ...     print(read_csv(file))
        0F0 0F1 0B0 0B1
    """
    text = read_text(path, most_bytes=16 * MEGABYTE)
    try:
        return from_csv(text)
    except ValueError as error:
        raise type(error)(f"{path}: {error}") from None


def _is_row(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _row(line: str, number: int) -> Iterator[ScheduleStep]:
    """Yields the steps of one line. A row of commas alone is a rank without actions."""
    try:
        cells = next(csv.reader([line]))
    except csv.Error as error:
        raise ValueError(f"Row {number}: {clause(error)}.") from None
    for position, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        try:
            yield parse_step(cell.strip())
        except ValueError as error:
            raise ValueError(f"Row {number}, cell {position}: {error}") from None
