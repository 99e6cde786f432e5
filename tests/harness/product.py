"""All combinations of choices for a pipeline, and a few in which every two of them meet."""

import dataclasses
import itertools
from collections.abc import Iterable

from harness.contract import Row, slow

CHOICES = {
    "engine": ("circular", "linen", "nnx"),
    "model": ("llama", "deepseek"),
    "ranks": (2, 3, 4, 8),
    "layers": (1, 2),
    "gather": ("tick", "once", "repeat"),
    "delay": (False, True),
    "explicit": (False, True),
}
Chosen = tuple


def product() -> list[Row]:
    """Every combination. On 8 devices 8 ranks leave none to gather over, the others have 2."""
    rows = (row_of(*chosen) for chosen in itertools.product(*CHOICES.values()))
    return [dataclasses.replace(row, job="product") for row in rows]


def pairs() -> list[Row]:
    """A few of them, in which any two choices of different kinds meet."""
    return [*(row_of(*chosen) for chosen in PAIRS), *slow(row_of(*c) for c in MORE_PAIRS)]


# As the columns of `CHOICES`. Rows with experts compile for 20 to 28 seconds each.
PAIRS: list[Chosen] = [
    ("circular", "llama", 2, 1, "tick", False, False),
    ("linen", "llama", 4, 1, "repeat", True, True),
    ("nnx", "llama", 8, 1, "tick", True, True),
    ("nnx", "llama", 4, 2, "once", False, False),
    ("circular", "llama", 3, 1, "repeat", False, False),
]
MORE_PAIRS: list[Chosen] = [
    ("circular", "deepseek", 3, 2, "once", True, True),
    ("nnx", "deepseek", 8, 2, "repeat", False, False),
    ("linen", "llama", 3, 1, "once", False, False),
    ("linen", "deepseek", 2, 2, "tick", True, True),
    ("circular", "deepseek", 4, 1, "tick", False, True),
    ("circular", "llama", 2, 1, "repeat", True, False),
    ("circular", "llama", 8, 1, "once", False, False),
    ("nnx", "llama", 2, 1, "once", False, False),
    ("nnx", "llama", 3, 1, "tick", False, False),
    ("linen", "llama", 8, 1, "tick", False, False),
]


def pairs_that_never_meet() -> set[tuple]:
    """Returns the pairs of choices of which no row of `pairs` has both."""
    every = (*itertools.product(*CHOICES.values()),)
    wanted = {pair for chosen in every for pair in _pairs(chosen)}
    return wanted - {pair for chosen in (*PAIRS, *MORE_PAIRS) for pair in _pairs(chosen)}


def _pairs(chosen: Chosen) -> Iterable[tuple]:
    return itertools.combinations(enumerate(chosen), 2)


def row_of(
    engine: str, model: str, ranks: int, layers: int, gather: str, delay: bool, explicit: bool
) -> Row:
    """Two repeats. Devices have rows of their own with explicit axes, else in every other row."""
    own_rows = explicit or (ranks + layers + delay) % 2 == 0
    return Row(
        engine,
        model,
        ranks,
        2,
        2 * ranks,
        axes=() if ranks == 8 else (("fsdp", 2),),
        delay=delay,
        packed=True,
        layers_per_stage=layers,
        gather=gather,  # pyright: ignore[reportArgumentType]
        batch_axes=("data", "fsdp") if own_rows else (),
        explicit=explicit,
    )
