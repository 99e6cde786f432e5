"""Frees buffers after their last use, or donates them to the program that reads them last."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ir._program import Buffer, Code, Free, Instruction, Receive, Run, Send


def free(
    code: Code, *, donated_inputs: frozenset[int] = frozenset(), processes: Sequence[int] = ()
) -> Code:
    """Donates buffers to the programs that read them last, and frees all other buffers after use.

    Args:
        code: A program with its transfers inserted.
        donated_inputs: Indices of the arguments that the caller donates; all others are kept.
        processes: [num_ranks] the process of each rank, or () if all ranks are in one process. A
            buffer that is sent to another process is not donated, because that process may not have
            pulled it yet.

    Returns:
        The program with `donated` set on its runs, and with `Free` instructions.
    """
    last = _last_reads(code)
    given = {b for i, (b, _) in enumerate(code.inputs) if i not in donated_inputs}
    returned = {(buffer, rank) for buffer, ranks in code.outputs for rank in ranks}
    pulled = {
        (buffer, instruction.rank)
        for instruction in code.instructions
        if isinstance(instruction, Send) and _crosses(instruction, processes)
        for buffer in instruction.buffers
    }
    stays = {(b, r) for r in range(code.num_ranks) for b in (*given, *code.indices)} | returned

    def instructions() -> Iterator[Instruction]:
        for place, instruction in enumerate(code.instructions):
            rank = instruction.rank
            dying = [
                buffer
                for buffer in _buffers(instruction)
                if last[rank].get(buffer) == place and (buffer, rank) not in stays
            ]
            if isinstance(instruction, Run):
                may_go = [buffer for buffer in dying if (buffer, rank) not in pulled]
                donated = _donated(instruction, may_go)
                yield replace(instruction, donated=donated)
                gone = {instruction.reads[i] for i in donated}
                dying = [buffer for buffer in dying if buffer not in gone]
            else:
                yield instruction
            if dying:
                yield Free(rank, tuple(dict.fromkeys(dying)))

    return replace(code, instructions=tuple(instructions()))


def _crosses(send: Send, processes: Sequence[int]) -> bool:
    """Returns whether a send goes to another process."""
    return bool(processes) and processes[send.rank] != processes[send.to]


def _buffers(instruction: Instruction) -> tuple[Buffer, ...]:
    match instruction:
        case Run(reads=reads, writes=writes):
            return (*reads, *writes)
        case Send(buffers=buffers) | Receive(buffers=buffers):
            return buffers
        case Free():
            return ()


def _last_reads(code: Code) -> dict[int, dict[Buffer, int]]:
    """Returns, for each rank, the index of the last instruction that uses each buffer."""
    last: dict[int, dict[Buffer, int]] = defaultdict(dict)
    for place, instruction in enumerate(code.instructions):
        last[instruction.rank].update(dict.fromkeys(_buffers(instruction), place))
    return last


def _donated(run: Run, dying: list[Buffer]) -> tuple[int, ...]:
    """Returns the indices of dying reads, at most one for each write of equal shape and dtype."""
    vacant = list(run.writes)
    donated = []
    for i, buffer in enumerate(run.reads):
        aval = buffer.value.aval
        match = next((w for w in vacant if _type(w) == (aval.shape, aval.dtype)), None)
        if buffer in dying and match is not None and run.reads.count(buffer) == 1:
            vacant.remove(match)
            donated.append(i)
    return tuple(donated)


def _type(buffer: Buffer) -> tuple[tuple[int, ...], object]:
    return buffer.value.aval.shape, buffer.value.aval.dtype
