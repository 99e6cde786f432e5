"""A profile of some steps, by JAX's profiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

BeforeStep = Callable[[int, Any], None]
"""`before(step, previous)`, with the results of the previous step, or None if it has ended."""


@contextmanager
def profiler(steps: range, folder: Path) -> Iterator[BeforeStep]:
    """Yields a function that starts and ends the profile, in `profile` of the run's `folder`."""
    running = False
    process = (f"process_{jax.process_index()}",) if jax.process_count() > 1 else ()

    def before(step: int, previous: Any) -> None:
        nonlocal running
        if running == (step in steps):
            return
        jax.block_until_ready(previous)
        if running:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(folder.joinpath("profile", *process))
        running = not running

    try:
        yield before
    finally:
        if running:
            jax.profiler.stop_trace()
