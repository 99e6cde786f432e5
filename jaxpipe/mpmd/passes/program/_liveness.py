"""Pass 13, `liveness`: ends the life of buffers after their last use, or donates them to that use.

Before: a program that never ends the life of a buffer.

After: the same program in which each task says which of its reads it donates to its writes, and a
`Delete` follows the last use of every other buffer. Arguments that the caller keeps, results, and
indices of microbatches stay.

Why here: it is the last pass, because any other one would move, add or remove uses of buffers.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ...ir._program import Buffer, Delete, Instruction, MpmdProgram, RunTask, Send


def liveness(program: MpmdProgram) -> MpmdProgram:
    """Donates buffers to the tasks that read them last, and deletes all other buffers after use.

    A buffer that is sent to another process is not donated, because that process may not have
    pulled it yet.
    """
    last, processes = _last_uses(program), program.processes
    caller_owned = {b for i, (b, _) in enumerate(program.inputs) if i not in program.donated_inputs}
    returned = {(buffer, rank) for buffer, ranks in program.outputs for rank in ranks}
    sent_to_processes = {
        (buffer, instruction.rank)
        for instruction in program.instructions
        if isinstance(instruction, Send) and processes
        if processes[instruction.rank] != processes[instruction.to]
        for buffer in instruction.buffers
    }
    kept = {
        (b, r) for r in range(program.num_ranks) for b in (*caller_owned, *program.indices)
    } | returned

    def instructions() -> Iterator[Instruction]:
        for index, instruction in enumerate(program.instructions):
            rank = instruction.rank
            dying = [
                buffer
                for buffer in _buffers_of(instruction)
                if last[rank].get(buffer) == index and (buffer, rank) not in kept
            ]
            if isinstance(instruction, RunTask):
                donatable = [buffer for buffer in dying if (buffer, rank) not in sent_to_processes]
                donated = _donatable_reads(instruction, donatable)
                yield replace(instruction, donated=donated)
                donated_buffers = {instruction.reads[i] for i in donated}
                dying = [buffer for buffer in dying if buffer not in donated_buffers]
            else:
                yield instruction
            if dying:
                yield Delete(rank, tuple(dict.fromkeys(dying)))

    return replace(program, instructions=tuple(instructions()))


def _buffers_of(instruction: Instruction) -> tuple[Buffer, ...]:
    if isinstance(instruction, RunTask):
        return (*instruction.reads, *instruction.writes)
    return instruction.buffers


def _last_uses(program: MpmdProgram) -> dict[int, dict[Buffer, int]]:
    """Returns, for each rank, the index of the last instruction that uses each buffer."""
    last: dict[int, dict[Buffer, int]] = defaultdict(dict)
    for index, instruction in enumerate(program.instructions):
        last[instruction.rank].update(dict.fromkeys(_buffers_of(instruction), index))
    return last


def _donatable_reads(run: RunTask, dying: list[Buffer]) -> tuple[int, ...]:
    """Returns the indices of dying reads, at most one for each write of equal shape and dtype."""
    vacant = list(run.writes)
    donated = []
    for i, buffer in enumerate(run.reads):
        aval = buffer.value.aval
        kind = aval.shape, aval.dtype
        match = next((w for w in vacant if (w.value.aval.shape, w.value.aval.dtype) == kind), None)
        if buffer in dying and match is not None and run.reads.count(buffer) == 1:
            vacant.remove(match)
            donated.append(i)
    return tuple(donated)
