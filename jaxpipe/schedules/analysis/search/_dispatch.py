"""List scheduling with an event queue: whenever a rank is free, it chooses its next action.

The choice sees what is ready, what is on its way, and the memory of the rank. It has a few
parameters, a `Policy`, and the search tries many. Every result is complete, within its caps and
free of deadlock, because an F is only admitted if afterwards the oldest microbatch that is not yet
through all stages of the rank still has room there: then it can always go on, and so can the next.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from .._simulate import Time
from ._problem import F, I, Problem, W, Words


@dataclass(frozen=True)
class Policy:
    """The parameters of a choice.

    Attributes:
        pace: An action is the more urgent the longer its microbatch needs to the end, less `pace`
            times the work of a rank for every microbatch before it. At 1 microbatches follow each
            other as fast as the busiest rank can; less starts more of them before the first ends.
        wait_forward: How long an F may delay a more urgent action that is on its way, as a fraction
            of the time of the F.
        wait_weight: The same of a W.
        reserve: How many microbatches less than it can store a rank may have between F and I, for
            every rank before it. The room that is left is for W's that wait.
        target: The time that is aimed at: a rank that would lose more runs a W in any gap.
    """

    pace: Time
    wait_forward: Time
    wait_weight: Time
    reserve: Time
    target: Time = inf


def dispatch(problem: Problem, policy: Policy) -> tuple[Words, Time]:
    """Returns the words that a policy chooses, and their objective.

    Args:
        problem: A problem whose caps hold one microbatch at least.
        policy: The parameters.

    Returns:
        Words within the caps; and the makespan, or the longest span of a rank.
    """
    run = _Run(problem, policy)
    left = problem.num_actions
    while left:
        now, rank = heappop(run.events)
        if now < run.free[rank]:
            continue  # the rank has chosen since
        chosen = run.choose(rank, now)
        if chosen is not None:
            run.start(rank, now, chosen)
            left -= 1
    starts = [0] * problem.num_ranks if problem.synchronous else run.begun
    return run.words, max(end - start for start, end in zip(starts, run.free, strict=True))


class _Run:
    """The state of a run, with one count per stage and operation."""

    def __init__(self, problem: Problem, policy: Policy):
        self.problem, self.policy = problem, policy
        S, m, p = problem.num_stages, problem.num_microbatches, problem.num_ranks
        self.urgency = _urgency(problem, policy.pace)
        self.limits = _limits(problem, policy.reserve)
        self.events: list[tuple[Time, int]] = [(0, rank) for rank in range(p)]
        self.free: list[Time] = [0] * p
        self.begun: list[Time] = [0] * p
        self.slack = [policy.target - work for work in problem.work]
        self.used: list[Time] = [0] * p  # from F to W
        self.flying: list[Time] = [0] * p  # from F to I
        self.counts = [0] * (3 * S)
        self.arrivals: list[list[Time]] = [[] for _ in range(2 * S)]
        self.arrivals[0] = [0] * m
        self.words: Words = [[] for _ in range(p)]

    def choose(self, rank: int, now: Time) -> int | None:
        """Returns the code of what a rank starts now; None, and an event, if it waits."""
        best, best_key, blocked_key = -1, inf, inf
        coming: list[tuple[Time, float]] = []
        counts, arrivals, S = self.counts, self.arrivals, self.problem.num_stages
        for stage in self.problem.stages[rank]:
            for code in (stage + S, stage):
                count = counts[code]
                if count == len(arrivals[code]):
                    continue
                key, arrival = self.urgency[code] + count * self.urgency[-1], arrivals[code][count]
                if code < S and not self._is_safe(rank, stage):
                    continue
                if code < S and arrival <= now and not self._has_room(rank, stage):
                    blocked_key = min(blocked_key, key)
                    continue
                if arrival > now:
                    coming.append((arrival, key))
                elif key < best_key:
                    best, best_key = code, key
        weight = self._oldest_weight(rank)
        if weight >= 0 and blocked_key < best_key:
            return weight
        if best >= S or (best >= 0 and not self._delays(best, best_key, now, coming)):
            return best
        if weight >= 0 and self._fits(rank, weight, now, coming):
            return weight
        if coming:
            heappush(self.events, (min(coming)[0], rank))
        return None

    def _has_room(self, rank: int, stage: int) -> bool:
        return self.used[rank] + self.problem.stored[stage] <= self.problem.caps[rank]

    def _is_safe(self, rank: int, stage: int) -> bool:
        """Returns whether an F leaves room for the oldest microbatch that lacks F's on the rank."""
        stored, limit = self.problem.stored, self.limits[rank]
        if self.flying[rank] + stored[stage] > limit:
            return False
        stages = self.problem.stages[rank]
        if len(stages) == 1:
            return True
        self.counts[stage] += 1
        first = min([self.counts[s] for s in stages])
        held: Time = 0
        for s in stages:
            if self.counts[s] > first:
                held += stored[s] * (self.counts[s] - first - 1)
        self.counts[stage] -= 1
        return held + self.problem.footprint[rank] <= limit

    def _delays(self, best: int, key: float, now: Time, coming: list[tuple[Time, float]]) -> bool:
        """Returns whether an F would delay something more urgent for too long."""
        length = self.problem.times[F][best]
        most = now + (1 - self.policy.wait_forward) * length
        return any(other < key and arrival < most for arrival, other in coming)

    def _oldest_weight(self, rank: int) -> int:
        """Returns the code of the most urgent W; -1 if none waits."""
        S, counts, urgency = self.problem.num_stages, self.counts, self.urgency
        weight, oldest = -1, inf
        for stage in self.problem.stages[rank]:
            count = counts[2 * S + stage]
            if count < counts[S + stage]:
                key = urgency[S + stage] + count * urgency[-1]
                if key < oldest:
                    weight, oldest = 2 * S + stage, key
        return weight

    def _fits(self, rank: int, weight: int, now: Time, coming: list[tuple[Time, float]]) -> bool:
        """Returns whether a W ends early enough, or waiting would lose more than the slack."""
        length = self.problem.times[W][weight - 2 * self.problem.num_stages]
        soonest = min(coming)[0] if coming else inf
        early = now + (1 - self.policy.wait_weight) * length <= soonest
        return early or soonest - now > self.slack[rank]

    def start(self, rank: int, now: Time, code: int) -> None:
        """Runs an action: counts it, stores or frees its bytes and sends its result."""
        problem, S = self.problem, self.problem.num_stages
        op, stage = divmod(code, S)
        if self.words[rank] or problem.synchronous:
            self.slack[rank] -= now - self.free[rank]
        if not self.words[rank]:
            self.begun[rank] = now
        end = now + problem.times[op][stage]
        self.words[rank].append(code)
        self.counts[code] += 1
        self.free[rank] = end
        heappush(self.events, (end, rank))
        if op == W:
            self.used[rank] -= problem.kept[stage]
            return
        if op == F:
            self.used[rank] += problem.stored[stage]
            self.flying[rank] += problem.stored[stage]
            following = code + 1 if stage + 1 < S else S + stage
            hop = problem.hops[stage] if stage + 1 < S else 0
        else:
            self.used[rank] -= problem.stored[stage] - problem.kept[stage]
            self.flying[rank] -= problem.stored[stage]
            if not stage:
                return
            following, hop = code - 1, problem.hops[stage - 1]
        self.arrivals[following].append(end + hop)
        other = problem.rank_of[following % S]
        if other != rank and self.free[other] <= now:
            heappush(self.events, (now, other))  # it may be idle, and now knows more


def _urgency(problem: Problem, pace: Time) -> list[float]:
    """Returns [2 S + 1] the keys of microbatch 0's F's and I's, and what each later one adds."""
    stages = range(problem.num_stages)
    to_end = [problem.times[I][s] + problem.up[s] for s in stages]
    forwards = [-float(problem.round_trip(s, s) + to_end[s]) for s in stages]
    step = pace * max(problem.work) / problem.num_microbatches
    return [*forwards, *(-float(time) for time in to_end), float(step)]


def _limits(problem: Problem, reserve: Time) -> list[Time]:
    """Returns [num_ranks] the most bytes between F and I, at least one microbatch."""
    return [
        max(size, cap - reserve * rank * size)
        for rank, (size, cap) in enumerate(zip(problem.footprint, problem.caps, strict=True))
    ]
