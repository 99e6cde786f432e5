"""The schedule of a layout, and its time from the seconds of its stages."""

from dataclasses import dataclass

from ...schedules import FAMILIES, Costs, Schedule, build, makespan, simulate
from ...schedules.analysis import busy_times
from ._layout import Layout


@dataclass(frozen=True)
class ScheduleTime:
    """The time of all microbatches.

    Attributes:
        seconds: From the first action to the last.
        busy: [ranks] seconds that every rank works.
    """

    seconds: float
    busy: tuple[float, ...]


def build_schedule(layout: Layout) -> Schedule | None:
    """Returns the schedule of a layout.

    Args:
        layout: The layout.

    Returns:
        The schedule; None without a pipeline.

    Raises:
        ValueError: If no schedule has the layout's name, or it cannot run the layout's counts.
    """
    if isinstance(layout.schedule, Schedule):
        return layout.schedule
    if layout.schedule is None or layout.stage == 1:
        return None
    takes = FAMILIES[layout.schedule].takes if layout.schedule in FAMILIES else ()
    chunks = layout.chunks if "chunks" in takes else None
    return build(
        layout.schedule, ranks=layout.stage, microbatches=layout.microbatches, chunks=chunks
    )


def schedule_seconds(
    schedule: Schedule | None,
    num_microbatches: int,
    forward: tuple[float, ...],
    input: tuple[float, ...],
    weight: tuple[float, ...],
    transfer: float,
) -> ScheduleTime:
    """Returns the time of a schedule.

    Args:
        schedule: The schedule; None to run the microbatches one after the other.
        num_microbatches: Microbatches, without a schedule.
        forward: [stages] seconds of F.
        input: [stages] seconds of I.
        weight: [stages] seconds of W.
        transfer: Seconds of a hand-over.

    Returns:
        Its time.
    """
    if schedule is None:
        seconds = num_microbatches * sum((*forward, *input, *weight))
        return ScheduleTime(seconds, (seconds,))
    timeline = simulate(schedule, Costs(forward, input, weight, transfer))
    return ScheduleTime(float(makespan(timeline)), tuple(map(float, busy_times(timeline))))
