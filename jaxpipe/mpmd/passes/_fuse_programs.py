"""Fuses programs that run one after the other on a rank without a transfer between them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...ir._graph import Atom, Graph, Var
from ...schedules import Action, Op
from ..ir._program import Buffer, Code, Instruction, Receive, Run, Send
from ..ir._steps import substituted


def fuse(code: Code) -> Code:
    """Fuses each forward with the backward of the same microbatch if that runs next on the rank.

    This is the case on the last stage. The rank sends nothing between the two programs, so no other
    rank waits longer, and the residuals between them are never stored as arrays.

    Args:
        code: A program with its transfers and without `Free` instructions.

    Returns:
        The same program, with one `Run` in place of each such pair.
    """
    followers = _followers(code)
    kept = _kept(code)
    known: dict[tuple[int, int, tuple[Buffer | int, ...]], Graph] = {}

    def instructions() -> Iterator[Instruction]:
        taken: set[int] = set()
        for place, instruction in enumerate(code.instructions):
            if place in taken:
                continue
            follower = followers.get(place)
            if follower is None:
                yield instruction
                continue
            second = code.instructions[follower]
            assert isinstance(instruction, Run) and isinstance(second, Run)
            taken.add(follower)
            yield _fused(instruction, second, kept, known)

    return replace(code, instructions=tuple(instructions()))


def _followers(code: Code) -> dict[int, int]:
    """Returns, for each `Run` to be fused with the next one of its rank, the index of that one."""
    last: dict[int, int] = {}
    found: dict[int, int] = {}
    for place, instruction in enumerate(code.instructions):
        before = last.get(instruction.rank)
        if isinstance(instruction, Run):
            first = None if before is None else code.instructions[before]
            if before is not None and isinstance(first, Run) and _go_together(first, instruction):
                found[before] = place
                last.pop(instruction.rank)
                continue
        last[instruction.rank] = place
    return found


def _go_together(first: Run, second: Run) -> bool:
    """Returns whether two runs are the forward and the backward of one stage and one microbatch."""
    if len(first.actions) != 1 or len(second.actions) != 1:
        return False
    (a,), (b,) = first.actions, second.actions
    same = a.stage == b.stage and a.microbatch == b.microbatch
    return same and a.op is Op.F and b.op in (Op.B, Op.I)


def _kept(code: Code) -> set[Buffer]:
    """Returns the buffers that more than one instruction reads, and those that the step returns."""
    seen: set[Buffer] = set()
    kept = {buffer for buffer, _ in code.outputs}
    for instruction in code.instructions:
        match instruction:
            case Run(reads=buffers) | Send(buffers=buffers):
                kept.update(seen.intersection(buffers))
                seen.update(buffers)
            case Receive():
                pass
    return kept


def _fused(first: Run, second: Run, kept: set[Buffer], known: dict[tuple, Graph]) -> Run:
    """Returns one instruction that runs two programs without storing what only they share."""
    between = [b for b in first.writes if b in second.reads and b not in kept]
    more = [b for b in second.reads if b not in first.writes]
    reads = tuple(dict.fromkeys([*first.reads, *more]))
    writes = (*(b for b in first.writes if b not in between), *second.writes)
    wiring = tuple(first.reads.index(b) if b in first.reads else -1 for b in second.reads)
    key = id(first.program), id(second.program), (*wiring, *map(first.writes.index, between))
    if key not in known:
        known[key] = _joined(first, second, reads, writes)
    actions: tuple[Action, ...] = (*first.actions, *second.actions)
    name = f"FusedTask({first.name}, {second.name})"
    return Run(first.rank, name, known[key], reads, writes, actions)


def _joined(first: Run, second: Run, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Graph:
    """Returns both programs as a single one that reads `reads` and writes `writes`."""
    a, b = first.program, second.program
    made: dict[Buffer, Atom] = dict(zip(first.reads, a.inputs, strict=True))
    made.update(zip(first.writes, a.outputs, strict=True))
    inputs = [atom for buffer, atom in zip(first.reads, a.inputs, strict=True) if buffer in reads]
    renamed: dict[Var, Atom] = {}
    for buffer, value in zip(second.reads, b.inputs, strict=True):
        if buffer in made:
            renamed[value] = made[buffer]
        else:
            inputs.append(value)
    made.update(
        (buffer, renamed.get(atom, atom) if isinstance(atom, Var) else atom)
        for buffer, atom in zip(second.writes, b.outputs, strict=True)
    )
    steps = (*a.steps, *substituted(b.steps, renamed))
    return Graph(tuple(inputs), steps, tuple(made[buffer] for buffer in writes))
