"""Defines the instructions of ranks: tasks on named buffers, sends, receives and deletes.

The instructions of all ranks form one sequence in which they could run. A rank runs the
instructions that name it, in this order. Each receive follows its send in the sequence, so the
ranks cannot deadlock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...ir.graph import Graph, Var
from ...schedules import Action


class Buffer(NamedTuple):
    """An array on a rank: the value of a variable.

    Attributes:
        value: The variable.
        version: The index of a microbatch, or of a state of a sum, if the variable has several
            values in a step; None if it has one.
    """

    value: Var
    version: int | None = None


@dataclass(frozen=True)
class RunTask:
    """Runs a graph on a rank: `(reads) -> writes`.

    Attributes:
        rank: The rank that runs it.
        name: The name of the task, such as `fwd_0__1`.
        graph: The graph.
        reads: The buffers that are its arguments.
        writes: The buffers that are its results.
        actions: The actions of the schedule that it runs; () outside of loops.
        donated: The indices of the reads whose memory the writes may reuse.
    """

    rank: int
    name: str
    graph: Graph
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    actions: tuple[Action, ...] = ()
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Send:
    """Sends copies of buffers from rank `rank` to rank `to`.

    Attributes:
        rank: The rank that sends.
        to: The rank that receives.
        buffers: The buffers.
        name: The name of the task that wrote the buffers.
    """

    rank: int
    to: int
    buffers: tuple[Buffer, ...]
    name: str


@dataclass(frozen=True)
class Recv:
    """Receives buffers on rank `rank` that rank `source` sends.

    Attributes:
        rank: The rank that receives.
        source: The rank that sends.
        buffers: The buffers.
        name: The name of the task that wrote the buffers.
    """

    rank: int
    source: int
    buffers: tuple[Buffer, ...]
    name: str


@dataclass(frozen=True)
class Delete:
    """Deletes buffers that a rank no longer reads."""

    rank: int
    buffers: tuple[Buffer, ...]


Instruction = RunTask | Send | Recv | Delete


@dataclass(frozen=True)
class MpmdProgram:
    """The instructions of all ranks for one call of a function.

    Attributes:
        num_ranks: The number of ranks.
        inputs: The buffer of each argument and the ranks that read it; () if no rank reads it.
        outputs: The buffer of each result and the ranks that hold it.
        indices: Buffers that hold the index of a microbatch, and this index.
        instructions: The instructions of all ranks, in an order in which they could run.
    """

    num_ranks: int
    inputs: tuple[tuple[Buffer, tuple[int, ...]], ...]
    outputs: tuple[tuple[Buffer, tuple[int, ...]], ...]
    indices: Mapping[Buffer, int] = field(default_factory=dict)
    instructions: tuple[Instruction, ...] = ()

    def __str__(self) -> str:
        return _format_program(self)


def check(program: MpmdProgram) -> None:
    """Checks that ranks only read buffers that they hold, and that receives match sends in order.

    Raises:
        AssertionError: If an instruction breaks one of these rules. The error names it.
    """
    has: list[set[Buffer]] = [set() for _ in range(program.num_ranks)]
    for buffer, ranks in program.inputs:
        for rank in ranks:
            has[rank].add(buffer)
    for buffers in has:
        buffers.update(program.indices)
    sent: dict[tuple[int, int], list[Send]] = {}
    for instruction in program.instructions:
        mine = has[instruction.rank]
        match instruction:
            case RunTask(reads=reads, writes=writes):
                missing = [buffer for buffer in reads if buffer not in mine]
                assert not missing, (
                    f"{instruction.name} reads {missing}, which the rank does not hold"
                )
                mine.difference_update(instruction.reads[i] for i in instruction.donated)
                assert mine.isdisjoint(writes), f"{instruction.name} writes a buffer that exists"
                mine.update(writes)
            case Send(rank, to, buffers):
                assert mine.issuperset(buffers), f"{instruction} sends a missing buffer"
                sent.setdefault((rank, to), []).append(instruction)
            case Recv(rank, source, buffers):
                assert sent.get((source, rank)), f"{instruction} has no send"
                first = sent[source, rank].pop(0)
                assert first.buffers == buffers, f"{instruction} does not match {first}"
                assert mine.isdisjoint(buffers), f"{instruction} receives a buffer that exists"
                mine.update(buffers)
            case Delete(buffers=buffers):
                assert mine.issuperset(buffers), f"{instruction} deletes a missing buffer"
                mine.difference_update(buffers)
    assert not any(sent.values()), f"{sent} have no receive"
    for buffer, ranks in program.outputs:
        assert all(buffer in has[rank] for rank in ranks), (
            f"{buffer} is missing on a rank that returns it"
        )


def instructions_of_rank(program: MpmdProgram, rank: int) -> tuple[Instruction, ...]:
    """Returns the instructions of one rank, in order."""
    return tuple(i for i in program.instructions if i.rank == rank)


def _format_program(program: MpmdProgram) -> str:
    """Returns all instructions as text, in an order in which they could run.

    They are written like the equations of a jaxpr. A buffer is printed as a letter and a number,
    then `:m` for a microbatch or a version of a sum.
    """
    names: dict[Var, str] = {}

    def name(buffer: Buffer) -> str:
        short = names.setdefault(buffer.value, f"v{len(names)}")
        return short if buffer.version is None else f"{short}:{buffer.version}"

    def typed(buffer: Buffer) -> str:
        return f"{name(buffer)}:{buffer.value.aval.str_short(short_dtypes=True)}"

    inputs = " ".join(f"{typed(b)}@{_format_ranks(ranks)}" for b, ranks in program.inputs)
    outputs = " ".join(f"{name(b)}@{_format_ranks(ranks)}" for b, ranks in program.outputs)
    lines = [line for i in program.instructions for line in _format_instruction(i, name, typed)]
    return "\n".join([f"{{ lambda {inputs} . let", *lines, f"  in {outputs} }}"])


def _format_ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) or "-"


def _format_instruction(instruction: Instruction, name, typed) -> list[str]:
    rank = instruction.rank
    match instruction:
        case RunTask(_, label, graph, reads, writes, actions, donated):
            info = ", ".join(f"({a.stage}, {a.op.name}, {a.microbatch})" for a in actions)
            return [
                f"    {' '.join(map(typed, writes))} = run_task[",
                *([f"      task_info={info}"] if info else []),
                f"      mpmd_idx={rank}",
                f"      donate_invars={tuple(i in donated for i in range(len(reads)))}",
                f"      num_steps={len(graph.eqns)}",
                f"      task_name={label}",
                f"    ] {' '.join(map(name, reads))}",
            ]
        case Send(_, to, buffers):
            return [f"    send[mpmd_idx={rank} tgt_mpmd_idx={to}] {' '.join(map(name, buffers))}"]
        case Recv(_, source, buffers):
            given = " ".join(map(name, buffers))
            return [f"    {given} = recv[mpmd_idx={rank} src_mpmd_idx={source}]"]
        case Delete(_, buffers):
            return [f"    _ = delete[mpmd_idx={rank}] {' '.join(map(name, buffers))}"]
