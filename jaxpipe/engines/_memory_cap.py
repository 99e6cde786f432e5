"""A cap of memory: the most microbatches that a rank of an engine may store for backwards.

Caps are in microbatches of a whole rank, the default unit of `schedules.search`: one is what the
forwards of a microbatch store in all stages of a rank. An engine counts activations: what the
forward of one stage stores.
"""

from math import floor

from ..schedules import Schedule, num_ranks, peak_activations
from ..schedules.language import num_slices

_ROUNDING = 1e-9


def activation_cap(schedule: Schedule, memory_cap: float | None) -> int | None:
    """Returns the most activations that a rank may store."""
    if memory_cap is None:
        return None
    per_microbatch = _activations_per_microbatch(schedule)
    peaks = peak_activations(schedule)
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    check_cap(
        memory_cap,
        peaks[fullest] / per_microbatch,
        f"`schedule` stores {{}} on rank {fullest}",
        f"a schedule that `schedules.search(..., memory_cap={memory_cap:g})` finds",
    )
    return floor(memory_cap * per_microbatch + _ROUNDING)


def check_cap(memory_cap: float | None, least: float, reason: str, instead: str) -> None:
    """Checks that an engine, which stores `least` microbatches of a whole rank, can keep a cap."""
    if memory_cap is not None and memory_cap < least - _ROUNDING:
        raise ValueError(
            f"`memory_cap` is {memory_cap:g} microbatches, and {reason.format(f'{least:g}')}. Give "
            f"at least {least:g}, or {instead}."
        )


def _activations_per_microbatch(schedule: Schedule) -> float:
    """Returns the activations that the forwards of a microbatch store on a rank, on average."""
    return schedule.num_stages * num_slices(schedule) / num_ranks(schedule)
