"""Adds up a step's time on a TPU from what its instructions cost."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._instruction_costs import (
    COLLECTIVE,
    KERNEL,
    KINDS_OF_WORK,
    InstructionCost,
    instruction_costs,
)
from ._rates import DeviceRates, device_rates


@dataclass(frozen=True)
class StepTime:
    """The estimated time of a step on one device.

    What is left out: instructions of `no_estimate`, copies that run beside others, transfers that
    share a link, the start of each instruction and of the program, the host, and input.

    Attributes:
        busy_seconds: Seconds by kind of work, collectives left out.
        exposed_seconds: Seconds of collectives in which nothing else runs, by kind of collective.
        bubble_seconds: Seconds in which the device waits for others in ticks that it skips.
        no_estimate: Executions of instructions without an estimate, by opcode.
        unmarked_seconds: The part of `busy_seconds` in branches that count as always taken because
            the program does not say how often they are.
        costs: The instructions.
    """

    busy_seconds: dict[str, float]
    exposed_seconds: dict[str, float]
    bubble_seconds: float
    no_estimate: dict[str, float]
    unmarked_seconds: float
    costs: tuple[InstructionCost, ...]

    @property
    def busy(self) -> float:
        """Returns the seconds of all work but collectives."""
        return sum(self.busy_seconds.values())

    @property
    def exposed(self) -> float:
        """Returns the seconds of collectives in which nothing else runs."""
        return sum(self.exposed_seconds.values())

    @property
    def seconds(self) -> float:
        """Returns the estimated seconds of a step."""
        return self.busy + self.exposed + self.bubble_seconds

    def dearest(self, count: int) -> list[tuple[InstructionCost, int]]:
        """Returns the instructions that take most of a step.

        Returns:
            (cost, number of instructions) in descending order of their sum. Instructions of one
            line of Python with equal shapes are one entry, with the sum of their executions.
        """
        groups: dict[tuple[str, ...], list[InstructionCost]] = {}
        for cost in self.costs:
            key = (cost.work, cost.opcode, cost.shape, cost.source, cost.op_name)
            groups.setdefault(key, []).append(cost)
        found = [(_together(costs), len(costs)) for costs in groups.values()]
        return sorted(found, key=lambda item: -item[0].total)[:count]


def step_time(hlo_text: str, rates: DeviceRates, bubble: float = 0.0) -> StepTime:
    """Estimates the time of a step on TPUs.

    Args:
        bubble: The share of the pipeline's time in which a device waits, by the schedule. Branches
            that are marked with their share wait as long; ticks that every device executes count in
            full already.

    Raises:
        ValueError: If the text is not that of a compiled program, or `bubble` is no share.
    """
    if not 0 <= bubble < 1:
        raise ValueError(f"`bubble` is {bubble}. Give the share of the time, from 0 to below 1.")
    costs = instruction_costs(hlo_text, rates)
    computing = [cost for cost in costs if cost.work != COLLECTIVE]
    marked = _sum(cost for cost in computing if cost.marked)
    return StepTime(
        busy_seconds={
            work: _sum(cost for cost in computing if cost.work == work)
            for work in KINDS_OF_WORK
            if work != COLLECTIVE
        },
        exposed_seconds=_by_opcode([cost for cost in costs if cost.work == COLLECTIVE]),
        bubble_seconds=marked * bubble / (1 - bubble),
        no_estimate=_without_estimate(computing),
        unmarked_seconds=_sum(cost for cost in computing if cost.unmarked),
        costs=costs,
    )


def estimated_time(hlo_text: str, device_kind: str, bubble: float = 0.0) -> StepTime | None:
    """Estimates the time of a step if its compiler estimates cycles."""
    rates = device_rates(device_kind)
    return None if rates is None else step_time(hlo_text, rates, bubble)


def _sum(costs: Iterable[InstructionCost]) -> float:
    return sum((cost.total for cost in costs), 0.0)


def _by_opcode(costs: Sequence[InstructionCost]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        sums[cost.opcode] += cost.total
    return dict(sums)


def _without_estimate(costs: Sequence[InstructionCost]) -> dict[str, float]:
    """Counts kernels, and fusions and copies of arrays; what computes on integers takes no time."""
    counts: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        scalar = cost.shape.endswith("[]")
        if cost.seconds is None and not scalar:
            counts[cost.name.split(".")[0] if cost.work == KERNEL else cost.opcode] += (
                cost.executions
            )
    return dict(counts)


def _together(costs: Sequence[InstructionCost]) -> InstructionCost:
    """Returns one cost with the executions of all, at their mean time."""
    first, executions = costs[0], sum(cost.executions for cost in costs)
    seconds = sum(cost.total for cost in costs) / executions if executions else 0.0
    return InstructionCost(**vars(first) | {"executions": executions, "seconds": seconds})
