"""Metrics of every step: a JSON object a line in `metrics.jsonl`, and TensorBoard events."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from ..._durable import write_file
from ..runtime._stop import RunError
from ._json_lines import complete_lines, parse_line, read_lines

WriteMetrics = Callable[[int, Mapping[str, float]], None]
"""`write(step, metrics)`; step counts from 1, the steps that are done."""

METRICS_FILE = "metrics.jsonl"

FLUSH_SECONDS = 10
"""The longest delay, in seconds, before TensorBoard sees an event."""


@contextmanager
def metrics_writer(
    folder: str | PathLike[str],
    *,
    first_step: int,
    tensorboard: bool,
    also: AbstractContextManager[WriteMetrics] | None = None,
) -> Iterator[WriteMetrics]:
    """Opens a run's metrics to go on with `first_step`, and yields `write(step, metrics)`.

    A run that was killed may have written beyond the checkpoint it resumes from. Those steps come
    again, so lines from `first_step` on are dropped and the file stays one clean series. NaN and
    infinities are written as Python's `json` does. A line is on disk when `write` returns.
    """
    path = Path(folder) / METRICS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_steps_from(path, first_step)
    with ExitStack() as stack:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = stack.enter_context(open(descriptor, "a", encoding="utf-8", buffering=1))
        more = stack.enter_context(also) if also else _discard
        event = (
            _discard
            if not tensorboard
            else stack.enter_context(_tensorboard_events(folder, first_step))
        )

        def write(step: int, metrics: Mapping[str, float]) -> None:
            values = {name: float(value) for name, value in metrics.items()}
            file.write(json.dumps({"step": step, **values}) + "\n")
            if not os.fstat(descriptor).st_nlink:
                raise RunError(
                    f"{path} has been removed while the run was writing to it. Put the folder of "
                    "the run back if you can, and start again."
                )
            event(step, values)
            more(step, values)

        yield write


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Reads a `metrics.jsonl`, without a last line that a kill has torn.

    Args:
        path: The file; one that does not exist has no lines.

    Returns:
        The object of each line.

    Raises:
        ValueError: If another line is not a JSON object with an integer `step`.
        RunError: If the file is there and cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "metrics.jsonl")
        ...     with file.open("w") as out:
        ...         print('{"step": 1, "loss": 5.5}', file=out)
        ...         print('{"step": 2, "lo', end="", file=out)  # a kill
        ...     read_metrics(file)
        [{'step': 1, 'loss': 5.5}]
    """
    return read_lines(Path(path), key="step")


def check_metrics(folder: str | PathLike[str]) -> None:
    """Checks that the metrics of a run can be read, but for a last line that a kill has torn."""
    path = Path(folder) / METRICS_FILE
    for n, line in complete_lines(path):
        parse_line(line, "step", f"{path} line {n}")


def _drop_steps_from(path: Path, first_step: int) -> None:
    if not os.path.lexists(path):
        return
    lines = [] if first_step == 1 else complete_lines(path)
    steps = ((line, parse_line(line, "step", f"{path} line {n}")["step"]) for n, line in lines)
    write_file(path, b"".join(line + b"\n" for line, step in steps if step < first_step))


def _discard(step: int, metrics: Mapping[str, float]) -> None:
    pass


@contextmanager
def _tensorboard_events(folder: str | PathLike[str], first_step: int) -> Iterator[WriteMetrics]:
    # Not its `SummaryWriter`: that writes in a thread, and once a full disk has ended the thread,
    # adding to its queue waits for ever.
    import tensorboardX.proto.event_pb2 as protos
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.summary import scalar

    events: Any = protos  # its members are made when it is imported
    # Files are named by the second, and a short run may resume within one.
    writer = EventsWriter(os.path.join(folder, "events"), f".{first_step}")
    # TensorBoard hides what an earlier, killed run wrote from there on.
    start = events.SessionLog(status=events.SessionLog.START)
    writer.write_event(events.Event(step=first_step, session_log=start))
    flushed = time.monotonic()

    def write(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal flushed
        for name, value in metrics.items():
            summary = scalar(name, value)
            writer.write_event(events.Event(step=step, wall_time=time.time(), summary=summary))
        if time.monotonic() > flushed + FLUSH_SECONDS:
            writer.flush()
            flushed = time.monotonic()

    try:
        yield write
    finally:
        writer.close()
