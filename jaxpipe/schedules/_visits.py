"""Which weights a rank needs next: what to gather ahead, and when gradients of a stage are done.

A rank works on one stage for a while, then on another: a visit. Forward and backward make visits
side by side, and hold the weights of one stage each. What a visit needs is gathered when the visit
before it begins, on either side; unless it is a backward's, and the forward holds just that.
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


def visits(ticks: Ticks) -> dict[Action, Visit]:
    """The visit of every F, B and I of a grid that passes `check_ticks`."""
    programs: list[list[Action]] = [[] for _ in ticks.numbers]
    for rank, _, action in ticked(ticks):
        if action.op is not Op.W:
            programs[rank].append(action)
    return {action: visit for program in programs for action, visit in _of_rank(program).items()}


def _of_rank(program: list[Action]) -> dict[Action, Visit]:
    sources = _sources(program)
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


def _sources(program: list[Action]) -> dict[Action, int]:
    forward, backward = None, None
    sources = {}
    for action in program:
        if action.op is Op.F:
            sources[action] = HELD if action.stage == forward else AHEAD
            forward = action.stage
        else:
            sources[action] = (
                HELD
                if action.stage == backward
                else OF_FORWARD
                if action.stage == forward
                else AHEAD
            )
            backward = action.stage
    return sources
