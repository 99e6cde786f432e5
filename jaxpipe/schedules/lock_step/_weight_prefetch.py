"""Plans the prefetch of weights: what to gather ahead, and when a stage's gradients are complete.

A rank works on one stage for a while, then on another: the residency of a chunk. Its weights are
gathered when the residency before it begins. Forward and backward hold the weights of one stage
each; a backward needs no gather if the forward holds the same stage. If separate weights save no
gathers, as with all forwards before all backwards, forward and backward share one set.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..language._action import Action, Op

CURRENT = 0
"""The weights of an action are already in use."""

PREFETCHED = 1
"""The weights of an action have been prefetched."""

SHARED_WITH_FORWARD = 2
"""The weights of an action are held by the forward."""


class ChunkResidency(NamedTuple):
    """The weights of an F, B or I.

    Attributes:
        source: Where the weights of its stage are: `CURRENT`, `PREFETCHED`, `SHARED_WITH_FORWARD`.
        next_stage: If they are prefetched: the stage to be gathered next, or -1.
        ends_residency: Whether the next backward of its rank is of another stage, or none follows.
    """

    source: int
    next_stage: int
    ends_residency: bool


def separates_backward_weights(programs: Sequence[Sequence[Action]]) -> bool:
    """Returns whether forward and backward should hold weights of their own.

    They should if that saves gathers.
    """
    apart, together = (
        sum(
            _sources(program, separate_backward_weights=apart).count(PREFETCHED)
            for program in programs
        )
        for apart in (True, False)
    )
    return apart < together


def chunk_residencies(
    program: Sequence[Action], *, separate_backward_weights: bool
) -> list[ChunkResidency]:
    """Returns the residency of every action of a rank's program without W's."""
    residencies: list[ChunkResidency] = []
    following = next_backward = -1
    sources = _sources(program, separate_backward_weights=separate_backward_weights)
    for action, source in zip(reversed(program), reversed(sources), strict=True):
        ends_residency = action.op is not Op.F and action.stage != next_backward
        residencies.append(
            ChunkResidency(source, following if source == PREFETCHED else -1, ends_residency)
        )
        if source == PREFETCHED:
            following = action.stage
        if action.op is not Op.F:
            next_backward = action.stage
    return residencies[::-1]


def _sources(program: Sequence[Action], *, separate_backward_weights: bool) -> list[int]:
    held: dict[bool, int | None] = {True: None, False: None}
    sources = []
    for action in program:
        is_forward = action.op is Op.F or not separate_backward_weights
        if held[is_forward] == action.stage:
            sources.append(CURRENT)
        elif not is_forward and held[True] == action.stage:
            sources.append(SHARED_WITH_FORWARD)
        else:
            sources.append(PREFETCHED)
        held[is_forward] = action.stage
    return sources
