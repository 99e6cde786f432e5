"""Searches the candidates for the fastest plans that fit.

Thousands of candidates are compared by closed forms. The best of them are set up as the trainer
would, which is where a plan is refused, and compared by the tables and ticks of their schedules.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..engines import PeakMemory
from ._candidates import StepLayout, candidates
from ._devices import absent_devices
from ._request import Request, Values
from .memory import peak_memory, step_counts
from .time import PredictedTime, rough_seconds, step_time

_FINALISTS = 24
"""Candidates that are set up."""

_LEAST_FINALISTS = 6
_MOST_ACTIONS = 60_000
"""Forwards of all finalists, of every stage and microbatch, after which six of them are enough."""

_PER_MESH = 3
"""Finalists with the same mesh and engine."""


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
class BestPlans:
    """What a search has found.

    Attributes:
        plans: The plans that fit, the fastest first.
        num_candidates: How many candidates were compared.
        leanest: The candidate that needs least memory, and its memory; None if there is none.
        beyond: The least seconds of candidates that need too much memory, and their memory; None
            if all fit.
        refused: Errors of finalists that the trainer would refuse.
    """

    plans: tuple[Plan, ...]
    num_candidates: int
    leanest: tuple[StepLayout, PeakMemory] | None
    beyond: tuple[float, PeakMemory] | None
    refused: tuple[str, ...]


def search(request: Request, num_plans: int) -> BestPlans:
    """Returns the fastest plans."""
    count, leanest, beyond, fitting = 0, None, None, []
    for candidate in candidates(request.space):
        count += 1
        counts = step_counts(candidate)
        buffers = candidate.engine.expected_buffers(candidate.schedule or None, counts)
        needed = peak_memory(request.model, candidate, request.tokens(candidate), buffers)
        if leanest is None or needed.total < leanest[1].total:
            leanest = candidate, needed
        seconds = rough_seconds(candidate, request)
        if needed.total <= request.limit:
            fitting.append((seconds, needed.total, count, candidate))
        elif beyond is None or seconds < beyond[0]:
            beyond = seconds, needed
    plans, refused = _finals(fitting, request, max(num_plans, _FINALISTS))
    return BestPlans(_unlike(plans, num_plans), count, leanest, beyond, tuple(refused))


def _finals(
    fitting: list[tuple[float, float, int, StepLayout]], request: Request, most: int
) -> tuple[list[Plan], list[str]]:
    """Sets up the best candidates, and returns their plans, the fastest first, and errors."""
    devices = absent_devices(request.devices)
    plans: list[Plan] = []
    refused: list[str] = []
    actions = 0
    for candidate in _diverse(_in_order(fitting)):
        enough = actions > _MOST_ACTIONS and len(plans) >= _LEAST_FINALISTS
        if enough or len(plans) >= most or len(refused) >= 4 * most:
            break
        try:
            run = request.source.prepare(candidate, devices)
        except ValueError as error:
            refused.append(str(error))
            continue
        tokens = request.tokens(candidate)
        needed = max(
            (
                peak_memory(request.model, candidate, tokens, buffers)
                for buffers in run.engine.buffers(run.pipeline)
            ),
            key=lambda peak: peak.total,
        )
        if needed.total <= request.limit:
            actions += candidate.num_ranks * candidate.chunks * candidate.microbatches
            time = step_time(candidate, request, run)
            plans.append(Plan(candidate, request.source.settings(candidate), needed, time))
    return sorted(plans, key=lambda plan: (plan.time.seconds, plan.memory.total)), refused


def _unlike(plans: list[Plan], most: int) -> tuple[Plan, ...]:
    """Returns the fastest plans, of those with the same mesh, engine and schedule the fastest."""
    best: dict[object, Plan] = {}
    for plan in plans:
        best.setdefault(_likeness(plan.candidate), plan)
    return tuple(best.values())[:most]


def _likeness(candidate: StepLayout) -> object:
    return candidate.mesh, candidate.across, candidate.engine_name, candidate.schedule


def _in_order(fitting: list[tuple[float, float, int, StepLayout]]) -> Iterator[StepLayout]:
    heapq.heapify(fitting)
    while fitting:
        yield heapq.heappop(fitting)[-1]


def _diverse(ordered: Iterable[StepLayout]) -> Iterator[StepLayout]:
    """Yields candidates but those that differ little from several before them."""
    seen: dict[object, int] = {}
    for candidate in ordered:
        like = _likeness(candidate)
        seen[like] = seen.get(like, 0) + 1
        if seen[like] <= _PER_MESH:
            yield candidate
