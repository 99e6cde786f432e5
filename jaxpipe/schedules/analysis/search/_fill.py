"""Puts W's into an order of F's and I's: into gaps, or where their memory is needed.

The order of F and I on every rank is kept to the letter. Before each of them, W's run that fit into
the time until its input arrives. One more runs if the gap that is left would cost the rank more
time than a target allows it to lose: such a W delays what follows, but an idle rank is lost as
well. Before an F, W's run until there is room for it. The others come last.

The rule about gaps is that of the zero-bubble project's own scheduler (Qi et al., 2023, arXiv
2401.10241, section 3.1), which compares with the rank that has waited most; here it is a parameter.
"""

from .._simulate import Time
from ._problem import F, I, Problem, W, Words


def fill_weights(problem: Problem, orders: Words, target: Time) -> tuple[Words, Time] | None:
    """Returns the words of orders of F's and I's with W's put in, and their objective.

    None if that is impossible. `target` is the time that is aimed at: a rank may lose what it has
    beyond its work.
    """
    run = _WeightFilling(problem, orders, target)
    return run.result() if run.is_complete() else None


class _WeightFilling:
    """Runs all ranks until each has ended or waits for what never comes."""

    def __init__(self, problem: Problem, orders: Words, target: Time):
        self.problem, self.orders = problem, orders
        p, S = problem.num_ranks, problem.num_stages
        self.arrivals: list[list[Time]] = [[] for _ in range(2 * S)]
        self.arrivals[0] = [0] * problem.num_microbatches
        self.counts = [0] * (2 * S)
        self.positions = [0] * p
        self.now: list[Time] = [0] * p
        self.used: list[Time] = [0] * p
        self.slack = [target - work for work in problem.work]
        self.waiting: list[list[int]] = [[] for _ in range(p)]  # stages whose W waits, and those
        self.done = [0] * p  # that ran: the first so many
        self.words: Words = [[] for _ in range(p)]
        self.begun: list[Time] = [0] * p

    def is_complete(self) -> bool:
        """Runs, and returns whether every rank has reached its end."""
        todo, queued = list(range(self.problem.num_ranks))[::-1], [True] * self.problem.num_ranks
        while todo:
            rank = todo.pop()
            queued[rank] = False
            for other in self._advance(rank):
                if not queued[other]:
                    queued[other] = True
                    todo.append(other)
        ranks = range(self.problem.num_ranks)
        return all(self.positions[rank] == len(self.orders[rank]) for rank in ranks)

    def _advance(self, rank: int) -> set[int]:
        """Runs a rank as far as it can, and returns the ranks that it has sent something."""
        problem, order = self.problem, self.orders[rank]
        S, cap, stored = problem.num_stages, problem.caps[rank], problem.stored
        (f, i, _), hops, homes = problem.times, problem.hops, problem.rank_of
        counts, arrivals = self.counts, self.arrivals
        word = self.words[rank]
        sent: set[int] = set()
        while self.positions[rank] < len(order):
            code = order[self.positions[rank]]
            count = counts[code]
            if count >= len(arrivals[code]):
                break
            arrival = arrivals[code][count]
            if arrival > self.now[rank]:
                self._fill_gap(rank, arrival)
            if code < S and self.used[rank] + stored[code] > cap:
                self._make_room(rank, cap - stored[code])
                if self.used[rank] + stored[code] > cap:
                    break
            now = self.now[rank]
            if arrival > now:
                if word or problem.synchronous:
                    self.slack[rank] -= arrival - now
                now = arrival
            if not word:
                self.begun[rank] = now
            word.append(code)
            counts[code] = count + 1
            self.positions[rank] += 1
            if code < S:
                now += f[code]
                self.used[rank] += stored[code]
                if code + 1 < S:
                    arrivals[code + 1].append(now + hops[code])
                    sent.add(homes[code + 1])
                else:
                    arrivals[S + code].append(now)
            else:
                stage = code - S
                now += i[stage]
                self.used[rank] -= stored[stage] - problem.kept[stage]
                self.waiting[rank].append(stage)
                if stage:
                    arrivals[code - 1].append(now + hops[stage - 1])
                    sent.add(homes[stage - 1])
            self.now[rank] = now
        sent.discard(rank)
        return sent

    def _fill_gap(self, rank: int, arrival: Time) -> None:
        w, waiting = self.problem.times[W], self.waiting[rank]
        while self.done[rank] < len(waiting):
            length = w[waiting[self.done[rank]]]
            gap = arrival - self.now[rank]
            if length > gap and not (gap > max(0, self.slack[rank]) and self.words[rank]):
                return
            if gap <= 0:
                return
            self._run_weight(rank)

    def _make_room(self, rank: int, most: Time) -> None:
        while self.used[rank] > most and self.done[rank] < len(self.waiting[rank]):
            self._run_weight(rank)

    def _run_weight(self, rank: int) -> None:
        stage = self.waiting[rank][self.done[rank]]
        self.done[rank] += 1
        self.words[rank].append(W * self.problem.num_stages + stage)
        self.now[rank] += self.problem.times[W][stage]
        self.used[rank] -= self.problem.kept[stage]

    def result(self) -> tuple[Words, Time]:
        """Returns the words of a complete run, with the W's that are left at the end."""
        for rank in range(self.problem.num_ranks):
            while self.done[rank] < len(self.waiting[rank]):
                self._run_weight(rank)
        begun = [0] * len(self.now) if self.problem.synchronous else self.begun
        return self.words, max(end - start for start, end in zip(begun, self.now, strict=True))


def forwards_and_inputs(problem: Problem, words: Words) -> Words:
    """Returns words without their W's."""
    end = W * problem.num_stages
    return [[code for code in word if code < end] for word in words]


def run_words(problem: Problem, words: Words) -> Time:
    """Returns the objective of words as they are; they must be complete and free of deadlock."""
    S, p = problem.num_stages, problem.num_ranks
    durations = [time for times in problem.times for time in times]
    arrivals: list[list[Time]] = [[] for _ in range(3 * S)]
    arrivals[0] = [0] * problem.num_microbatches
    counts, positions = [0] * (3 * S), [0] * p
    now: list[Time] = [0] * p
    begun: list[Time | None] = [None] * p
    todo = list(range(p))[::-1]
    while todo:
        rank = todo.pop()
        word, position, time = words[rank], positions[rank], now[rank]
        while position < len(word):
            code = word[position]
            count = counts[code]
            if count >= len(arrivals[code]):
                break
            time = max(time, arrivals[code][count])
            if begun[rank] is None:
                begun[rank] = time
            time += durations[code]
            counts[code] = count + 1
            position += 1
            for following, hop in _followers(problem, code):
                arrivals[following].append(time + hop)
                other = problem.rank_of[following % S]
                if other != rank:
                    todo.append(other)
        positions[rank], now[rank] = position, time
    assert positions == [len(word) for word in words], "the words do not deadlock"
    return max(
        end if problem.synchronous else end - (start or 0)
        for start, end in zip(begun, now, strict=True)
    )


def _followers(problem: Problem, code: int) -> list[tuple[int, Time]]:
    """Returns the codes that wait for a letter, with the time of the transfer to each."""
    S = problem.num_stages
    op, stage = divmod(code, S)
    if op == F:
        return [(code + 1, problem.hops[stage])] if stage + 1 < S else [(S + stage, 0)]
    if op == I:
        before = [(code - 1, problem.hops[stage - 1])] if stage else []
        return [*before, (code + S, 0)]
    return []
