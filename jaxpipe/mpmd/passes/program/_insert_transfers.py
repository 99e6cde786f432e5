"""Pass 11, `insert_transfers`: a rank sends a value as soon as it has computed it.

Before: a program of `RunTask` instructions, which read buffers that other ranks wrote.

After: the same program with a `Send` and a `Recv` after each task whose results other ranks read,
so that every rank reads only what it has. Arguments are sent first, from the ranks that are given
them to other ranks that read them: those that run a stage whose weights another rank stores.

Why here: the order of tasks is known, and a transfer stands directly behind the task that wrote its
buffers. The next pass may fuse two tasks of a rank only if no transfer is between them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...ir._program import Buffer, Instruction, MpmdProgram, Recv, RunTask, Send


def insert_transfers(program: MpmdProgram) -> MpmdProgram:
    """Inserts a send and a receive after every program whose results other ranks read.

    All results of one program for one destination are sent together. If several ranks compute the
    same value, the first of them sends it.
    """
    makers: dict[Buffer, list[int]] = defaultdict(list)  # the ranks that have it without a transfer
    readers: dict[Buffer, set[int]] = defaultdict(set)
    for run in program.instructions:
        assert isinstance(run, RunTask)
        for buffer in run.writes:
            makers[buffer].append(run.rank)
        for buffer in run.reads:
            readers[buffer].add(run.rank)
    for buffer, ranks in program.outputs:
        readers[buffer].update(ranks)
    for buffer, ranks in program.inputs:
        makers[buffer] = list(ranks)
    sent: set[Buffer] = set()

    def instructions() -> Iterator[Instruction]:
        yield from _argument_transfers(program, readers)
        for run in program.instructions:
            assert isinstance(run, RunTask)
            yield run
            leaving: dict[int, list[Buffer]] = defaultdict(list)
            for buffer in run.writes:
                if run.rank == makers[buffer][0] and buffer not in sent:
                    sent.add(buffer)
                    for to in sorted(readers[buffer].difference(makers[buffer])):
                        leaving[to].append(buffer)
            for to, buffers in sorted(leaving.items()):
                yield Send(run.rank, to, tuple(buffers), run.name)
                yield Recv(to, run.rank, tuple(buffers), run.name)

    return replace(program, instructions=tuple(instructions()), has_transfers=True)


def _argument_transfers(
    program: MpmdProgram, readers: Mapping[Buffer, set[int]]
) -> Iterator[Instruction]:
    """Yields the transfers of arguments to the ranks that read them and are not given them."""
    leaving: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
    for buffer, ranks in program.inputs:
        for to in sorted(readers[buffer].difference(ranks)):
            leaving[ranks[0], to].append(buffer)
    for (rank, to), buffers in sorted(leaving.items()):
        yield Send(rank, to, tuple(buffers), "arguments")
        yield Recv(to, rank, tuple(buffers), "arguments")
