"""A profile of some steps, by JAX's profiler."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax


def profiled_steps(text: str) -> range:
    """The steps of `profile_steps`: `10:12` are 10, 11 and 12.

    Raises:
        ValueError: If it is something else.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"`profile_steps` is {text!r}. Give the first and the last step, such as '10:12'."
        )
    return range(first, last + 1)


Before = Callable[[int, Any], None]
"""`before(step, previous)`: what the step before makes, None if nothing of it is under way."""


@contextmanager
def profiler(steps: range, folder: Path) -> Iterator[Before]:
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
