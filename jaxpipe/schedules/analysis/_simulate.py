"""Simulates a schedule: its order, with costs.

Times are in the unit of the costs. Where they are integers or fractions, every time is exact.
"""

from dataclasses import dataclass
from numbers import Real

from ..._input import short_repr
from ..language._action import FusedPair, Op, ScheduleStep, actions_of
from ..language._dependencies import ResultKey, walk_topologically
from ..language._schedule import Schedule, describe, draw, without_fused_pairs

_MIN_TIME, _MAX_TIME = 1e-9, 1e15  # sums of such times keep their digits

Time = int | float
PerStage = Time | tuple[Time, ...]


@dataclass(frozen=True)
class Costs:
    """The costs of actions and transfers; F, I and W one number, or one per stage.

    An action is of one stage and, where microbatches are sliced, of one slice: with two chunks per
    rank the costs of a stage are half those of a rank. `B` costs `input + weight`.

    Attributes:
        forward: Time of an F.
        input: Time of an I.
        weight: Time of a W.
        transfer: Time from the end of an action to the start of a dependent one on another rank.
        pair_factor: Time of a fused pair, as a fraction of its halves one after the other.
        atomic_pairs: Whether a fused pair starts when both halves could and gives both outputs at
            its end, as in DualPipe's bubble formula. If not, its backward follows its forward.

    Example:
        >>> from jaxpipe.schedules import build, makespan
        >>> schedule = build("gpipe", ranks=2, microbatches=2)
        >>> makespan(simulate(schedule, Costs(forward=10, input=12, weight=(8, 9), transfer=1)))
        94
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
    """The simulated or measured times of a schedule: for every rank its steps, in order.

    A notebook draws it.
    """

    schedule: Schedule
    rows: tuple[tuple[TimedStep, ...], ...]

    def __repr__(self) -> str:
        end = max((timed.end for row in self.rows for timed in row), default=0)
        return f"Timeline({describe(self.schedule)}; makespan {end:g})"

    def _repr_svg_(self) -> str | None:
        return draw(self)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs every rank's program, each action as soon as its rank and its dependencies are ready.

    Args:
        schedule: A schedule that passes `check`.
        costs: The costs of its stages and of transfers.

    Returns:
        The start and the end of every step.

    Raises:
        ValueError: If costs are negative, or not one per stage.
        ScheduleError: If the schedule deadlocks.

    Example:
        >>> from jaxpipe.schedules import build, makespan
        >>> makespan(simulate(build("1f1b", ranks=4, microbatches=8), Costs()))
        33
    """
    check_costs(costs, schedule.num_stages)
    runnable = schedule if costs.atomic_pairs else without_fused_pairs(schedule)
    halves = set() if costs.atomic_pairs else halves_of_pairs(schedule)
    finished: dict[ResultKey, tuple[int, Time]] = {}
    rows: list[list[TimedStep]] = [[] for _ in schedule.programs]
    now: list[Time] = [0] * len(rows)
    for rank, step, waits, outputs in walk_topologically(runnable):
        start = now[rank]
        for need in waits:
            home, ready = finished[need]
            if home != rank:
                ready += costs.transfer
            if ready > start:
                start = ready
        length = duration(step, costs)
        end = start + (length * costs.pair_factor if step in halves else length)
        finished.update(dict.fromkeys(outputs, (rank, end)))
        rows[rank].append(TimedStep(step, start, end))
        now[rank] = end
    return Timeline(schedule, tuple(map(tuple, rows)))


def check_costs(costs: Costs, num_stages: int) -> None:
    """Checks that costs are not negative and belong to a number of stages."""
    for name in ("forward", "input", "weight", "transfer", "pair_factor"):
        cost = getattr(costs, name)
        each = cost if isinstance(cost, tuple) else (cost,)
        is_per_stage = name in ("forward", "input", "weight")
        are_numbers = all(isinstance(value, Real) for value in each)
        if not are_numbers or (isinstance(cost, tuple) and not is_per_stage):
            more = ", or a tuple with one per stage in forward order" if is_per_stage else ""
            raise ValueError(f"`{name}` is {short_repr(cost)}. Give one number{more}.")
        if isinstance(cost, tuple) and len(cost) != num_stages:
            raise ValueError(
                f"`{name}` has {len(cost)} entries for {num_stages} stages. "
                "Give one number, or one per stage in forward order."
            )
        if not all(value == 0 or _MIN_TIME <= value <= _MAX_TIME for value in each):
            raise ValueError(
                f"`{name}` is {short_repr(cost)}. Give times of 0 or more; if not 0, from "
                f"{_MIN_TIME:g} to {_MAX_TIME:g}."
            )


def duration(step: ScheduleStep, costs: Costs) -> Time:
    """Returns the time that a rank takes for a step."""
    if isinstance(step, FusedPair):
        halves = duration(step.forward, costs) + duration(step.backward, costs)
        return halves * costs.pair_factor
    if step.op is Op.F:
        return _stage_cost(costs.forward, step.stage)
    if step.op is Op.I:
        return _stage_cost(costs.input, step.stage)
    if step.op is Op.W:
        return _stage_cost(costs.weight, step.stage)
    return _stage_cost(costs.input, step.stage) + _stage_cost(costs.weight, step.stage)


def _stage_cost(cost: PerStage, stage: int) -> Time:
    return cost[stage] if isinstance(cost, tuple) else cost


def halves_of_pairs(schedule: Schedule) -> set[ScheduleStep]:
    """Returns the actions that are halves of a pair."""
    steps = (step for program in schedule.programs for step in program)
    return {action for step in steps if isinstance(step, FusedPair) for action in actions_of(step)}
