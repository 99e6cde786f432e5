"""When everything happens: a schedule's order, with costs.

Time has no unit here: that of the costs. Where they are integers or fractions, every time is exact.
"""

from dataclasses import dataclass

from ..._input import short_repr
from .._action import FusedPair, Op, ScheduleStep, actions_of
from .._dependencies import ResultKey, walk_topologically
from .._schedule import Schedule, without_fused_pairs

_LEAST_TIME, _MOST_TIME = 1e-9, 1e15  # sums of them keep their digits

Time = int | float
PerStage = Time | tuple[Time, ...]


@dataclass(frozen=True)
class Costs:
    """What actions and transfers cost; F, I and W one number, or one per stage.

    An action is of one stage and, where microbatches are sliced, of one slice: with two chunks per
    rank the costs of a stage are half those of a rank. `B` costs `input + weight`.

    Attributes:
        forward: Time of an F.
        input: Time of an I.
        weight: Time of a W.
        transfer: Time from the end of an action to the start of one that needs it on another rank.
        pair_factor: Time of a fused pair, as a fraction of its halves one after the other.
        atomic_pairs: A fused pair starts when both halves could and gives both results at its end,
            as DualPipe's bubble formula has it. If not, its backward follows its forward.
    """

    forward: PerStage = 1
    input: PerStage = 1
    weight: PerStage = 1
    transfer: Time = 0
    pair_factor: Time = 1
    atomic_pairs: bool = True


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step with its start and end."""

    step: ScheduleStep
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """A schedule that has been run: for every rank its steps with their times, in order."""

    schedule: Schedule
    rows: tuple[tuple[TimedStep, ...], ...]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs every rank's program, each action as soon as its rank and what it needs are there.

    Raises:
        ValueError: If costs are negative, or not one per stage.
        ScheduleError: If the schedule deadlocks.
    """
    check_costs(costs, schedule.num_stages)
    runnable = schedule if costs.atomic_pairs else without_fused_pairs(schedule)
    scales = {} if costs.atomic_pairs else _halves(schedule, costs.pair_factor)
    finished: dict[ResultKey, tuple[int, Time]] = {}
    rows: list[list[TimedStep]] = [[] for _ in schedule.programs]
    now: list[Time] = [0] * len(rows)
    for rank, step, waits, given in walk_topologically(runnable):
        start = now[rank]
        for need in waits:
            home, ready = finished[need]
            if home != rank:
                ready += costs.transfer
            if ready > start:
                start = ready
        length = duration(step, costs)
        end = start + (length * scales[step] if step in scales else length)
        finished.update(dict.fromkeys(given, (rank, end)))
        rows[rank].append(TimedStep(step, start, end))
        now[rank] = end
    return Timeline(schedule, tuple(map(tuple, rows)))


def check_costs(costs: Costs, num_stages: int) -> None:
    """Refuses costs that are negative or do not belong to that many stages.

    Raises:
        ValueError: Naming the cost.
    """
    for name in ("forward", "input", "weight", "transfer", "pair_factor"):
        cost = getattr(costs, name)
        each = cost if isinstance(cost, tuple) else (cost,)
        if isinstance(cost, tuple) and len(cost) != num_stages:
            raise ValueError(
                f"`{name}` has {len(cost)} entries for {num_stages} stages. "
                "Give one number, or one per stage in forward order."
            )
        if not all(value == 0 or _LEAST_TIME <= value <= _MOST_TIME for value in each):
            raise ValueError(
                f"`{name}` is {short_repr(cost)}. Give times of 0 or more; if not 0, from "
                f"{_LEAST_TIME:g} to {_MOST_TIME:g}."
            )


def duration(step: ScheduleStep, costs: Costs) -> Time:
    """How long a rank takes for a step."""
    if isinstance(step, FusedPair):
        halves = duration(step.forward, costs) + duration(step.backward, costs)
        return halves * costs.pair_factor
    if step.op is Op.F:
        return _of_stage(costs.forward, step.stage)
    if step.op is Op.I:
        return _of_stage(costs.input, step.stage)
    if step.op is Op.W:
        return _of_stage(costs.weight, step.stage)
    return _of_stage(costs.input, step.stage) + _of_stage(costs.weight, step.stage)


def _of_stage(cost: PerStage, stage: int) -> Time:
    return cost[stage] if isinstance(cost, tuple) else cost


def _halves(schedule: Schedule, pair_factor: Time) -> dict[ScheduleStep, Time]:
    """The actions that are halves of a pair, with the factor their time is multiplied by."""
    pairs = (
        step for program in schedule.programs for step in program if isinstance(step, FusedPair)
    )
    return {action: pair_factor for pair in pairs for action in actions_of(pair)}
