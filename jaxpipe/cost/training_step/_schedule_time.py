"""The schedule of a layout, and its time from the seconds of its stages."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from ...schedules import FAMILIES, Costs, Schedule, build, makespan, simulate
from ...schedules.analysis import busy_times
from ...schedules.language import actions_of, num_slices
from ._layout import Layout

_LEAST = 1e-9  # seconds of an action that a schedule can have
_ROUNDS = 3  # microbatches of a simulation, in multiples of the ranks


@dataclass(frozen=True)
class ScheduleTime:
    """The time of all microbatches."""

    seconds: float  # from the first action to the last
    busy: tuple[float, ...]  # [ranks] seconds that every rank works


def build_schedule(layout: Layout) -> Schedule | None:
    """Returns the schedule of a layout."""
    if isinstance(layout.schedule, Schedule):
        return layout.schedule
    if layout.schedule is None or layout.stage == 1:
        return None
    takes = FAMILIES[layout.schedule].takes if layout.schedule in FAMILIES else ()
    chunks = layout.chunks if "chunks" in takes else None
    return _build(layout.schedule, layout.stage, layout.microbatches, chunks)


@lru_cache(maxsize=64)
def _build(name: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    return build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)


def shorter(layout: Layout) -> tuple[Layout, Layout] | None:
    """Returns two layouts that differ by `stage` microbatches; None if the layout has few."""
    # The time of more follows from theirs: between the warmup and the drain a schedule repeats
    # itself every `stage` microbatches.
    more = _ROUNDS * layout.stage + layout.microbatches % layout.stage
    if layout.schedule is None or layout.stage == 1 or layout.microbatches <= more:
        return None
    few = replace(layout, microbatches=more - layout.stage)
    return few, replace(layout, microbatches=more)


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of the stages for one microbatch."""

    forward: tuple[float, ...]  # [stages, in forward order] seconds of F
    input: tuple[float, ...]  # [stages] seconds of I
    weight: tuple[float, ...]  # [stages] seconds of W
    # Seconds from the end of an action to the start of a dependent one on another rank.
    transfer: float

    def costs(self, schedule: Schedule | None) -> Costs:
        """Returns the costs of actions, each of them of an equal share of the slices, if any."""
        n = 1 if schedule is None else num_slices(schedule)
        rows = self.forward, self.input, self.weight
        forward, of_input, of_weight = (
            tuple(max(x / n, _LEAST) if x else 0.0 for x in row) for row in rows
        )
        return Costs(forward, of_input, of_weight, self.transfer / n)

    def of(
        self, schedule: Schedule | None, num_microbatches: int, *, barrier: bool = True
    ) -> ScheduleTime:
        """Returns the time of a schedule.

        Without `barrier` between steps, a step takes the longest time from a rank's first to its
        last action, as in zero-bubble papers.
        """
        if schedule is None:
            each = sum((*self.forward, *self.input, *self.weight))
            return ScheduleTime(num_microbatches * each, (num_microbatches * each,))
        timeline = simulate(schedule, self.costs(schedule))
        seconds = makespan(timeline)
        if not barrier:
            seconds = max(row[-1].end - row[0].start for row in timeline.rows if row)
        return ScheduleTime(float(seconds), tuple(map(float, busy_times(timeline))))


def extrapolate(
    first: ScheduleTime, second: ScheduleTime, counted: tuple[Layout, Layout], layout: Layout
) -> ScheduleTime:
    """Returns the time of a layout's microbatches from those of two shorter ones."""
    few, more = (count.microbatches for count in counted)
    rounds = (layout.microbatches - more) / (more - few)

    def beyond(a: float, b: float) -> float:
        return b + rounds * (b - a)

    pairs = zip(first.busy, second.busy, strict=True)
    return ScheduleTime(
        beyond(first.seconds, second.seconds), tuple(beyond(a, b) for a, b in pairs)
    )


def stage_shares(schedule: Schedule | None, rank: int) -> dict[int, float]:
    """Returns the stages of a rank, and the share of each's microbatches that it runs."""
    if schedule is None:
        return {0: 1.0}
    ranks = _ranks_by_stage(schedule)
    own = Counter(stage for (stage, _), owner in ranks.items() if owner == rank)
    every = Counter(stage for stage, _ in ranks)
    return {stage: own[stage] / every[stage] for stage in sorted(own)}


def num_transfers(schedule: Schedule) -> tuple[int, ...]:
    """Returns the hand-overs that an F, or an I, of every stage receives and sends: 0 to 2."""
    # A device that neither computes beside a transfer nor buffers it waits for each of them. None
    # are between stages of the same rank.
    ranks, last = _ranks_by_stage(schedule), schedule.num_stages - 1
    crossing = {s for (s, m), rank in ranks.items() if s < last and ranks[s + 1, m] != rank}
    crossed = [stage in crossing for stage in range(last)]
    return tuple(before + after for before, after in pairwise([False, *crossed, False]))


def _ranks_by_stage(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Returns the rank of every (stage, microbatch)."""
    return {
        (action.stage, action.microbatch): rank
        for rank, program in enumerate(schedule.programs)
        for step in program
        for action in actions_of(step)
    }
