"""Zero bubble: splits the backward in two, and fills the bubbles with its second half.

Stages are busy while W's wait: in H1 and ZB-V, with two chunks per rank in a V, within 1F1B's
memory; in H2 with twice that.
"""

from collections import deque
from collections.abc import Iterator
from math import floor, inf

from ..language._action import Action, Op
from ..language._placement import v_stage
from ..language._schedule import Schedule, from_ranks
from ._require import require, require_positive


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: postpones W's of later stages in 1F1B, so that none holds more than p microbatches.

    Example:
        >>> print(zero_bubble_h1(2, 2))
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1

    References:
        Qi et al., 2023, arXiv 2401.10241, figure 2.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)
    require(
        num_microbatches >= num_stages,
        f"`num_microbatches` is {num_microbatches}, fewer than {num_stages} stages.",
        f"Give at least {num_stages}, or choose 1f1b.",
    )

    def program(stage: int) -> Iterator[Action]:
        forwards, inputs, weights = (
            deque(Action(stage, op, m) for m in range(num_microbatches))
            for op in (Op.F, Op.I, Op.W)
        )
        for _ in range(num_stages - stage):
            yield forwards.popleft()
        for _ in range(stage):
            yield inputs.popleft()
            yield forwards.popleft()
        while weights:
            for queue in (inputs, weights, forwards):
                if queue:
                    yield queue.popleft()

    return from_ranks(program, num_stages, num_microbatches)


def zero_bubble_h2(
    num_stages: int, num_microbatches: int, *, latency: int | float = 0, spare: int = 0
) -> Schedule:
    """ZB-H2: keeps enough forwards in flight that no stage ever waits, once it has begun.

    Args:
        num_microbatches: At least as many as the warmup of stage 0: 2p - 1 without latency.
        latency: Time of a transfer as a multiple of the time of one action; a longer warmup hides
            it.
        spare: Microbatches a stage may hold beyond the 2p - 1 it needs. The authors' code, given
            twice the memory of 1F1B, has 1.

    Returns:
        A schedule with a stage on each rank, whose backwards are split into I and W.

    References:
        Qi et al., 2023, arXiv 2401.10241, figure 3.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)
    require(0 <= latency < inf, f"`latency` is {latency}.", "Give 0 or more, in actions.")
    require(spare >= 0, f"`spare` is {spare}.", "Give 0 or more.")

    def warmup(stage: int) -> int:
        later = num_stages - 1 - stage
        return floor(2 * later + 1 + 2 * later * latency)

    require(
        num_microbatches >= warmup(0),
        f"`num_microbatches` is {num_microbatches}, fewer than the {warmup(0)} that keep "
        f"{num_stages} stages busy until the first backward.",
        f"Give at least {warmup(0)}, or choose zero_bubble_h1.",
    )

    def program(stage: int) -> Iterator[Action]:
        most_alive = warmup(stage) + warmup(num_stages - 1 - stage) - 1 + spare
        forwards = warmup(stage)
        weights = 0
        for m in range(forwards):
            yield Action(stage, Op.F, m)
        for m in range(num_microbatches):
            full = forwards - weights == most_alive and forwards < num_microbatches
            if full and weights < m:  # a W waits until its memory is needed
                yield Action(stage, Op.W, weights)
                weights += 1
            forward = m > 0 and forwards < num_microbatches
            if forward:
                yield Action(stage, Op.F, forwards)
                forwards += 1
            # When forwards have ended, backwards arrive only at every other time and W's fill the
            # gaps. The last stage has none; stage 0 need not hurry, as no stage waits for its I.
            gap = forwards == num_microbatches and (stage == 0 or not forward)
            if gap and stage < num_stages - 1 and weights < m:
                yield Action(stage, Op.W, weights)
                weights += 1
            yield Action(stage, Op.I, m)
        for m in range(weights, num_microbatches):
            yield Action(stage, Op.W, m)

    return from_ranks(program, num_stages, num_microbatches)


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: turns a microbatch round on the last rank, so that rank 0 frees its memory early.

    The order is that of at least 2p - 1 microbatches, cut down where there are fewer.

    References:
        Qi et al., 2023, arXiv 2401.10241, section 6; as torch's ScheduleZBVZeroBubble orders it.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    whole = max(2 * num_ranks - 1, num_microbatches)
    programs = tuple(
        tuple(a for a in _zbv_program(rank, num_ranks, whole) if a.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule(2 * num_ranks, num_microbatches, programs)


def _zbv_program(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
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
