"""Residuals of a stage in the buffers that a rank carries: in the device's memory or the host's.

A branch reads and writes those of the device in place. Those of the host are stored after a branch
and read before it: XLA:TPU moves nothing inside of a conditional ("Expected computation ... to be
called only by one caller and that caller to be a While", libtpu 0.0.48.1).
"""

from typing import Any, NamedTuple

import jax

from ...autodiff.backward import SplitBackward
from ...autodiff.staged_model import index_leading
from ...ir.transforms import Entry
from .._buffers import is_on_host

Residuals = tuple[list[Any], list[Any]]
"""Of each residual a value or None: of those that only B or I reads, and of those that W reads."""


class Fetched(NamedTuple):
    """An entry of a buffer on the host, on the device."""

    value: jax.Array


def with_memories(stage: SplitBackward, residuals: list[Any]) -> list[Any]:
    """Returns the abstract values of residuals in the memory where their buffers are."""
    host = jax.memory.Space.Host
    pairs = zip(residuals, stage.on_host, strict=True)
    return [r.update(memory_space=host) if is_moved else r for r, is_moved in pairs]


def split_residuals(stage: SplitBackward, residuals: list[Any]) -> Residuals:
    """Splits residuals into those that only B or I reads, and those that W reads too."""
    pairs = list(zip(residuals, stage.for_weight, strict=True))
    return [r for r, late in pairs if not late], [r for r, late in pairs if late]


def merge_residuals(stage: SplitBackward, residuals: Residuals) -> list[Any]:
    """Returns residuals in the order of `stage`."""
    early, late = map(iter, residuals)
    return [next(late if is_late else early) for is_late in stage.for_weight]


def split_by_memory(residuals: Residuals) -> tuple[Residuals, Residuals]:
    """Returns the residuals in the device's memory and those in the host's, with None elsewhere."""
    early, late = ([is_on_host(x) for x in each] for each in residuals)
    return (
        (_where(early, residuals[0], keep=False), _where(late, residuals[1], keep=False)),
        (_where(early, residuals[0], keep=True), _where(late, residuals[1], keep=True)),
    )


def merge_memories(on_device: Residuals, on_host: Residuals) -> Residuals:
    """Returns the residuals that `split_by_memory` has split."""
    early, late = (
        [h if d is None else d for d, h in zip(*pair, strict=True)]
        for pair in zip(on_device, on_host, strict=True)
    )
    return early, late


def entries_to_write(buffers: list[Any], slot: Any) -> list[Any]:
    """Returns the entry `slot` of each buffer, and None for each that is None."""
    return [None if buffer is None else Entry(buffer, slot) for buffer in buffers]


def fetch(buffers: list[jax.Array], slot: Any) -> list[Any]:
    """Returns the buffers, and of those on the host the entry `slot` on the device."""
    device = jax.memory.Space.Device
    return [
        Fetched(jax.device_put(index_leading(b, slot), device)) if is_on_host(b) else b
        for b in buffers
    ]


def entries_to_read(buffers: list[Any], slot: Any) -> list[Any]:
    """Returns the entry `slot` of each buffer, or what `fetch` has read of it."""
    return [b.value if isinstance(b, Fetched) else Entry(b, slot) for b in buffers]


def run_forward(stage: SplitBackward, arguments: tuple, on_device: Residuals, slots: tuple) -> Any:
    """Runs F, and writes its residuals to the buffers of the device, which are None for the host's.

    `slots` has those of residuals that only B or I reads, and those of residuals that W reads.
    """
    early, late = map(entries_to_write, on_device, slots)
    into = merge_residuals(stage, (early, late))
    out, residuals = stage.forward(*arguments, into)
    is_written = [entry is not None for entry in into]
    written = split_residuals(stage, _where(is_written, residuals, keep=True))
    return out, written, split_residuals(stage, _where(is_written, residuals, keep=False))


def _where(chosen: list[bool], values: list[Any], *, keep: bool) -> list[Any]:
    """Returns the values for which `chosen` is `keep`, and None in place of the others."""
    return [x if is_chosen == keep else None for x, is_chosen in zip(values, chosen, strict=True)]
