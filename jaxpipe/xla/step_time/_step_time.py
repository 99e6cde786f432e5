"""Adds up a step's time from what its instructions cost."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ._instruction_costs import COLLECTIVE, KERNEL, KINDS_OF_WORK, InstructionCost
from ._play import instruction_costs
from ._rates import Rates, device_rates


@dataclass(frozen=True)
class StepTime:
    """The estimated time of a step on one device.

    What is left out: instructions of `no_estimate`, copies that run beside others, also those to
    the host's memory, the start of each instruction and of the program, the host, and input. All
    links of a device are one queue.
    """

    busy_seconds: dict[str, float]  # by kind of work, collectives left out
    exposed_seconds: dict[str, float]  # the core waits for collectives, by kind of collective
    transfer_seconds: dict[str, float]  # the links or the network are used, by kind of collective
    bubble_seconds: float  # the device waits for others in ticks that it skips
    no_estimate: dict[str, float]  # executions of instructions without an estimate, by opcode
    unmarked_seconds: float  # of `busy_seconds` in branches that count as always taken, unmarked
    costs: tuple[InstructionCost, ...]

    @property
    def busy(self) -> float:
        """Returns the seconds of all work but collectives."""
        return sum(self.busy_seconds.values(), 0.0)

    @property
    def exposed(self) -> float:
        """Returns the seconds in which the core waits for collectives."""
        return sum(self.exposed_seconds.values(), 0.0)

    @property
    def seconds(self) -> float:
        """Returns the estimated seconds of a step."""
        return self.busy + self.exposed + self.bubble_seconds

    def hidden_share(self, kind: str) -> float:
        """Returns the share of a kind's transfers in which the core does not wait for them."""
        seconds = self.transfer_seconds.get(kind, 0.0)
        return max(0.0, 1 - self.exposed_seconds[kind] / seconds) if seconds else 0.0

    def dearest(self, count: int) -> list[tuple[InstructionCost, int]]:
        """Returns the instructions that take most of a step, and how many share each entry."""
        # Instructions of one line of Python with equal shapes are one entry.
        groups: dict[tuple[str, ...], list[InstructionCost]] = {}
        for cost in self.costs:
            key = (cost.work, cost.opcode, cost.shape, cost.source, cost.op_name)
            groups.setdefault(key, []).append(cost)
        entries = [(_together(costs), len(costs)) for costs in groups.values()]
        return sorted(entries, key=lambda item: -item[0].total)[:count]


def step_time(hlo_text: str, rates: Rates, bubble: float = 0.0) -> StepTime:
    """Estimates the time of a step.

    `bubble` is the share of the pipeline's time in which a device waits, by the schedule. Branches
    that are marked with their share wait as long; ticks that every device executes count in full
    already.
    """
    if not 0 <= bubble < 1:
        raise ValueError(f"`bubble` is {bubble}. Give the share of the time, from 0 to below 1.")
    costs = instruction_costs(hlo_text, rates)
    computing = [cost for cost in costs if cost.work != COLLECTIVE]
    moving = [cost for cost in costs if cost.work == COLLECTIVE]
    marked = _sum(cost for cost in computing if cost.marked)
    return StepTime(
        busy_seconds={
            work: _sum(cost for cost in computing if cost.work == work)
            for work in KINDS_OF_WORK
            if work != COLLECTIVE
        },
        exposed_seconds=_by_opcode((cost.opcode, cost.total) for cost in moving),
        transfer_seconds=_by_opcode(
            (cost.opcode, cost.transfer_seconds * cost.executions) for cost in moving
        ),
        bubble_seconds=marked * bubble / (1 - bubble),
        no_estimate=_without_estimate(computing),
        unmarked_seconds=_sum(cost for cost in computing if cost.unmarked),
        costs=costs,
    )


def estimated_time(
    hlo_text: str, device_kind: str, bubble: float = 0.0, hosts: Sequence[int] = ()
) -> StepTime | None:
    """Estimates the time of a step on a kind of device that is known."""
    rates = device_rates(device_kind, hosts)
    return None if rates is None else step_time(hlo_text, rates, bubble)


def _sum(costs: Iterable[InstructionCost]) -> float:
    return sum((cost.total for cost in costs), 0.0)


def _by_opcode(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for opcode, seconds in items:
        sums[opcode] += seconds
    return dict(sums)


def _without_estimate(costs: Sequence[InstructionCost]) -> dict[str, float]:
    """Counts kernels, and fusions and copies of arrays; what computes on integers takes no time."""
    counts: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        scalar = cost.shape.endswith("[]")
        if cost.seconds is None and not scalar:
            name = cost.name.split(".")[0] if cost.work == KERNEL else cost.opcode
            counts[name] += cost.executions
    return dict(counts)


def _together(costs: Sequence[InstructionCost]) -> InstructionCost:
    """Returns one cost with the executions of all, at their mean time."""
    first, executions = costs[0], sum(cost.executions for cost in costs)
    seconds = sum(cost.total for cost in costs) / executions if executions else 0.0
    return replace(first, executions=executions, seconds=seconds)
