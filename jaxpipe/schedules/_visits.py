"""Which weights a rank needs next: what to gather ahead, and when gradients of a stage are done.

A rank works on one stage for a while, then on another: a visit. What it needs is gathered when the
visit before it begins. Forward and backward make visits side by side, and hold the weights of one
stage each; a backward's begin without a gather where the forward holds just these. Where that saves
nothing, as with all forwards before all backwards, they hold the same.
"""

from itertools import pairwise
from typing import NamedTuple

from ._action import Action, Op
from ._ticks import Ticks, ticked

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


class Visits(NamedTuple):
    """The visits of a grid.

    Attributes:
        of: That of every F, B and I.
        side_by_side: Whether forward and backward hold weights of their own.
    """

    of: dict[Action, Visit]
    side_by_side: bool


def visits(ticks: Ticks) -> Visits:
    """The visits of a grid that passes `check_ticks`."""
    programs: list[list[Action]] = [[] for _ in ticks.numbers]
    for rank, _, action in ticked(ticks):
        if action.op is not Op.W:
            programs[rank].append(action)
    apart, together = (
        [_sources(program, side_by_side=apart) for program in programs] for apart in (True, False)
    )
    side_by_side = _gathers(apart) < _gathers(together)
    of_ranks = zip(programs, apart if side_by_side else together, strict=True)
    of = {action: visit for pair in of_ranks for action, visit in _of_rank(*pair).items()}
    return Visits(of, side_by_side)


def _gathers(sources: list[dict[Action, int]]) -> int:
    return sum(source == AHEAD for of_rank in sources for source in of_rank.values())


def _of_rank(program: list[Action], sources: dict[Action, int]) -> dict[Action, Visit]:
    ahead = [action for action in program if sources[action] == AHEAD]
    following = {action: after.stage for action, after in pairwise(ahead)}
    backwards = [action for action in program if action.op is not Op.F]
    goes_on = {action for action, after in pairwise(backwards) if action.stage == after.stage}
    return {
        action: Visit(
            sources[action],
            following.get(action, -1),
            action.op is not Op.F and action not in goes_on,
        )
        for action in program
    }


def _sources(program: list[Action], *, side_by_side: bool) -> dict[Action, int]:
    held: dict[bool, int | None] = {True: None, False: None}
    sources = {}
    for action in program:
        is_forward = action.op is Op.F or not side_by_side
        if held[is_forward] == action.stage:
            sources[action] = HELD
        elif not is_forward and held[True] == action.stage:
            sources[action] = OF_FORWARD
        else:
            sources[action] = AHEAD
        held[is_forward] = action.stage
    return sources
