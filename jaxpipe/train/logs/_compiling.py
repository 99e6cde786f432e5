"""Shows that a program is being compiled, for how long, and what the compile cache saved."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TextIO, cast

import jax

from ._progress import Stream

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
