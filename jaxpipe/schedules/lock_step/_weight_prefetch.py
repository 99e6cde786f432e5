"""Which weights a rank needs next: what to gather ahead, and when gradients of a stage are done.

A rank works on one stage for a while, then on another: a visit. What it needs is gathered when the
visit before it begins. Forward and backward make visits side by side, and hold the weights of one
stage each; a backward's begin without a gather where the forward holds just these. Where that saves
nothing, as with all forwards before all backwards, they hold the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .._action import Action, Op

CURRENT, PREFETCHED, SHARED_WITH_FORWARD = 0, 1, 2
"""Where an action finds its weights: where the last one had them, ahead, or with the forward."""


class ChunkResidency(NamedTuple):
    """What an F, B or I has to know.

    Attributes:
        source: Where its weights are.
        next_stage: If they come from ahead: the stage to be gathered next, or -1.
        ends_residency: Whether the next backward of its rank is of another stage, or there is none.
    """

    source: int
    next_stage: int
    ends_residency: bool


def separates_backward_weights(programs: Sequence[Sequence[Action]]) -> bool:
    """Returns whether forward and backward hold weights of their own, which must save gathers.

    Args:
        programs: What every rank runs, without W's.
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
    """Returns the visit of every action of a rank's program without W's."""
    found: list[ChunkResidency] = []
    following = next_backward = -1
    sources = _sources(program, separate_backward_weights=separate_backward_weights)
    for action, source in zip(reversed(program), reversed(sources), strict=True):
        closes = action.op is not Op.F and action.stage != next_backward
        found.append(ChunkResidency(source, following if source == PREFETCHED else -1, closes))
        if source == PREFETCHED:
            following = action.stage
        if action.op is not Op.F:
            next_backward = action.stage
    return found[::-1]


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
