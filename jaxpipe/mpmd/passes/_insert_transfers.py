"""Inserts sends and receives: a rank sends a value as soon as it has computed it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ..ir._program import Buffer, Code, Instruction, Receive, Run, Send


def exchange(code: Code) -> Code:
    """Inserts a send and a receive after every program whose results other ranks read.

    All results of one program for one destination are sent together. If several ranks compute the
    same value, the first of them sends it.

    Args:
        code: A program without transfers: `Run` instructions alone.

    Returns:
        The program with a `Send` and a `Receive` for each transfer.
    """
    makers: dict[Buffer, list[int]] = defaultdict(list)
    readers: dict[Buffer, set[int]] = defaultdict(set)
    for run in code.instructions:
        assert isinstance(run, Run)
        for buffer in run.writes:
            makers[buffer].append(run.rank)
        for buffer in run.reads:
            readers[buffer].add(run.rank)
    for buffer, ranks in code.outputs:
        readers[buffer].update(ranks)
    for buffer, ranks in code.inputs:
        makers[buffer] = list(ranks)
    sent: set[Buffer] = set()

    def instructions() -> Iterator[Instruction]:
        for run in code.instructions:
            assert isinstance(run, Run)
            yield run
            leaving: dict[int, list[Buffer]] = defaultdict(list)
            for buffer in run.writes:
                if run.rank == makers[buffer][0] and buffer not in sent:
                    sent.add(buffer)
                    for to in sorted(readers[buffer].difference(makers[buffer])):
                        leaving[to].append(buffer)
            for to, buffers in sorted(leaving.items()):
                yield Send(run.rank, to, tuple(buffers), run.name)
                yield Receive(to, run.rank, tuple(buffers), run.name)

    return replace(code, instructions=tuple(instructions()))
