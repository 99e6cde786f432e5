"""How a run shows itself: a bar on a terminal, plain lines in a file or a pipe.

A program that is being compiled is shown too, with what the compile cache saved.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import TextIOBase
from typing import Any, Literal, NamedTuple, TextIO, cast

import jax

Stream = TextIO | TextIOBase
"""One thing: `sys.stdout` is declared as the first and is an instance of the second."""


class Report(NamedTuple):
    """Shows a run.

    Attributes:
        step: `(step, metrics)` shows a step; it counts from 1, the steps that are done.
        say: Shows a text beside the steps.
    """

    step: Callable[[int, Mapping[str, float]], None]
    say: Callable[[str], None]


SILENT = Report(lambda step, metrics: None, lambda text: None)

_WIDTH = len("-1.234e-05")
"""The width of a metric's value: that of the longest one with four digits."""

_BAR_WIDTH = 20
_IMPORTANT = ("loss", "eval_loss", "step_time_seconds", "tokens_per_second", "peak_memory_gb")
"""The metrics that stand first beside the bar."""


def progress(
    stream: Stream,
    *,
    num_steps: int,
    log_period: int,
    first_step: int = 1,
    bar: Literal["auto"] | bool = "auto",
) -> AbstractContextManager[Report]:
    """Yields what shows steps, and texts beside them, in a context.

    Lines show every `log_period` steps, those with an evaluation, and the last one; the bar shows
    every step, and the last evaluation.
    """
    on_terminal = stream.isatty() if bar == "auto" else bar
    if on_terminal:
        return _bar(stream, num_steps, first_step)
    return _lines(stream, num_steps, log_period)


def format_metrics(metrics: Mapping[str, float], *, width: int = 0) -> str:
    """Formats metrics on one line; values have at least `width` characters, to align columns.

    Example:
        >>> format_metrics({"loss": 4.1234, "learning_rate": 0.001})
        'loss 4.123  learning_rate 0.001'
    """
    return "  ".join(f"{name} {value:<{width}.4g}" for name, value in metrics.items()).rstrip()


def _is_evaluation(name: str) -> bool:
    return name.startswith("eval_")


def _fitting(metrics: Mapping[str, float], width: int) -> str:
    """Formats the metrics that fit on a line beside the bar, the important ones first."""
    shown: dict[str, float] = {}
    for name in dict.fromkeys([*filter(metrics.__contains__, _IMPORTANT), *metrics]):
        more = shown | {name: metrics[name]}
        if len(format_metrics(more)) > width:
            break
        shown = more
    return format_metrics(shown)


@contextmanager
def _lines(stream: Stream, num_steps: int, log_period: int) -> Iterator[Report]:
    def report(step: int, metrics: Mapping[str, float]) -> None:
        if step % log_period == 0 or step == num_steps or any(map(_is_evaluation, metrics)):
            number = f"{step:{len(str(num_steps))}}/{num_steps}"
            print(
                f"step {number}  {format_metrics(metrics, width=_WIDTH)}", file=stream, flush=True
            )

    yield Report(report, lambda text: print(text, file=stream, flush=True))


@contextmanager
def _bar(stream: Stream, num_steps: int, first_step: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(_BAR_WIDTH), Remaining())
    console = Console(file=cast(TextIO, stream), force_terminal=True)
    # The number of steps twice, the time that remains, and blanks.
    left = console.width - _BAR_WIDTH - 2 * len(str(num_steps)) - len("step / -:--:--") - 4
    bar = Progress(*columns, TextColumn("{task.fields[metrics]}"), console=console)
    task = bar.add_task("", total=num_steps, completed=first_step - 1, metrics="")
    evaluation: dict[str, float] = {}

    def report(step: int, metrics: Mapping[str, float]) -> None:
        bar.start()  # not before: until the first step is done, its compilation has the terminal
        evaluation.update({name: x for name, x in metrics.items() if _is_evaluation(name)})
        bar.update(task, completed=step, metrics=_fitting({**metrics, **evaluation}, left))

    def say(text: str) -> None:  # above the bar
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        yield Report(report, say)
    finally:
        bar.stop()


_SAVED_EVENT = "/jax/compilation_cache/compile_time_saved_sec"


@contextmanager
def compiling(
    stream: Stream, name: str, *, spinner: Literal["auto"] | bool = "auto", say_end: bool = True
) -> Iterator[None]:
    r"""Shows the compilation that runs inside the context.

    Args:
        spinner: True, False, or "auto" for a line with the seconds so far if `stream` is a
            terminal. The line is removed at the end.
        say_end: Whether to write one line at the end, with the seconds that it took, and what a
            program in JAX's persistent compilation cache saved.

    Returns:
        A context manager, to run the compilation in.

    Example:
        >>> import io
        >>> stream = io.StringIO()
        >>> with compiling(stream, "the train step"):
        ...     pass
        >>> stream.getvalue()
        'compiled the train step in 0.0 s\n'
    """
    on_terminal = stream.isatty() if spinner == "auto" else spinner
    saved: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == _SAVED_EVENT:
            saved.append(duration_secs)

    started = time.perf_counter()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with _spinner(stream, name) if on_terminal else nullcontext():
            yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if say_end:
        print(_end_line(name, time.perf_counter() - started, saved), file=stream, flush=True)


def _end_line(name: str, seconds: float, saved: list[float]) -> str:
    """Returns the line at the end of a compilation."""
    line = f"compiled {name} in {seconds:.1f} s"
    if not saved:
        return line
    # JAX subtracts the time of reading, so a small program may have saved less than nothing.
    return (
        f"{line}: {len(saved)} program(s) from the compile cache saved {max(0.0, sum(saved)):.1f} s"
    )


def _spinner(stream: Stream, name: str) -> AbstractContextManager[Any]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    console = Console(file=cast(TextIO, stream), force_terminal=True)
    columns = SpinnerColumn(), TextColumn("{task.description} ... {task.elapsed:.0f} s")
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task(f"compiling {name}", total=None)
    return progress
