"""A timeline in the terminal: one row per rank, one column per time unit."""

from collections.abc import Sequence
from fractions import Fraction
from math import floor, gcd, lcm

from ..analysis._measure import makespan
from ..analysis._simulate import Time, TimedStep, Timeline
from ..language._action import FusedPair, ScheduleStep

_MAX_COLUMNS = 10_000


def to_text(timeline: Timeline, unit: Time, *, max_width: int | None = None) -> str:
    """Draws a timeline in text, one row per rank and `unit` of time to a column.

    An action is in the column where it starts, with `-` for as long as it lasts; `.` is a bubble.
    A fused pair prints as `4F4+3B0`.

    Args:
        timeline: The timeline that is drawn.
        unit: The time of a column, such as `time_unit(timeline)`.
        max_width: The most characters of a line, such as the width of a terminal. A wider drawing
            is cut into parts below each other, each under a line with its times. A part has at
            least one column. None for no limit.

    Returns:
        The rows, with newlines between them.

    Raises:
        ValueError: If `unit` is not positive.

    Example:
        >>> from jaxpipe.schedules import Costs, build, simulate
        >>> print(to_text(simulate(build("1f1b", ranks=2, microbatches=2), Costs()), 1))
        rank 0  0F0 0F1 .   .   0B0 --- .   0B1 ---
        rank 1  .   1F0 1B0 --- 1F1 1B1 --- .   .
    """
    if unit <= 0:
        raise ValueError(f"`unit` is {unit}. Give a positive time, such as `time_unit(timeline)`.")
    labels = [_label(timed.step) for row in timeline.rows for timed in row]
    width = 1 + max(map(len, labels), default=1)
    columns = _column(makespan(timeline), unit)
    name_width = len(f"rank {len(timeline.rows) - 1}")
    rows = [_cells(row, unit, columns, "-" * (width - 1)) for row in timeline.rows]

    def lines(first: int, last: int) -> str:
        return "\n".join(
            f"{f'rank {rank}'.ljust(name_width)}  "
            + "".join(cell.ljust(width) for cell in cells[first:last]).rstrip()
            for rank, cells in enumerate(rows)
        )

    if max_width is None or name_width + 1 + width * columns <= max_width:
        return lines(0, columns)
    # The blank behind the last column may be outside.
    size = max(1, (max_width - name_width - 1) // width)
    starts = range(0, columns, size)
    ends = (min(start + size, columns) for start in starts)
    return "\n\n".join(
        f"time {start * unit:g} to {end * unit:g}\n{lines(start, end)}"
        for start, end in zip(starts, ends, strict=True)
    )


def time_unit(timeline: Timeline) -> Time:
    """Returns the time of a column of `to_text`.

    That is the longest time of which every start and end is a whole multiple. If that makes more
    than 500 columns, it is the length of the shortest action instead, or a 10,000th of the whole if
    that is longer, and positions are rounded.
    """
    timed = [timed for row in timeline.rows for timed in row]
    times = [Fraction(time) for t in timed for time in (t.start, t.end)]
    below = lcm(*(time.denominator for time in times))
    unit = Fraction(gcd(*(int(time * below) for time in times)), below) or Fraction(1)
    if makespan(timeline) > 500 * unit:
        shortest = min((t.end - t.start for t in timed if t.end > t.start), default=1)
        return max(shortest, makespan(timeline) / _MAX_COLUMNS)
    return unit.numerator if unit.denominator == 1 else float(unit)


def _cells(row: Sequence[TimedStep], unit: Time, columns: int, going_on: str) -> list[str]:
    """Returns [columns] the text of every column of a rank."""
    cells = ["."] * columns
    for timed in row:
        first, last = _column(timed.start, unit), _column(timed.end, unit)
        if last > first:  # what takes no time has no column
            cells[first:last] = [_label(timed.step), *[going_on] * (last - first - 1)]
    return cells


def _column(time: Time, unit: Time) -> int:
    """Rounds a half up: an action that lasts one unit gets a column wherever it starts."""
    return floor(time / unit + 0.5)


def _label(step: ScheduleStep) -> str:
    return f"{step.forward}+{step.backward}" if isinstance(step, FusedPair) else str(step)
