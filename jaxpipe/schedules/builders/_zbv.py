"""ZB-V: zero bubble with two chunks per rank in a V, within 1F1B's memory."""

from collections.abc import Iterator

from ..language._action import Action, Op
from ..language._placement import v_stage
from ..language._schedule import Schedule
from ._require import require_positive


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: turns a microbatch round on the last rank, so that rank 0 frees its memory early.

    The order is that of at least 2p - 1 microbatches, cut down where there are fewer.

    References:
        Qi et al., 2023, arXiv 2401.10241, section 6; as torch's ScheduleZBVZeroBubble orders it.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    whole = max(2 * num_ranks - 1, num_microbatches)
    programs = tuple(
        tuple(a for a in _program(rank, num_ranks, whole) if a.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule(2 * num_ranks, num_microbatches, programs)


def _program(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yields a rank's phases, each a pattern (`F1` is a forward of chunk 1) and its repetitions."""
    phases = (
        ("F0", 2 * (num_ranks - rank) - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", num_ranks - rank),
        ("F0 I0 W0 F1 I1 W1", num_microbatches - 2 * num_ranks + rank + 1),
        ("I0 W0 F1 I1 W1", num_ranks - 1 - rank),
        ("I0 I1", rank),
        ("I0 W0", num_ranks - rank),
    )
    done: dict[str, int] = dict.fromkeys(["F0", "F1", "I0", "I1", "W0", "W1"], 0)
    for pattern, times in phases:
        for kind in pattern.split() * times:
            yield _action(kind, done, rank, num_ranks)
    for kind in ("W1", "W0"):
        while done[kind] < num_microbatches:
            yield _action(kind, done, rank, num_ranks)


def _action(kind: str, done: dict[str, int], rank: int, num_ranks: int) -> Action:
    """Returns the next action of a kind, counted in `done`."""
    microbatch = done[kind]
    done[kind] += 1
    return Action(v_stage(rank, int(kind[1]), num_ranks), Op(kind[0]), microbatch)
