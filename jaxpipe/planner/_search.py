"""Searches the candidates for the fastest plans that fit.

Thousands of candidates are compared by closed forms. The best of them are set up as the trainer
would, which is where a plan is refused, and compared by the tables and ticks of their schedules;
so are the neighbours of the best of these. Of plans that are nearly as fast the simplest is first.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from ..engines import PeakMemory
from ._candidates import LayoutGroup, StepLayout, layout_groups, neighbours
from ._devices import absent_devices
from ._model import OFFLOAD_INPUTS
from ._request import Request, Values
from .memory import peak_memory, step_counts
from .time import PredictedTime, least_seconds, rough_seconds, step_time

_FINALISTS = 24
"""Candidates that are set up."""

_LEAST_FINALISTS = 6
_MOST_ACTIONS = 60_000
"""Forwards of all finalists, of every stage and microbatch, after which six of them are enough, and
no neighbours are set up."""

_PER_MESH = 3
"""Finalists with the same mesh and engine."""

_IMPROVED = 3
"""Pipelines among the finalists whose neighbours are set up too; other layouts have none."""

CLOSE = 0.05
"""The share of a step within which predictions do not tell which of two layouts is faster: of
published pairs that are predicted closer, half are in the right order (docs/predictions.md)."""

_Index = tuple[int, int]
"""The indices of a group and of a policy in it."""


@dataclass(frozen=True)
class Plan:
    """A layout of a training step, with its predicted time and memory.

    Attributes:
        candidate: The layout of the step.
        settings: The keys of a run with this layout.
        memory: Bytes on a device at the peak, by kind.
        time: The time of a step.
    """

    candidate: StepLayout
    settings: Values
    memory: PeakMemory
    time: PredictedTime


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that was set up because it seemed fast, and cannot run.

    Attributes:
        candidate: The layout of the step.
        seconds: The time of a step by closed forms.
        error: The error of the trainer, or of `jaxpipe.pipeline`.
    """

    candidate: StepLayout
    seconds: float
    error: str


@dataclass(frozen=True)
class BestPlans:
    """What a search has found.

    Attributes:
        plans: The plans that fit: `simplest_first`.
        num_candidates: How many candidates were compared.
        leanest: The candidate that needs least memory, and its memory, if no plan fits.
        beyond: The least seconds of candidates that need too much memory, and their memory; None
            if all fit.
        refused: The finalists that were refused, in the order in which they were tried.
        plain: The fastest plan without a pipeline that divides no products; None if none fits.
        leanest_plain: The one of these that needs least memory, and its memory, if none fits.
    """

    plans: tuple[Plan, ...]
    num_candidates: int
    leanest: tuple[StepLayout, PeakMemory] | None
    beyond: tuple[float, PeakMemory] | None
    refused: tuple[RefusedLayout, ...]
    plain: Plan | None
    leanest_plain: tuple[StepLayout, PeakMemory] | None


def search(request: Request, num_plans: int) -> BestPlans:
    """Returns the fastest plans, the simplest of those that are nearly as fast first."""
    every = Candidates(layout_groups(request.space), request)
    plains = Candidates((group for group in every.groups if is_plain(group.first)), request)
    finals = _Finals(request)
    finals.add_best(plains.by_seconds(fit=True), _PER_MESH)
    finals.add_best(every.by_seconds(fit=True), max(num_plans, _FINALISTS))
    pipelines = [plan for plan in finals.plans if plan.candidate.engine.pipelines]
    for plan in sorted(pipelines, key=_speed)[:_IMPROVED]:
        for candidate in neighbours(plan.candidate, request.space):
            if not finals.are_many:
                finals.add(candidate)
    plans = sorted(finals.plans, key=_speed)
    plain = next((plan for plan in plans if is_plain(plan.candidate)), None)
    too_large = min(finals.too_large, key=lambda pair: pair[1].total, default=None)
    return BestPlans(
        plans=simplest_first(_unlike(plans), num_plans),
        num_candidates=len(every),
        leanest=None if plans else too_large or every.leanest(),
        beyond=every.beyond(),
        refused=tuple(finals.refused),
        plain=plain,
        leanest_plain=None if plain else plains.leanest(),
    )


class Candidates:
    """Candidates, of which seconds and memory are computed when they are asked for."""

    def __init__(self, groups: Iterable[LayoutGroup], request: Request):
        self.groups = tuple(groups)
        self._request = request
        self._least = {
            (i, j): seconds
            for i, group in enumerate(self.groups)
            for j, seconds in enumerate(least_seconds(group, request))
        }
        self._order = sorted(self._least, key=self._least.__getitem__)
        self._memory: dict[_Index, PeakMemory] = {}

    def __len__(self) -> int:
        """Returns the number of candidates."""
        return len(self._least)

    def by_seconds(self, *, fit: bool) -> Iterator[StepLayout]:
        """Yields those that fit in memory, or do not, by their `rough_seconds`, the least first.

        Of those that fit it leaves out what the trainer refuses for its scores of attention. Each
        waits in a heap until no candidate is left whose `least_seconds` are fewer than its seconds.
        """
        request = self._request
        heap: list[tuple[float, _Index]] = []
        for index in self._order:
            while heap and heap[0][0] < self._least[index]:
                yield self._layout(heappop(heap)[1])
            layout = self._layout(index)
            if (self._needed(index).total <= request.limit) == fit and not (
                fit and request.stores_many_scores(layout)
            ):
                heappush(heap, (rough_seconds(layout, request), index))
        yield from (self._layout(index) for _, index in sorted(heap))

    def leanest(self) -> tuple[StepLayout, PeakMemory] | None:
        """Returns the candidate that needs least memory; None if there is none."""
        pairs = ((self._layout(index), self._needed(index)) for index in self._least)
        return min(pairs, key=lambda pair: pair[1].total, default=None)

    def beyond(self) -> tuple[float, PeakMemory] | None:
        """Returns the least seconds of candidates that do not fit; None if all do."""
        first = next(self.by_seconds(fit=False), None)
        if first is None:
            return None
        return rough_seconds(first, self._request), expected_memory(first, self._request)

    def _layout(self, index: _Index) -> StepLayout:
        group, policy = index
        return self.groups[group].layout(policy)

    def _needed(self, index: _Index) -> PeakMemory:
        if index not in self._memory:
            self._memory[index] = expected_memory(self._layout(index), self._request)
        return self._memory[index]


def expected_memory(candidate: StepLayout, request: Request) -> PeakMemory:
    """Returns the memory of a layout by closed forms, before it is set up."""
    counts = step_counts(candidate)
    buffers = candidate.engine.expected_buffers(candidate.schedule or None, counts)
    return peak_memory(request.model, candidate, request.tokens(candidate), (buffers,))


def is_plain(candidate: StepLayout) -> bool:
    """Returns whether a layout is data parallel: without a pipeline or divided products."""
    divided = (candidate.sizes[axis] for axis in ("tensor", "expert", "context"))
    return not candidate.engine.pipelines and all(size == 1 for size in divided)


def _simplicity(candidate: StepLayout) -> tuple[int, int]:
    """Returns the difficulty of a layout: of its pipeline, and of what it divides and moves."""
    engine = candidate.engine
    pipelines = engine.pipelines + (engine.pipelines and engine.program_per_rank)
    offloads = candidate.policy == OFFLOAD_INPUTS
    return int(pipelines), offloads + sum(size > 1 for size in candidate.mesh)


def _speed(plan: Plan) -> tuple[float, float]:
    return plan.time.seconds, plan.memory.total


def simplest_first(plans: list[Plan], most: int) -> tuple[Plan, ...]:
    """Returns the fastest plans, with the simplest of those in front that are nearly as fast.

    Args:
        plans: Plans by their time, the fastest first.
        most: How many to return at most.

    Returns:
        The simplest of the plans within `CLOSE` of the fastest, and then the others by their time.
    """
    if not plans:
        return ()
    close = [p for p in plans if p.time.seconds <= (1 + CLOSE) * plans[0].time.seconds]
    first = min(close, key=lambda plan: (_simplicity(plan.candidate), *_speed(plan)))
    return (first, *(plan for plan in plans if plan is not first))[:most]


class _Finals:
    """Candidates that are set up: their plans, those too large, and those that are refused."""

    def __init__(self, request: Request):
        self.plans: list[Plan] = []
        self.refused: list[RefusedLayout] = []
        self.too_large: list[tuple[StepLayout, PeakMemory]] = []
        self._request = request
        self._devices = absent_devices(request.devices)
        self._actions = 0
        self._seen: set[StepLayout] = set()

    @property
    def are_many(self) -> bool:
        """Returns whether the schedules of these candidates have as many actions as are enough."""
        return self._actions > _MOST_ACTIONS

    def add_best(self, ordered: Iterable[StepLayout], most: int) -> None:
        """Sets up the first candidates, but not several that differ little."""
        alike = Counter(_likeness(plan.candidate) for plan in self.plans)
        tried: Counter[object] = Counter()
        for candidate in ordered:
            enough = self.are_many and len(self.plans) >= _LEAST_FINALISTS
            failed = len(self.refused) + len(self.too_large)
            if enough or len(self.plans) >= most or failed >= 4 * most:
                break
            likeness = _likeness(candidate)
            # Refused layouts leave others of their likeness room, but not all of the search's.
            if alike[likeness] < _PER_MESH and tried[likeness] < 8 * _PER_MESH:
                tried[likeness] += 1
                alike[likeness] += self.add(candidate)

    def add(self, candidate: StepLayout) -> bool:
        """Sets up a candidate, and returns whether it is a plan."""
        request = self._request
        if candidate in self._seen:
            return False
        self._seen.add(candidate)
        self._actions += candidate.num_ranks * candidate.chunks * candidate.microbatches
        try:
            run = request.source.prepare(candidate, self._devices)
        except ValueError as error:
            seconds = rough_seconds(candidate, request)
            self.refused.append(RefusedLayout(candidate, seconds, str(error)))
            return False
        tokens = request.tokens(candidate)
        buffers = run.engine.buffers(run.pipeline)
        needed = peak_memory(request.model, candidate, tokens, buffers)
        if needed.total > request.limit:
            self.too_large.append((candidate, needed))
            return False
        time = step_time(candidate, request, run)
        settings = request.source.settings(candidate)
        self.plans.append(Plan(candidate, settings, needed, time))
        return True


def _unlike(plans: list[Plan]) -> list[Plan]:
    """Returns plans, of those with the same mesh, engine and schedule the fastest."""
    best: dict[object, Plan] = {}
    for plan in plans:
        best.setdefault(_likeness(plan.candidate), plan)
    return list(best.values())


def _likeness(candidate: StepLayout) -> object:
    offloads = candidate.policy == OFFLOAD_INPUTS
    return candidate.mesh, candidate.across, candidate.engine_name, candidate.schedule, offloads
