"""All combinations of choices for a pipeline, and a few in which every two of them meet."""

import itertools
from collections.abc import Iterable

from harness.contract import Row

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
    return [row_of(*chosen) for chosen in itertools.product(*CHOICES.values())]


def pairs() -> list[Row]:
    """A few of them, in which any two choices of different kinds meet: greedy, always the same."""
    rest = {*itertools.chain(*map(_pairs, itertools.product(*CHOICES.values())))}
    chosen = []
    while rest:
        best = max(itertools.product(*CHOICES.values()), key=lambda c: len(rest & {*_pairs(c)}))
        rest -= {*_pairs(best)}
        chosen.append(best)
    return [row_of(*c) for c in chosen]


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
