"""Checks of the counts of a builder, with uniform errors."""

from typing import Any

MAX_RANKS = 4096
MAX_FORWARDS = 1 << 19
"""The most stages x microbatches x slices of a schedule, such as 512 x 1,024 x 1."""


def require_positive(**counts: Any) -> None:
    """Checks that counts are integers of at least 1; the error names the argument."""
    for name, count in counts.items():
        if not hasattr(count, "__index__"):
            raise ValueError(f"`{name}` is {count!r}. Give an integer.")
        if count < 1:
            raise ValueError(f"`{name}` is {count}. Give at least 1.")


def require_small(ranks: int, microbatches: int, chunks: int, slices: int) -> None:
    """Checks that a schedule of these counts is small enough to be built."""
    require(ranks <= MAX_RANKS, f"`ranks` is {ranks}.", f"Give at most {MAX_RANKS}.")
    product = ranks * microbatches * chunks * slices
    require(
        product <= MAX_FORWARDS,
        f"`ranks` {ranks} x `microbatches` {microbatches} x {chunks} stages per rank x {slices} "
        f"slice(s) are {product} forwards.",
        f"Schedules of up to {MAX_FORWARDS} are built: give fewer.",
    )


def require(holds: bool, problem: str, remedy: str) -> None:
    """Checks a condition; the error is the problem, then the remedy, a sentence each."""
    if not holds:
        raise ValueError(f"{problem} {remedy}")
