"""A profile of some steps, by JAX's profiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

BeforeStep = Callable[[int, Any], None]
"""`before(step, previous)`: what the step before makes, None if nothing of it is under way."""


@contextmanager
def profiler(steps: range, folder: Path) -> Iterator[BeforeStep]:
    """A function to be called before every step, which starts and ends the profile.

    Args:
        steps: What is profiled.
        folder: Gets a folder `profile`, which xprof and TensorBoard read; one for each process.
    """
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
