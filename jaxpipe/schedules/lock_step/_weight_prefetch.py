"""Which weights a rank needs next: what to gather ahead, and when gradients of a stage are done.

A rank works on one stage for a while, then on another: a visit. What it needs is gathered when the
visit before it begins. Forward and backward make visits side by side, and hold the weights of one
stage each; a backward's begin without a gather where the forward holds just these. Where that saves
nothing, as with all forwards before all backwards, they hold the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .._action import Action, Op

HELD, AHEAD, OF_FORWARD = 0, 1, 2
"""Where an action finds its weights: where the last one had them, ahead, or with the forward."""


class Visit(NamedTuple):
    """What an F, B or I has to know.

    Attributes:
        source: Where its weights are.
        following: If they come from ahead: the stage to be gathered next, or -1.
        closes: Whether the next backward of its rank is of another stage, or there is none.
    """

    source: int
    following: int
    closes: bool


def is_side_by_side(programs: Sequence[Sequence[Action]]) -> bool:
    """Returns whether forward and backward hold weights of their own, which must save gathers.

    Args:
        programs: What every rank runs, without W's.
    """
    apart, together = (
        sum(_sources(program, side_by_side=apart).count(AHEAD) for program in programs)
        for apart in (True, False)
    )
    return apart < together


def visits(program: Sequence[Action], *, side_by_side: bool) -> list[Visit]:
    """Returns the visit of every action of a rank's program without W's."""
    found: list[Visit] = []
    following = next_backward = -1
    sources = _sources(program, side_by_side=side_by_side)
    for action, source in zip(reversed(program), reversed(sources), strict=True):
        closes = action.op is not Op.F and action.stage != next_backward
        found.append(Visit(source, following if source == AHEAD else -1, closes))
        if source == AHEAD:
            following = action.stage
        if action.op is not Op.F:
            next_backward = action.stage
    return found[::-1]


def _sources(program: Sequence[Action], *, side_by_side: bool) -> list[int]:
    held: dict[bool, int | None] = {True: None, False: None}
    sources = []
    for action in program:
        is_forward = action.op is Op.F or not side_by_side
        if held[is_forward] == action.stage:
            sources.append(HELD)
        elif not is_forward and held[True] == action.stage:
            sources.append(OF_FORWARD)
        else:
            sources.append(AHEAD)
        held[is_forward] = action.stage
    return sources
