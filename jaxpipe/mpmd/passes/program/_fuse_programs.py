"""Pass 12, `fuse_programs`: fuses programs that a rank runs one after the other.

Before: a program with its transfers, one task per action of the schedules.

After: the same program with one task in place of a forward and the backward of the same microbatch
that follows it on its rank, as on the last stage. Residuals between the two are values inside of
the fused program, no buffers.

Why here: whether a transfer is between two tasks is known since `insert_transfers`. The fused
program has fewer buffers, whose ends `liveness` finds next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....ir.graph import Atom, Graph, Var
from ....schedules import Op
from ...ir._eqns import substitute_inputs
from ...ir._program import Buffer, Instruction, MpmdProgram, RunTask, Send


def fuse_programs(program: MpmdProgram) -> MpmdProgram:
    """Fuses each forward with the backward of the same microbatch if that runs next on the rank.

    Nothing is sent between the two, so no other rank waits longer.
    """
    partners = _fusible_pairs(program)
    stored = _stored_buffers(program)
    fused_graphs: dict[tuple[int, int, tuple[Buffer | int, ...]], Graph] = {}

    def instructions() -> Iterator[Instruction]:
        fused: set[int] = set()
        for index, instruction in enumerate(program.instructions):
            if index in fused:
                continue
            partner = partners.get(index)
            if partner is None:
                yield instruction
                continue
            second = program.instructions[partner]
            assert isinstance(instruction, RunTask) and isinstance(second, RunTask)
            fused.add(partner)
            yield _fuse_tasks(instruction, second, stored, fused_graphs)

    return replace(program, instructions=tuple(instructions()))


def _fusible_pairs(program: MpmdProgram) -> dict[int, int]:
    """Maps the index of each task to the index of the next one of its rank, if they are fused."""
    last: dict[int, int] = {}
    pairs: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        before = last.get(instruction.rank)
        if isinstance(instruction, RunTask):
            first = None if before is None else program.instructions[before]
            if before is not None and isinstance(first, RunTask) and _can_fuse(first, instruction):
                pairs[before] = index
                last.pop(instruction.rank)
                continue
        last[instruction.rank] = index
    return pairs


def _can_fuse(first: RunTask, second: RunTask) -> bool:
    """Returns whether two runs are the forward and the backward of one stage and one microbatch."""
    if len(first.actions) != 1 or len(second.actions) != 1 or first.loop != second.loop:
        return False
    (a,), (b,) = first.actions, second.actions
    same = (a.stage, a.microbatch, a.slice) == (b.stage, b.microbatch, b.slice)
    return same and a.op is Op.F and b.op in (Op.B, Op.I)


def _stored_buffers(program: MpmdProgram) -> set[Buffer]:
    """Returns the buffers that more than one instruction reads, and those that the step returns."""
    seen: set[Buffer] = set()
    stored = {buffer for buffer, _ in program.outputs}
    for instruction in program.instructions:
        match instruction:
            case RunTask(reads=buffers) | Send(buffers=buffers):
                stored.update(seen.intersection(buffers))
                seen.update(buffers)
    return stored


def _fuse_tasks(
    first: RunTask, second: RunTask, stored: set[Buffer], fused_graphs: dict[tuple, Graph]
) -> RunTask:
    """Returns one instruction that runs two programs without storing what only they share."""
    between = [b for b in first.writes if b in second.reads and b not in stored]
    more = [b for b in second.reads if b not in first.writes]
    reads = tuple(dict.fromkeys([*first.reads, *more]))
    writes = (*(b for b in first.writes if b not in between), *second.writes)
    wiring = tuple(first.reads.index(b) if b in first.reads else -1 for b in second.reads)
    key = id(first.graph), id(second.graph), (*wiring, *map(first.writes.index, between))
    if key not in fused_graphs:
        fused_graphs[key] = _fuse_graphs(first, second, reads, writes)
    return replace(
        first,
        name=f"FusedTask({first.name}, {second.name})",
        graph=fused_graphs[key],
        reads=reads,
        writes=writes,
        actions=(*first.actions, *second.actions),
    )


def _fuse_graphs(
    first: RunTask, second: RunTask, reads: Sequence[Buffer], writes: Sequence[Buffer]
) -> Graph:
    """Returns both programs as a single one that reads `reads` and writes `writes`."""
    a, b = first.graph, second.graph
    value_of: dict[Buffer, Atom] = dict(zip(first.reads, a.inputs, strict=True))
    value_of.update(zip(first.writes, a.outputs, strict=True))
    inputs = [atom for buffer, atom in zip(first.reads, a.inputs, strict=True) if buffer in reads]
    renamed: dict[Var, Atom] = {}
    for buffer, value in zip(second.reads, b.inputs, strict=True):
        if buffer in value_of:
            renamed[value] = value_of[buffer]
        else:
            inputs.append(value)
    value_of.update(
        (buffer, renamed.get(atom, atom) if isinstance(atom, Var) else atom)
        for buffer, atom in zip(second.writes, b.outputs, strict=True)
    )
    eqns = (*a.eqns, *substitute_inputs(b.eqns, renamed))
    return Graph(tuple(inputs), eqns, tuple(value_of[buffer] for buffer in writes))
