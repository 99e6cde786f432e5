"""What every rank does, in order: programs on named buffers, and what ranks send each other.

All instructions of all ranks stand in one order in which they could run; what a rank does is the
instructions that name it. A receive stands behind its send, so ranks that follow the order never
wait for each other in a circle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...ir import Graph, Var
from ...schedules import Action


class Buffer(NamedTuple):
    """An array on a rank: a value, for one microbatch or version, or of the whole step."""

    value: Var
    number: int | None = None


@dataclass(frozen=True)
class Run:
    """A program: `(reads) -> writes`.

    Attributes:
        actions: What it does of its schedule, if it is part of a loop.
        donated: Places of the reads whose memory may become that of writes.
    """

    rank: int
    name: str
    program: Graph
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    actions: tuple[Action, ...] = ()
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Send:
    """Copies of buffers leave for another rank, named after what made them."""

    rank: int
    to: int
    buffers: tuple[Buffer, ...]
    name: str


@dataclass(frozen=True)
class Receive:
    """The other end of a send."""

    rank: int
    source: int
    buffers: tuple[Buffer, ...]
    name: str


@dataclass(frozen=True)
class Free:
    """Buffers that a rank is done with."""

    rank: int
    buffers: tuple[Buffer, ...]


Instruction = Run | Send | Receive | Free


@dataclass(frozen=True)
class Code:
    """A step of all ranks.

    Attributes:
        num_ranks: How many take part.
        inputs: The ranks that each argument of the function must be on; none if nobody needs it.
        outputs: What each result of the function is, and the ranks it is on.
        indices: Buffers that hold a number of a microbatch.
        instructions: In an order in which they could run.
    """

    num_ranks: int
    inputs: tuple[tuple[Buffer, tuple[int, ...]], ...]
    outputs: tuple[tuple[Buffer, tuple[int, ...]], ...]
    indices: Mapping[Buffer, int] = field(default_factory=dict)
    instructions: tuple[Instruction, ...] = ()

    def __str__(self) -> str:
        return _text(self)


def check(code: Code) -> None:
    """Checks that ranks only read what they have, and that sends and receives meet in order.

    Raises:
        AssertionError: Naming the instruction.
    """
    has: list[set[Buffer]] = [set() for _ in range(code.num_ranks)]
    for buffer, ranks in code.inputs:
        for rank in ranks:
            has[rank].add(buffer)
    for of_rank in has:
        of_rank.update(code.indices)
    sent: dict[tuple[int, int], list[Send]] = {}
    for instruction in code.instructions:
        mine = has[instruction.rank]
        match instruction:
            case Run(reads=reads, writes=writes):
                missing = [buffer for buffer in reads if buffer not in mine]
                assert not missing, f"{instruction.name} reads {missing}, which are not there"
                mine.difference_update(instruction.reads[i] for i in instruction.donated)
                assert mine.isdisjoint(writes), f"{instruction.name} writes what is there"
                mine.update(writes)
            case Send(rank, to, buffers):
                assert mine.issuperset(buffers), f"{instruction} sends what is not there"
                sent.setdefault((rank, to), []).append(instruction)
            case Receive(rank, source, buffers):
                assert sent.get((source, rank)), f"{instruction} waits for what nobody sends"
                first = sent[source, rank].pop(0)
                assert first.buffers == buffers, f"{instruction} meets {first}"
                assert mine.isdisjoint(buffers), f"{instruction} receives what is there"
                mine.update(buffers)
            case Free(buffers=buffers):
                assert mine.issuperset(buffers), f"{instruction} frees what is not there"
                mine.difference_update(buffers)
    assert not any(sent.values()), f"nobody receives {sent}"
    for buffer, ranks in code.outputs:
        assert all(buffer in has[rank] for rank in ranks), f"{buffer} is not where it is returned"


def of_rank(code: Code, rank: int) -> tuple[Instruction, ...]:
    """What one rank does, in order."""
    return tuple(i for i in code.instructions if i.rank == rank)


def _text(code: Code) -> str:
    """All instructions, in an order in which they could run.

    A buffer is a letter and a number, with `:m` for a microbatch or a version of a sum.
    """
    names: dict[Var, str] = {}

    def name(buffer: Buffer) -> str:
        short = names.setdefault(buffer.value, f"v{len(names)}")
        return short if buffer.number is None else f"{short}:{buffer.number}"

    def typed(buffer: Buffer) -> str:
        return f"{name(buffer)}:{buffer.value.aval.str_short(short_dtypes=True)}"

    inputs = " ".join(f"{typed(b)}@{_ranks(ranks)}" for b, ranks in code.inputs)
    outputs = " ".join(f"{name(b)}@{_ranks(ranks)}" for b, ranks in code.outputs)
    lines = [line for i in code.instructions for line in _lines(i, name, typed)]
    return "\n".join([f"{{ lambda {inputs} . let", *lines, f"  in {outputs} }}"])


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) or "-"


def _lines(instruction: Instruction, name, typed) -> list[str]:
    rank = instruction.rank
    match instruction:
        case Run(_, label, program, reads, writes, actions, donated):
            info = ", ".join(f"({a.stage}, {a.op.name}, {a.microbatch})" for a in actions)
            return [
                f"    {' '.join(map(typed, writes))} = task[",
                *([f"      task_info={info}"] if info else []),
                f"      mpmd_idx={rank}",
                f"      donate_invars={tuple(i in donated for i in range(len(reads)))}",
                f"      num_steps={len(program.steps)}",
                f"      task_name={label}",
                f"    ] {' '.join(map(name, reads))}",
            ]
        case Send(_, to, buffers):
            return [f"    send[mpmd_idx={rank} tgt_mpmd_idx={to}] {' '.join(map(name, buffers))}"]
        case Receive(_, source, buffers):
            given = " ".join(map(name, buffers))
            return [f"    {given} = receive[mpmd_idx={rank} src_mpmd_idx={source}]"]
        case Free(_, buffers):
            return [f"    _ = delete[mpmd_idx={rank}] {' '.join(map(name, buffers))}"]
