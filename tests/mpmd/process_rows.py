"""Rows of the harness that run over several processes; those of a list have as many devices."""

import functools
import math

from harness.contract import Row
from harness.scheduled import chunks
from jaxpipe.schedules import FAMILIES

mpmd = functools.partial(Row, "mpmd", tied=True, dropout=0.1)
REFUSED = ("seq1f1b",)


def few() -> list[Row]:
    return [
        mpmd("mlp", 2, 1, 4, axes=(), schedule="1f1b"),
        mpmd("mlp", 2, 2, 4, axes=(), schedule="zbv", remat="none"),
    ]


def every() -> list[Row]:
    """Every schedule on four ranks."""
    names = [name for name in FAMILIES if name not in REFUSED]
    return [
        mpmd("mlp", 4, chunks(name, 2), 8, axes=(), schedule=name, remat=("full", "none")[i % 2])
        for i, name in enumerate(names)
    ]


def sharded() -> list[Row]:
    """Transformers, dense and with experts, on four ranks of two devices."""
    fsdp, tensor = (("fsdp", 2),), (("tensor", 2),)
    return [
        mpmd("llama", 4, 1, 8, axes=fsdp, schedule="1f1b", packed=True),
        mpmd("llama", 4, 1, 8, axes=tensor, schedule="zero_bubble_h1"),
        mpmd("llama", 4, 2, 8, axes=fsdp, schedule="dualpipev", remat="none"),
        mpmd("llama", 4, 1, 8, axes=fsdp, schedule="dualpipe"),
        Row("mpmd", "deepseek", 4, 1, 8, axes=fsdp, schedule="1f1b"),
    ]


ROWS = {"few": few, "every": every, "sharded": sharded}


def num_devices(row: Row) -> int:
    return row.ranks * math.prod(size for _, size in row.axes or ())
