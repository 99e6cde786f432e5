"""A greedy list scheduler: whenever a rank is free, it starts the most urgent action that is ready.

No proof comes with it; but it sees the costs, where a named schedule sees only counts.
"""

from collections.abc import Iterator

from ..language._action import Action, Op
from ..language._schedule import Schedule
from ._simulate import Costs, Time

_COSTS = {Op.F: "forward", Op.I: "input", Op.W: "weight"}


def greedy_schedule(
    num_stages: int, num_microbatches: int, costs: Costs, most_alive: int
) -> Schedule:
    """Builds a schedule of one stage per rank by list scheduling.

    A rank starts the action that can start first; of those that can start at the same time, an I
    before an F, and an F before a W. It never holds more than `most_alive` microbatches. The order
    of microbatches is kept, so a rank that is full waits only for later ranks, and none deadlocks.

    Args:
        num_stages: Stages, one per rank.
        num_microbatches: Pieces of the batch.
        costs: Costs of a stage.
        most_alive: The most microbatches that a rank may hold, at least 1.

    Returns:
        A schedule with split backwards.
    """
    ended: dict[Action, Time] = {}
    free: list[Time] = [0] * num_stages
    programs: list[list[Action]] = [[] for _ in range(num_stages)]
    counts = [dict.fromkeys(Op, 0) for _ in range(num_stages)]

    def candidates(stage: int) -> Iterator[tuple[Time, int, Action]]:
        """Yields the next action of each kind: (when its input arrives, urgency, action)."""
        forwards, inputs, weights = (counts[stage][op] for op in (Op.F, Op.I, Op.W))
        after = Action(stage + 1, Op.I, inputs)
        if inputs < forwards and (stage == num_stages - 1 or after in ended):
            yield arrival(after), 0, Action(stage, Op.I, inputs)
        before = Action(stage - 1, Op.F, forwards)
        room = forwards < num_microbatches and forwards - weights < most_alive
        if room and (stage == 0 or before in ended):
            yield arrival(before), 1, Action(stage, Op.F, forwards)
        if weights < inputs:
            yield 0, 2, Action(stage, Op.W, weights)

    def arrival(action: Action) -> Time:
        return ended[action] + costs.transfer if action in ended else 0

    for _ in range(3 * num_stages * num_microbatches):
        start, _, stage, action = min(
            (max(free[stage], ready), urgency, stage, action)
            for stage in range(num_stages)
            for ready, urgency, action in candidates(stage)
        )
        free[stage] = ended[action] = start + _cost(costs, action)
        programs[stage].append(action)
        counts[stage][action.op] += 1
    return Schedule(num_stages, num_microbatches, tuple(map(tuple, programs)))


def _cost(costs: Costs, action: Action) -> Time:
    cost = getattr(costs, _COSTS[action.op])
    return cost[action.stage] if isinstance(cost, tuple) else cost
