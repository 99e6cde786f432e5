"""Defines the instructions of ranks: tasks on named buffers, sends, receives and deletes.

The instructions of all ranks form one sequence in which they could run. A rank runs the
instructions that name it, in this order. Each receive follows its send in the sequence, so the
ranks cannot deadlock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import PartitionSpec

from ...ir.graph import Graph, Var
from ...schedules import Action, Schedule
from ._text import Names, format_graph, indent


class Buffer(NamedTuple):
    """The value of a variable on a rank.

    Attributes:
        version: The index of a microbatch, or of a state of a sum, if the variable has several
            values in a step; None if it has one.
    """

    value: Var
    version: int | None = None


RankBuffer: TypeAlias = tuple[Buffer, int]
"""A buffer and one of the ranks that have it: the key of what differs between ranks."""


class BufferOnRanks(NamedTuple):
    """An argument or a result, and the ranks that are given or hold it; () if no rank reads it."""

    buffer: Buffer
    ranks: tuple[int, ...]


class _Printed:
    """An instruction, which prints as text."""

    def __str__(self: Any) -> str:
        return "\n".join(_format_instruction(self, _BufferNames()))


@dataclass(frozen=True)
class RunTask(_Printed):
    """Runs a graph on a rank: `(reads) -> writes`.

    Attributes:
        actions: The actions of the schedule that it runs; () outside of loops.
        donated: The indices of the reads whose memory the writes may reuse.
        loop: The index of the loop that the task belongs to, among the loops of the step; None
            outside of loops.
    """

    rank: int
    name: str
    graph: Graph
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    actions: tuple[Action, ...] = ()
    donated: tuple[int, ...] = ()
    loop: int | None = None


@dataclass(frozen=True)
class Send(_Printed):
    """Sends copies of buffers from rank `rank` to rank `to`; `name` is the task that wrote them."""

    rank: int
    to: int
    buffers: tuple[Buffer, ...]
    name: str


@dataclass(frozen=True)
class Recv(_Printed):
    """Receives buffers on rank `rank` from rank `source`; `name` is the task that wrote them."""

    rank: int
    source: int
    buffers: tuple[Buffer, ...]
    name: str


@dataclass(frozen=True)
class Delete(_Printed):
    """Deletes buffers that a rank no longer reads."""

    rank: int
    buffers: tuple[Buffer, ...]


Instruction = RunTask | Send | Recv | Delete


@dataclass(frozen=True)
class MpmdProgram:
    """The instructions of all ranks for one call of a function.

    Attributes:
        indices: Buffers that hold the index of a microbatch, and this index.
        specs: The specs of values within a group, as far as they are known before compilation.
        donated_inputs: The indices of the arguments whose memory results may reuse.
        processes: [num_ranks] the index of the process of each rank, or () if all ranks share one.
        has_transfers: Whether every rank receives what it reads. False before `insert_transfers`: a
            task then reads what any rank wrote before it.
    """

    num_ranks: int
    inputs: tuple[BufferOnRanks, ...]
    outputs: tuple[BufferOnRanks, ...]
    indices: Mapping[Buffer, int] = field(default_factory=dict)
    instructions: tuple[Instruction, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    specs: Mapping[Var, PartitionSpec] = field(default_factory=dict)
    donated_inputs: frozenset[int] = frozenset()
    processes: tuple[int, ...] = ()
    has_transfers: bool = True

    def __str__(self) -> str:
        return _format_program(self)


def check(program: MpmdProgram) -> None:
    """Checks that ranks only read buffers that they hold, and that receives match sends in order.

    Before transfers are inserted, a rank may read what any rank has written.
    """
    if not program.has_transfers:
        _check_order(program)
        return
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
                assert first.buffers == buffers, f"{instruction!r} does not match {first!r}"
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


def _check_order(program: MpmdProgram) -> None:
    """Checks that a program without transfers only reads what was written, and writes it once."""
    available = {*program.indices, *(buffer for buffer, _ in program.inputs)}
    written: set[tuple[Buffer, int]] = set()
    for run in program.instructions:
        assert isinstance(run, RunTask), f"{run} is no task, and transfers are not inserted yet"
        missing = [buffer for buffer in run.reads if buffer not in available]
        assert not missing, f"{run.name} reads {missing}, which no rank has written"
        own = {(buffer, run.rank) for buffer in run.writes}
        assert written.isdisjoint(own), f"{run.name} writes a buffer that exists"
        written |= own
        available.update(run.writes)
    missing = [buffer for buffer, _ in program.outputs if buffer not in available]
    assert not missing, f"the program returns {missing}, which no rank has written"


def name_in_step(run: RunTask, program: MpmdProgram) -> str:
    """Returns `fwd_0__1`, or with several loops `loop_1.fwd_0__1`, which is unique on a rank."""
    is_ambiguous = run.loop is not None and len(program.schedules) > 1
    return f"loop_{run.loop}.{run.name}" if is_ambiguous else run.name


def instructions_of_rank(program: MpmdProgram, rank: int) -> tuple[Instruction, ...]:
    """Returns the instructions of one rank, in order."""
    return tuple(i for i in program.instructions if i.rank == rank)


class _BufferNames:
    """The names of buffers in one text: `v0` and, for a microbatch or a version, `v0:2`."""

    def __init__(self) -> None:
        self.of_values = Names()

    def __call__(self, buffer: Buffer) -> str:
        short = self.of_values(buffer.value)
        return short if buffer.version is None else f"{short}:{buffer.version}"

    def typed(self, buffer: Buffer) -> str:
        return f"{self(buffer)}:{buffer.value.aval.str_short(short_dtypes=True)}"


def _format_program(program: MpmdProgram) -> str:
    """Returns all instructions as text, in an order in which they could run.

    They are written like the equations of a jaxpr. A buffer is printed as a letter and a number,
    then `:m` for a microbatch or a version of a sum.
    """
    names = _BufferNames()
    inputs = " ".join(names.typed(b) + format_ranks(ranks) for b, ranks in program.inputs)
    outputs = " ".join(names(b) + format_ranks(ranks) for b, ranks in program.outputs)
    lines = [line for i in program.instructions for line in _format_instruction(i, names)]
    return "\n".join([f"{{ lambda {inputs} . let", *indent(lines), f"  in {outputs} }}"])


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Returns ranks as `@0,1`, and no rank as `@-`."""
    return f"@{','.join(map(str, ranks)) or '-'}"


def _format_instruction(instruction: Instruction, names: _BufferNames) -> list[str]:
    rank = instruction.rank

    def join(buffers: tuple[Buffer, ...], name: Callable[[Buffer], str] = names) -> str:
        return " ".join(map(name, buffers))

    match instruction:
        case RunTask():
            info = ", ".join(
                f"({a.stage}, {a.op.name}, {a.microbatch})" for a in instruction.actions
            )
            donated = tuple(i in instruction.donated for i in range(len(instruction.reads)))
            return [
                f"{join(instruction.writes, names.typed)} = run_task[",
                *([f"  loop={instruction.loop}"] if instruction.loop is not None else []),
                *([f"  task_info={info}"] if info else []),
                f"  mpmd_idx={rank}",
                f"  donate_invars={donated}",
                f"  num_steps={len(instruction.graph.eqns)}",
                f"  task_name={instruction.name}",
                f"] {join(instruction.reads)}",
            ]
        case Send(to=to, buffers=buffers):
            return [f"send[mpmd_idx={rank} tgt_mpmd_idx={to}] {join(buffers)}"]
        case Recv(source=source, buffers=buffers):
            return [f"{join(buffers)} = recv[mpmd_idx={rank} src_mpmd_idx={source}]"]
        case Delete(buffers=buffers):
            return [f"_ = delete[mpmd_idx={rank}] {join(buffers)}"]


def format_task_graph(run: RunTask, names: Names) -> list[str]:
    """Returns the lines of a task outside of loops, with the equations of its graph."""
    return [
        f"{' '.join(names.typed(buffer.value) for buffer in run.writes)} = run_task[",
        *indent([f"mpmd_idx={run.rank}", f"task_name={run.name}"]),
        *indent(format_graph(run.graph, names)),
        f"] {names.join(buffer.value for buffer in run.reads)}".rstrip(),
    ]
