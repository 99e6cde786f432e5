"""A profile of some steps, by JAX's profiler."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def profiler(steps: range, folder: Path) -> Iterator[Callable[[int], None]]:
    """`before(step)`, to be called before every step, starts and ends the profile.

    Args:
        steps: What is profiled.
        folder: Gets a folder `profile`, which xprof and TensorBoard read.
    """
    running = False

    def before(step: int) -> None:
        nonlocal running
        if running and step not in steps:
            jax.profiler.stop_trace()
            running = False
        elif not running and step in steps:
            jax.profiler.start_trace(folder / "profile")
            running = True

    try:
        yield before
    finally:
        if running:
            jax.profiler.stop_trace()
