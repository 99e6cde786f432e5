"""List scheduling with an event queue: whenever a rank is free, it chooses its next action.

The choice sees what is ready, what is on its way, and the memory of the rank. Its rules have a few
parameters, and the search tries many. Every result is complete, within its caps and free of
deadlock, because an F is only admitted if afterwards the oldest microbatch that is not yet through
all stages of the rank still has room there: then it can always go on, and so can the next.
"""

from collections import deque
from heapq import heappop, heappush
from math import inf

from .._simulate import Time
from ._bounds import lower_bound
from ._problem import F, Problem, W, Words
from ._rules import Rules


def dispatch(problem: Problem, rules: Rules) -> tuple[Words, Time]:
    """Returns the words that rules choose, and their objective with the waits so chosen."""
    run = _ListScheduler(problem, rules)
    left = problem.num_actions
    while left:
        now, rank = heappop(run.events)
        if now < run.free[rank]:
            continue  # the rank has chosen since
        chosen = run.choose(rank, now)
        if chosen >= 0:
            run.start(rank, now, chosen)
            left -= 1
    starts = [0] * problem.num_ranks if problem.synchronous else run.begun
    return run.words, max(end - start for start, end in zip(starts, run.free, strict=True))


class _ListScheduler:
    """The state of list scheduling, with one entry per letter: its code is the index."""

    def __init__(self, problem: Problem, rules: Rules):
        self.problem, self.rules = problem, rules
        S, m, p = problem.num_stages, problem.num_microbatches, problem.num_ranks
        self.codes = [[c for s in stages for c in (S + s, s)] for stages in problem.stages]
        self.keys = [*rules.urgency, *rules.urgency[S:]]  # of the next microbatch; a W is as its I
        self.arrivals: list[deque[Time]] = [deque() for _ in range(2 * S)]
        self.arrivals[0] = deque([0] * m)
        self.counts = [0] * (3 * S)
        self.events: list[tuple[Time, int]] = [(0, rank) for rank in range(p)]
        self.free: list[Time] = [0] * p
        self.begun: list[Time] = [0] * p
        target = rules.margin * lower_bound(problem) if rules.margin < inf else inf
        self.slack = [target - work for work in problem.work]
        self.used: list[Time] = [0] * p  # from F to W
        self.flying: list[Time] = [0] * p  # from F to I
        self.words: Words = [[] for _ in range(p)]

    def choose(self, rank: int, now: Time) -> int:
        """Returns the code of what a rank starts now; -1, and an event, if it waits."""
        best, best_key, blocked_key, soonest = -1, inf, inf, inf
        coming: list[tuple[Time, float]] = []
        arrivals, keys, S = self.arrivals, self.keys, self.problem.num_stages
        for code in self.codes[rank]:
            if not arrivals[code]:
                continue
            arrival, key = arrivals[code][0], keys[code]
            if arrival <= now:
                if key >= best_key or (code < S and not self._is_safe(rank, code)):
                    continue
                if code < S and not self._has_room(rank, code):
                    blocked_key = min(blocked_key, key)
                else:
                    best, best_key = code, key
            elif code >= S or self._is_safe(rank, code):
                coming.append((arrival, key))
                soonest = min(soonest, arrival)
        if best >= S and best_key <= blocked_key:
            return best
        weight = self._oldest_weight(rank)
        if weight >= 0 and blocked_key < best_key:
            return weight
        if best >= S or (best >= 0 and not self._delays(best, best_key, now, coming)):
            return best
        if weight >= 0 and self._fits(rank, weight, now, soonest):
            return weight
        if coming:
            heappush(self.events, (soonest, rank))
        return -1

    def _has_room(self, rank: int, stage: int) -> bool:
        return self.used[rank] + self.problem.stored[stage] <= self.problem.caps[rank]

    def _is_safe(self, rank: int, stage: int) -> bool:
        """Returns whether an F leaves room for the oldest microbatch that lacks F's on the rank."""
        stored, limit = self.problem.stored, self.rules.limits[rank]
        if self.flying[rank] + stored[stage] > limit:
            return False
        stages, counts = self.problem.stages[rank], self.counts
        if len(stages) == 1:
            return True
        counts[stage] += 1
        first = min([counts[s] for s in stages])
        held: Time = 0
        for s in stages:
            if counts[s] > first:
                held += stored[s] * (counts[s] - first - 1)
        counts[stage] -= 1
        return held + self.problem.footprint[rank] <= limit

    def _delays(self, best: int, key: float, now: Time, coming: list[tuple[Time, float]]) -> bool:
        """Returns whether an F would delay something more urgent for too long."""
        most = now + (1 - self.rules.wait_forward) * self.problem.times[F][best]
        return any(other < key and arrival < most for arrival, other in coming)

    def _oldest_weight(self, rank: int) -> int:
        """Returns the code of the most urgent W; -1 if none waits."""
        S, counts, keys = self.problem.num_stages, self.counts, self.keys
        weight, oldest = -1, inf
        for stage in self.problem.stages[rank]:
            code = 2 * S + stage
            if counts[code] < counts[code - S] and keys[code] < oldest:
                weight, oldest = code, keys[code]
        return weight

    def _fits(self, rank: int, weight: int, now: Time, soonest: Time) -> bool:
        """Returns whether a W ends early enough, or waiting would lose more than the slack."""
        length = self.problem.times[W][weight - 2 * self.problem.num_stages]
        early = now + (1 - self.rules.wait_weight) * length <= soonest
        return early or soonest - now > self.slack[rank]

    def start(self, rank: int, now: Time, code: int) -> None:
        """Runs an action: counts it, stores or frees its bytes and sends its result."""
        problem, S = self.problem, self.problem.num_stages
        op, stage = divmod(code, S)
        word = self.words[rank]
        if word or problem.synchronous:
            self.slack[rank] -= now - self.free[rank]
        if not word:
            self.begun[rank] = now
        word.append(code)
        end = self.free[rank] = now + problem.times[op][stage]
        heappush(self.events, (end, rank))
        self.counts[code] += 1
        self.keys[code] += self.rules.step
        if op == W:
            self.used[rank] -= problem.kept[stage]
            return
        self.arrivals[code].popleft()
        if op == F:
            self.used[rank] += problem.stored[stage]
            self.flying[rank] += problem.stored[stage]
            following, hop = (code + 1, problem.hops[stage]) if stage + 1 < S else (S + stage, 0)
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
