"""The problem that a search solves: stages on ranks, their times, and their bytes.

p ranks, m microbatches, S stages. Microbatches are equal, so the k-th F of a stage may be called
that of microbatch k, and so the k-th I and W; another order of microbatches gains nothing. What a
rank does is therefore a word over the letters F, I and W of its stages: the code of a letter is
`stage` for F, `S + stage` for I and `2 S + stage` for W.
"""

from dataclasses import dataclass
from functools import cached_property

from ...language._action import Action, Op, actions_of
from ...language._schedule import Schedule
from .._simulate import Costs, Time

F, I, W = range(3)  # noqa: E741
OPS = (Op.F, Op.I, Op.W)

Words = list[list[int]]
"""[num_ranks] the codes of every rank's letters, in order."""


@dataclass(frozen=True)
class Problem:
    """Stages on ranks, with the times and the bytes of one microbatch in each.

    Attributes:
        rank_of: [num_stages] The rank of every stage.
        times: [3][num_stages] The times of F, I and W.
        stored: [num_stages] The bytes that an F stores.
        kept: [num_stages] Those of them that only the W frees; the I frees the others.
        caps: [num_ranks] The most bytes that a rank may store.
        synchronous: Whether the objective is the makespan. If not, it is the longest span of a
            rank, from its first start to its last end: steps follow each other without a barrier.
    """

    rank_of: tuple[int, ...]
    num_microbatches: int
    times: tuple[tuple[Time, ...], ...]
    transfer: Time
    stored: tuple[Time, ...]
    kept: tuple[Time, ...]
    caps: tuple[Time, ...]
    synchronous: bool = True

    @cached_property
    def num_stages(self) -> int:
        """Returns the number of stages."""
        return len(self.rank_of)

    @cached_property
    def num_ranks(self) -> int:
        """Returns the number of ranks."""
        return len(self.caps)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """[num_ranks] the stages of every rank, in forward order."""
        return tuple(
            tuple(s for s, home in enumerate(self.rank_of) if home == rank)
            for rank in range(self.num_ranks)
        )

    @cached_property
    def hops(self) -> tuple[Time, ...]:
        """[num_stages - 1] the time of the transfer behind each stage but the last."""
        pairs = zip(self.rank_of, self.rank_of[1:], strict=False)
        return tuple(self.transfer if here != there else 0 for here, there in pairs)

    @cached_property
    def down(self) -> tuple[Time, ...]:
        """[num_stages] the time from the start of a microbatch to its F in each stage."""
        starts: list[Time] = [0]
        for stage, hop in enumerate(self.hops):
            starts.append(starts[-1] + self.times[F][stage] + hop)
        return tuple(starts)

    @cached_property
    def back(self) -> tuple[Time, ...]:
        """[num_stages] the time from the first I of a microbatch to its I in each stage."""
        starts: list[Time] = [0]
        for stage in range(self.num_stages - 1, 0, -1):
            starts.append(starts[-1] + self.times[I][stage] + self.hops[stage - 1])
        return tuple(reversed(starts))

    @cached_property
    def up(self) -> tuple[Time, ...]:
        """[num_stages] the time from the end of a stage's I to the end of stage 0's W behind it."""
        ends: list[Time] = [self.times[W][0]]
        for stage, hop in enumerate(self.hops):
            ends.append(hop + self.times[I][stage] + ends[-1])
        return tuple(ends)

    def round_trip(self, first: int, last: int) -> Time:
        """Returns the time from the start of F in stage `first` to the start of I in `last`."""
        return self.down[-1] + self.times[F][-1] - self.down[first] + self.back[last]

    @cached_property
    def work(self) -> tuple[Time, ...]:
        """[num_ranks] the time that every rank computes."""
        return tuple(
            self.num_microbatches * sum(times[s] for times in self.times for s in stages)
            for stages in self.stages
        )

    @cached_property
    def footprint(self) -> tuple[Time, ...]:
        """[num_ranks] the bytes of one microbatch in all stages of a rank."""
        return tuple(sum(self.stored[s] for s in stages) for stages in self.stages)

    @cached_property
    def num_actions(self) -> int:
        """Returns the number of actions of all ranks."""
        return 3 * self.num_stages * self.num_microbatches


def to_schedule(problem: Problem, words: Words) -> Schedule:
    """Returns the schedule that words stand for."""
    counts = [0] * (3 * problem.num_stages)
    programs = []
    for word in words:
        program = []
        for code in word:
            op, stage = divmod(code, problem.num_stages)
            program.append(Action(stage, OPS[op], counts[code]))
            counts[code] += 1
        programs.append(tuple(program))
    return Schedule(problem.num_stages, problem.num_microbatches, tuple(programs))


def stage_costs(problem: Problem) -> Costs:
    """Returns the costs with which `simulate` has the times of a problem."""
    return Costs(*problem.times, transfer=problem.transfer)


def words_of(schedule: Schedule) -> Words:
    """Returns the words of a schedule, with a B as I and W."""
    first = {op: i * schedule.num_stages for i, op in enumerate(OPS)}
    codes = {op: (code,) for op, code in first.items()} | {Op.B: (first[Op.I], first[Op.W])}
    return [
        [
            code + action.stage
            for step in program
            for action in actions_of(step)
            for code in codes[action.op]
        ]
        for program in schedule.programs
    ]


def peak_bytes(problem: Problem, words: Words) -> list[Time]:
    """Returns [num_ranks] the most bytes that every rank stores."""
    changes = [
        *problem.stored,
        *(kept - stored for kept, stored in zip(problem.kept, problem.stored, strict=True)),
        *(-kept for kept in problem.kept),
    ]
    peaks = []
    for word in words:
        now: Time = 0
        most: Time = 0
        for code in word:
            now += changes[code]
            most = max(most, now)
        peaks.append(most)
    return peaks
