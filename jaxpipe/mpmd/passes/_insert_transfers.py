"""Sends and receives: whatever a rank needs leaves its maker as soon as it is made."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ..ir._program import Buffer, Code, Instruction, Receive, Run, Send


def exchange(code: Code) -> Code:
    """Puts a send and a receive behind every program that makes what other ranks read.

    What goes to one rank goes together. A value that several ranks make is sent by the first.
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
