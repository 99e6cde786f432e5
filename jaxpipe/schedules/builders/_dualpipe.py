"""DualPipe and DualPipeV: two streams of microbatches cross and overlap.

The forward of one stream overlaps the backward of the other.

In DualPipe the streams enter at opposite ends, so a rank holds a copy of two stages; in DualPipeV
the ends are folded together, and the two streams are the two chunks of a V. A rank's order is the
same in both: `F0` below is the forward of the stream that enters nearer to it, `F1` of the other.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..language._action import Action, FusedPair, Op, ScheduleStep
from ..language._placement import v_stage
from ..language._schedule import Schedule, from_ranks
from ._require import require, require_positive


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe: sends half of the microbatches from rank 0, the other half from the last rank.

    The second half passes stage s on rank p - 1 - s: two copies of the weights.

    References:
        DeepSeek-V3, 2024, arXiv 2412.19437, figure 5.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    require(
        num_ranks % 2 == 0, f"`num_ranks` is {num_ranks}, which is odd.", "Give an even number."
    )
    require(
        num_microbatches % 2 == 0,
        f"`num_microbatches` is {num_microbatches}, which is odd.",
        "Give an even number: one half enters at each end.",
    )
    _require_long_enough(num_microbatches, 2 * num_ranks)
    half_ranks, half = num_ranks // 2, num_microbatches // 2

    def program(rank: int) -> Iterator[ScheduleStep]:
        opposite = num_ranks - 1 - rank
        down, up = _Stream(rank, 0), _Stream(opposite, half)
        near, far = (down, up) if rank < half_ranks else (up, down)
        depth = min(rank, opposite)
        crossing = half - num_ranks + depth + 1
        return _program(near, far, depth, half_ranks, crossing)

    return from_ranks(program, num_ranks, num_microbatches)


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: cuts DualPipe in half, with a V in place of the second copy of the weights.

    References:
        DeepSeek's dualpipev.py, after Sea AI Lab's "DualPipe could be better without the Dual",
        2025.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    _require_long_enough(num_microbatches, 2 * num_ranks)

    def program(rank: int) -> Iterator[ScheduleStep]:
        near, far = (_Stream(v_stage(rank, chunk, num_ranks), 0) for chunk in (0, 1))
        crossing = num_microbatches - 2 * num_ranks + rank + 1
        return _program(near, far, rank, num_ranks, crossing)

    return from_ranks(program, num_ranks, num_microbatches, 2)


def _require_long_enough(num_microbatches: int, least: int) -> None:
    require(
        num_microbatches >= least,
        f"`num_microbatches` is {num_microbatches}; to cross on every rank takes {least}.",
        f"Give at least {least}.",
    )


@dataclass
class _Stream:
    """The microbatches that pass one stage of a rank, handed out in order."""

    stage: int
    first: int  # its first microbatch
    taken: dict[Op, int] = field(default_factory=lambda: dict.fromkeys(Op, 0))

    def take(self, op: Op) -> Action:
        """Returns the next action; I and B count together."""
        count = Op.B if op is Op.I else op
        self.taken[count] += 1
        return Action(self.stage, op, self.first + self.taken[count] - 1)


def _program(
    near: _Stream, far: _Stream, depth: int, half_ranks: int, crossing: int
) -> Iterator[ScheduleStep]:
    """Yields one rank's eight phases, named as DeepSeek names them.

    `depth` counts ranks from the nearer end, `crossing` the times both streams overlap.
    """
    outer = half_ranks - 1 - depth  # ranks between this one and the middle
    weights: deque[Action] = deque()

    def backward(stream: _Stream, split: bool) -> Action:
        if not split:
            return stream.take(Op.B)
        inputs = stream.take(Op.I)
        weights.append(Action(inputs.stage, Op.W, inputs.microbatch))
        return inputs

    for _ in range(2 * outer):  # 1: nF0
        yield near.take(Op.F)
    for _ in range(depth + 1):  # 2: nF0F1
        yield near.take(Op.F)
        yield far.take(Op.F)
    for _ in range(outer):  # 3: nB1W1F1
        yield backward(far, split=True)
        yield weights.popleft()
        yield far.take(Op.F)
    for i in range(crossing):  # 4: nF0B1F1B0
        pair = FusedPair(near.take(Op.F), backward(far, split=False))
        # In the middle the first backward has just been forward: it would wait for its partner.
        yield from (pair.forward, pair.backward) if i == 0 and outer == 0 else (pair,)
        yield FusedPair(far.take(Op.F), backward(near, split=False))
    for _ in range(outer):  # 5: nB1F1B0
        yield backward(far, split=False)
        yield FusedPair(far.take(Op.F), backward(near, split=False))
    # 6: nB1B0. The second half of them leaves its W's for the end.
    for i in range(2 * (depth + 1)):
        yield backward((far, near)[i % 2], split=i > depth)
    for _ in range(outer):  # 7: nWB0
        yield weights.popleft()
        yield backward(near, split=True)
    while weights:  # 8: nW
        yield weights.popleft()
