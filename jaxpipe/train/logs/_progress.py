"""How a run shows itself: a bar on a terminal, plain lines in a file or a pipe."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import TextIOBase
from typing import Literal, TextIO, cast

Stream = TextIO | TextIOBase
"""One thing: `sys.stdout` is declared as the first and is an instance of the second."""

ReportStep = Callable[[int, Mapping[str, float]], None]
"""`report(step, metrics)`; step counts from 1, the steps that are done."""


_WIDTH = len("-1.234e-05")
"""The width of a metric's value: that of the longest one with four digits."""


def progress(
    stream: Stream,
    *,
    num_steps: int,
    log_period: int,
    first_step: int = 1,
    bar: Literal["auto"] | bool = "auto",
) -> AbstractContextManager[ReportStep]:
    """Shows steps as they are reported.

    Args:
        stream: Where to write, such as `sys.stdout`.
        num_steps: Steps of the whole run.
        log_period: Lines show every so many steps, those with an evaluation, and the last one; the
            bar shows every step, and the last evaluation.
        first_step: 1, or one more than the step the run resumed from.
        bar: True, False, or "auto" for a bar if `stream` is a terminal.

    Returns:
        A context manager that yields `report(step, metrics)`.
    """
    on_terminal = stream.isatty() if bar == "auto" else bar
    if on_terminal:
        return _bar(stream, num_steps, first_step)
    return _lines(stream, num_steps, log_period)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Formats metrics on one line.

    Args:
        metrics: The metrics.

    Returns:
        A text whose values have equal widths, so that the columns of successive lines are aligned.

    Example:
        >>> format_metrics({"loss": 4.1234, "learning_rate": 0.001})
        'loss 4.123       learning_rate 0.001'
    """
    return "  ".join(f"{name} {value:<{_WIDTH}.4g}" for name, value in metrics.items()).rstrip()


def _is_evaluation(name: str) -> bool:
    return name.startswith("eval_")


@contextmanager
def _lines(stream: Stream, num_steps: int, log_period: int) -> Iterator[ReportStep]:
    def report(step: int, metrics: Mapping[str, float]) -> None:
        if step % log_period == 0 or step == num_steps or any(map(_is_evaluation, metrics)):
            number = f"{step:{len(str(num_steps))}}/{num_steps}"
            print(f"step {number}  {format_metrics(metrics)}", file=stream, flush=True)

    yield report


@contextmanager
def _bar(stream: Stream, num_steps: int, first_step: int) -> Iterator[ReportStep]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), Remaining())
    console = Console(file=cast(TextIO, stream), force_terminal=True)
    bar = Progress(*columns, TextColumn("{task.fields[metrics]}"), console=console)
    task = bar.add_task("", total=num_steps, completed=first_step - 1, metrics="")
    evaluation: dict[str, float] = {}

    def report(step: int, metrics: Mapping[str, float]) -> None:
        bar.start()  # not before: until the first step is done, its compilation has the terminal
        evaluation.update({name: x for name, x in metrics.items() if _is_evaluation(name)})
        bar.update(task, completed=step, metrics=format_metrics({**metrics, **evaluation}))

    try:
        yield report
    finally:
        bar.stop()
