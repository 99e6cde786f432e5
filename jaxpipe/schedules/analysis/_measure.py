"""The figures of a timeline or a schedule: makespan, bubbles, live activations."""

from collections.abc import Sequence

from ..language._action import Op, ScheduleStep, actions_of
from ..language._schedule import Schedule, num_slices
from ._simulate import Time, Timeline


def makespan(timeline: Timeline) -> Time:
    """Returns the time from the start to the end of the last action.

    Args:
        timeline: The timeline of a schedule.

    Returns:
        The time, in the unit of the costs.

    Example:
        >>> from jaxpipe.schedules import Costs, build, simulate
        >>> schedule = build("1f1b", ranks=4, microbatches=8)
        >>> makespan(simulate(schedule, Costs(forward=1, input=1, weight=1)))
        33
    """
    return max((timed.end for row in timeline.rows for timed in row), default=0)


def busy_times(timeline: Timeline) -> tuple[Time, ...]:
    """Returns [num_ranks] the time that each rank works."""
    return tuple(sum(timed.end - timed.start for timed in row) for row in timeline.rows)


def rectangular_bubble(timeline: Timeline) -> Time:
    """Returns the makespan minus the work of the busiest rank, a step's cost beyond the ideal."""
    return makespan(timeline) - max(busy_times(timeline), default=0)


def bubble_fraction(timeline: Timeline) -> float:
    """Returns the fraction of the makespan in which even the busiest rank waits.

    Args:
        timeline: The timeline of a schedule.

    Returns:
        The fraction, from 0 to 1.

    Example:
        >>> from jaxpipe.schedules import Costs, build, simulate
        >>> schedule = build("1f1b", ranks=4, microbatches=12)
        >>> bubble_fraction(simulate(schedule, Costs(forward=1, input=1, weight=1)))
        0.2
    """
    return float(rectangular_bubble(timeline) / (makespan(timeline) or 1))


def parallelogram_bubble(timeline: Timeline) -> Time:
    """Returns the bubble of zero-bubble papers (arXiv 2401.10241).

    It is the largest span of a rank, from its first start to its last end, minus the work of the
    busiest rank: steps follow each other without a barrier, so the ranks' different starts are lost
    once.
    """
    spans = (row[-1].end - row[0].start for row in timeline.rows if row)
    return max(spans, default=0) - max(busy_times(timeline), default=0)


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Returns the most microbatches (or slices) that are alive on each rank at one time.

    A microbatch is alive in a stage from its forward to its B, or to its W where the backward is
    split. The forward of a fused pair counts before its backward frees anything.

    Args:
        schedule: A schedule that passes `check`.

    Returns:
        [num_ranks] counts, summed over a rank's stages.

    Example:
        >>> from jaxpipe.schedules import build
        >>> peak_activations(build("1f1b", ranks=4, microbatches=8))
        (4, 3, 2, 1)
    """
    ones = [1] * schedule.num_stages
    return tuple(_peak(program, ones, ones) for program in schedule.programs)


def activation_bytes(
    schedule: Schedule, stage_bytes: Sequence[int], weight_bytes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns the peak bytes of saved activations on each rank.

    A stage holds a microbatch's residuals from its forward to the action that frees them: `B`, or
    `W` where the backward is split. With `weight_bytes` an `I` frees what its `W` does not read.
    Weights, gradients and optimizer state are not counted.

    Args:
        schedule: A schedule that passes `check`.
        stage_bytes: [num_stages] bytes that one microbatch leaves on each stage, per device.
        weight_bytes: [num_stages] bytes of one microbatch that stay between `I` and `W`. None: all.

    Returns:
        [num_ranks] bytes, in rank order, rounded up where slices divide a microbatch unevenly.

    Raises:
        ValueError: If `stage_bytes` or `weight_bytes` does not have one entry per stage.

    Example:
        >>> from jaxpipe.schedules import build
        >>> activation_bytes(build("1f1b", ranks=2, microbatches=4), (100, 100))
        (200, 100)

    References:
        For 1F1B this is `min(S - s, M) * stage_bytes[s]` on rank `s`: Narayanan et al., 2021, arXiv
        2104.04473.
    """
    weight_bytes = stage_bytes if weight_bytes is None else weight_bytes
    for name, sizes in (("stage_bytes", stage_bytes), ("weight_bytes", weight_bytes)):
        if len(sizes) != schedule.num_stages:
            raise ValueError(
                f"`{name}` has {len(sizes)} entries for {schedule.num_stages} stages. "
                "Give one per stage, in forward order, including stages that share a rank."
            )
    slices = num_slices(schedule)
    peaks = (_peak(program, stage_bytes, weight_bytes) for program in schedule.programs)
    return tuple(-(-peak // slices) for peak in peaks)


def _peak(program: Sequence[ScheduleStep], stored: Sequence[int], kept: Sequence[int]) -> int:
    """Returns the most that is alive on a rank; of `stored` only `kept` is between I and W."""
    now = most = 0
    for step in program:
        for action in actions_of(step):
            if action.op is Op.F:
                now += stored[action.stage]
            elif action.op is Op.B:
                now -= stored[action.stage]
            elif action.op is Op.I:
                now -= stored[action.stage] - kept[action.stage]
            else:
                now -= kept[action.stage]
            most = max(most, now)
    return most
