"""Executes the instructions of this process in a flat loop over functions bound to their arrays.

The loop looks up no names: buffers are indices into a list, and programs and shardings are bound
when the step is compiled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._compat import nan_errors
from ...schedules import Op
from ..api._mesh import MpmdMesh
from ..ir._program import (
    Buffer,
    Delete,
    Instruction,
    MpmdProgram,
    RankBuffer,
    Recv,
    RunTask,
    Send,
    name_in_step,
)
from ._compile import Executables
from ._session import Session
from ._transfers import Spec, buffer_spec, mover, receiver, sender
from ._watchdog import resolve, watch

Slots = list[Any]
Thunk = Callable[[Slots], None]


class BoundInstruction(NamedTuple):
    """An instruction of this process, and the function of the list of arrays that executes it."""

    instruction: Instruction
    thunk: Thunk


@dataclass(frozen=True)
class BoundProgram:
    """Instructions bound to slots in a list of arrays.

    Attributes:
        slot_of: The index in the list for each buffer on each local rank.
        initial: The list of arrays at the start of a step.
        programs: The compiled programs that this process runs, by `name@rank`.
    """

    thunks: tuple[BoundInstruction, ...]
    slot_of: Mapping[RankBuffer, int]
    initial: Slots
    programs: Mapping[str, Any]


def bind(
    program: MpmdProgram, mesh: MpmdMesh, executables: Executables, session: Session | None
) -> BoundProgram:
    """Binds the instructions of local ranks to slots in a list of arrays."""
    local = set(mesh.local_ranks)
    slot_of: dict[RankBuffer, int] = {}
    channels: dict[tuple[int, int, tuple[Buffer, ...]], int] = {}

    def slot(buffer: Buffer, rank: int) -> int:
        return slot_of.setdefault((buffer, rank), len(slot_of))

    def shape(buffer: Buffer, rank: int) -> Spec:
        return buffer_spec(buffer, rank, mesh, executables.specs)

    def thunks() -> Iterator[BoundInstruction]:
        for i, instruction in enumerate(program.instructions):
            rank = instruction.rank
            if isinstance(instruction, Send):
                channel = _new_channel(session, mesh, rank, instruction.to)
                channels[instruction.to, rank, instruction.buffers] = channel
            if rank not in local:
                continue
            match instruction:
                case RunTask(reads=reads, writes=writes, donated=donated):
                    read_slots = [slot(buffer, rank) for buffer in reads]
                    write_slots = [slot(buffer, rank) for buffer in writes]
                    donated_slots = [read_slots[d] for d in donated]
                    thunk = _task_thunk(
                        instruction, executables.programs[i], read_slots, write_slots, donated_slots
                    )
                case Send(to=to, buffers=buffers):
                    read_slots = [slot(buffer, rank) for buffer in buffers]
                    sources = [shape(buffer, rank) for buffer in buffers]
                    if to in local:
                        write_slots = [slot(buffer, to) for buffer in buffers]
                        move = mover(sources, [shape(buffer, to) for buffer in buffers])
                        thunk = _copy_thunk(read_slots, write_slots, move)
                    else:
                        assert session is not None
                        peer = mesh.process_of(to)
                        send = sender(session.transport, peer, channels[to, rank, buffers], sources)
                        thunk = _send_thunk(read_slots, send)
                case Recv(source=source, buffers=buffers) if source not in local:
                    assert session is not None
                    peer, channel = mesh.process_of(source), channels[rank, source, buffers]
                    targets = [shape(buffer, rank) for buffer in buffers]
                    write_slots = [slot(buffer, rank) for buffer in buffers]
                    receive = receiver(session.transport, peer, channel, targets)
                    thunk = _recv_thunk(write_slots, receive)
                case Delete(buffers=buffers):
                    thunk = _delete_thunk([slot(buffer, rank) for buffer in buffers])
                case _:  # what a local rank receives of another one is copied by its `Send`
                    continue
            yield BoundInstruction(instruction, thunk)

    bound = tuple(
        each if session is None else _with_watchdog(session, mesh, each, slot_of)
        for each in thunks()
    )
    for buffer, ranks in (*program.inputs, *program.outputs):
        for rank in local.intersection(ranks):
            slot(buffer, rank)
    initial: Slots = [None] * len(slot_of)
    for (buffer, rank), index in slot_of.items():
        if buffer in program.indices:
            microbatch = jnp.asarray(program.indices[buffer], jnp.int32)
            initial[index] = jax.device_put(microbatch, shape(buffer, rank).sharding)
    named = {
        f"{name_in_step(run, program)}@{run.rank}": executables.programs[i]
        for i, run in enumerate(program.instructions)
        if isinstance(run, RunTask) and i in executables.programs
    }
    return BoundProgram(bound, slot_of, initial, named)


def _new_channel(session: Session | None, mesh: MpmdMesh, rank: int, to: int) -> int:
    """Returns the index of a new channel between two processes; all processes count alike."""
    if session is None:
        return 0
    ends = mesh.process_of(rank), mesh.process_of(to)
    session.channels[ends] += 1
    return session.channels[ends]


def _with_watchdog(
    session: Session, mesh: MpmdMesh, bound: BoundInstruction, slot_of: Mapping[RankBuffer, int]
) -> BoundInstruction:
    """Returns an instruction with a thunk whose error, by the watchdog, names it if it hangs."""
    instruction, thunk = bound
    rank = instruction.rank
    match instruction:
        case RunTask(name=name, writes=writes):
            label, buffers = f"{name} on rank {rank}", writes
        case Recv(source=source, name=name, buffers=buffers):
            peer = f"rank {source} (process {mesh.process_of(source)})"
            label = f"rank {rank}'s receive of {name} from {peer}"
        case _:
            return bound
    if not buffers:
        return bound
    smallest = slot_of[min(buffers, key=lambda buffer: buffer.value.num_bytes), rank]
    watchdog = session.watchdog

    def watched(slots: Slots) -> None:
        entry = watch(watchdog, label)
        try:
            thunk(slots)
        finally:
            resolve(entry, [slots[smallest]] if slots[smallest] is not None else [])

    return BoundInstruction(instruction, watched)


def _getter(read_slots: Sequence[int]) -> Callable[[Slots], Sequence[Any]]:
    """Returns a getter for slots. `itemgetter` returns no tuple for fewer than two indices."""
    if len(read_slots) > 1:
        return itemgetter(*read_slots)
    return lambda slots: [slots[slot] for slot in read_slots]


_NAN_ERRORS = nan_errors()


def _task_thunk(
    run: RunTask,
    program: Callable[..., Any],
    read_slots: Sequence[int],
    write_slots: Sequence[int],
    donated_slots: Sequence[int],
) -> Thunk:
    read = _getter(read_slots)

    def thunk(slots: Slots) -> None:
        try:
            results = program(*read(slots))
        except _NAN_ERRORS as error:
            raise FloatingPointError(_nan_message(run, error)) from None
        for slot in donated_slots:
            slots[slot] = None
        for slot, result in zip(write_slots, results, strict=True):
            slots[slot] = result

    return thunk


def _nan_message(run: RunTask, error: Exception) -> str:
    what = [
        f"{_OP_NAMES[a.op]} of stage {a.stage} for microbatch {a.microbatch}" for a in run.actions
    ]
    kind = "inf" if "inf" in str(error) and "nan" not in str(error) else "nan"
    told = f", the {' and the '.join(what)}," if what else ""
    return (
        f"Task {run.name}{told} on rank {run.rank} returned {kind}, and no task before it did. "
        "This is checked because `jax_debug_nans` or `jax_debug_infs` is set."
    )


_OP_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward to the activations",
    Op.W: "backward to the weights",
}


def _copy_thunk(
    read_slots: Sequence[int],
    write_slots: Sequence[int],
    move: Callable[[Sequence[Any]], Sequence[Any]],
) -> Thunk:
    read = _getter(read_slots)

    def thunk(slots: Slots) -> None:
        for slot, array in zip(write_slots, move(read(slots)), strict=True):
            slots[slot] = array

    return thunk


def _send_thunk(read_slots: Sequence[int], send: Callable[[Sequence[Any]], None]) -> Thunk:
    read = _getter(read_slots)
    return lambda slots: send(list(read(slots)))


def _recv_thunk(write_slots: Sequence[int], receive: Callable[[], Sequence[Any]]) -> Thunk:
    def thunk(slots: Slots) -> None:
        for slot, array in zip(write_slots, receive(), strict=True):
            slots[slot] = array

    return thunk


def _delete_thunk(deleted_slots: Sequence[int]) -> Thunk:
    def thunk(slots: Slots) -> None:
        for slot in deleted_slots:
            slots[slot] = None

    return thunk
