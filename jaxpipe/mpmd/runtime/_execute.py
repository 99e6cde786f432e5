"""Executes the instructions of this process in a flat loop over functions bound to their arrays.

The loop looks up no names: buffers are indices into a list, and programs and shardings are bound
when the step is compiled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from ..._compat import nan_errors
from ...schedules import Op
from ..api._mesh import MpmdMesh
from ..ir._program import Buffer, Delete, Instruction, MpmdProgram, Recv, RunTask, Send
from ._channels import on_rank
from ._compile import Executables
from ._session import Session
from ._transport import Spec, mover, receiver, sender
from ._watchdog import begin
from ._watchdog import made as finish

Slots = list[Any]
Act = Callable[[Slots], None]
Place = tuple[Buffer, int]
"""A buffer on a rank."""


@dataclass(frozen=True)
class Bound:
    """Instructions bound to slots in a list of arrays.

    Attributes:
        acts: Each instruction with the function that executes it, in order.
        places: The index in the list for each buffer on each local rank.
        start: The list of arrays at the start of a step.
        programs: The compiled programs that this process runs, by `name@rank`.
    """

    acts: tuple[tuple[Instruction, Act], ...]
    places: Mapping[Place, int]
    start: Slots
    programs: Mapping[str, Any]


def bind(
    program: MpmdProgram, mesh: MpmdMesh, executables: Executables, session: Session | None
) -> Bound:
    """Binds the instructions of local ranks to slots in a list of arrays."""
    local = set(mesh.local_ranks)
    places: dict[Place, int] = {}
    tags: dict[tuple[int, int, tuple[Buffer, ...]], int] = {}

    def place(buffer: Buffer, rank: int) -> int:
        return places.setdefault((buffer, rank), len(places))

    def shape(buffer: Buffer, rank: int) -> Spec:
        return on_rank(buffer, rank, mesh, executables.specs)

    def acts() -> Iterator[tuple[Instruction, Act]]:
        for i, instruction in enumerate(program.instructions):
            rank = instruction.rank
            if isinstance(instruction, Send):
                tag = _route(session, mesh, rank, instruction.to)
                tags[instruction.to, rank, instruction.buffers] = tag
            if rank not in local:
                continue
            match instruction:
                case RunTask(reads=reads, writes=writes, donated=donated):
                    given = [place(buffer, rank) for buffer in reads]
                    made = [place(buffer, rank) for buffer in writes]
                    gone = [given[d] for d in donated]
                    act = _run(instruction, executables.programs[i], given, made, gone)
                    yield instruction, act
                case Send(to=to, buffers=buffers):
                    given = [place(buffer, rank) for buffer in buffers]
                    sources = [shape(buffer, rank) for buffer in buffers]
                    if to in local:
                        made = [place(buffer, to) for buffer in buffers]
                        move = mover(sources, [shape(buffer, to) for buffer in buffers])
                        yield instruction, _move(given, made, move)
                    else:
                        assert session is not None
                        peer = mesh.process_of(to)
                        send = sender(session.transport, peer, tags[to, rank, buffers], sources)
                        yield instruction, _send(given, send)
                case Recv(source=source, buffers=buffers) if source not in local:
                    assert session is not None
                    peer, tag = mesh.process_of(source), tags[rank, source, buffers]
                    targets = [shape(buffer, rank) for buffer in buffers]
                    made = [place(buffer, rank) for buffer in buffers]
                    yield (
                        instruction,
                        _receive(made, receiver(session.transport, peer, tag, targets)),
                    )
                case Delete(buffers=buffers):
                    yield instruction, _free([place(buffer, rank) for buffer in buffers])

    bound = tuple(
        (instruction, act if session is None else _watched(session, mesh, instruction, act, places))
        for instruction, act in acts()
    )
    for buffer, ranks in (*program.inputs, *program.outputs):
        for rank in local.intersection(ranks):
            place(buffer, rank)
    start: Slots = [None] * len(places)
    for (buffer, rank), where in places.items():
        if buffer in program.indices:
            number = jnp.asarray(program.indices[buffer], jnp.int32)
            start[where] = jax.device_put(number, shape(buffer, rank).sharding)
    named = {
        f"{run.name}@{run.rank}": executables.programs[i]
        for i, run in enumerate(program.instructions)
        if isinstance(run, RunTask) and i in executables.programs
    }
    return Bound(bound, places, start, named)


def _route(session: Session | None, mesh: MpmdMesh, rank: int, to: int) -> int:
    """Returns the index of a new route between two processes; all processes count alike."""
    if session is None:
        return 0
    ends = mesh.process_of(rank), mesh.process_of(to)
    session.routes[ends] += 1
    return session.routes[ends]


def _watched(
    session: Session,
    mesh: MpmdMesh,
    instruction: Instruction,
    act: Act,
    places: Mapping[Place, int],
) -> Act:
    """Returns `act` watched by the watchdog, whose error names the instruction if it hangs."""
    rank = instruction.rank
    match instruction:
        case RunTask(name=name, writes=writes):
            label, buffers = f"{name} on rank {rank}", writes
        case Recv(source=source, name=name, buffers=buffers):
            peer = f"rank {source} (process {mesh.process_of(source)})"
            label = f"rank {rank}'s receive of {name} from {peer}"
        case _:
            return act
    if not buffers:
        return act
    smallest = places[min(buffers, key=lambda buffer: buffer.value.num_bytes), rank]
    dog = session.dog

    def watched(slots: Slots) -> None:
        entry = begin(dog, label)
        try:
            act(slots)
        finally:
            finish(entry, [slots[smallest]] if slots[smallest] is not None else [])

    return watched


def _read(places: Sequence[int]) -> Callable[[Slots], Sequence[Any]]:
    """Returns a getter for slots. `itemgetter` returns no tuple for fewer than two indices."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda slots: [slots[place] for place in places]


_NAN_ERRORS = nan_errors()


def _run(
    run: RunTask,
    program: Callable[..., Any],
    given: Sequence[int],
    made: Sequence[int],
    gone: Sequence[int],
) -> Act:
    read = _read(given)

    def act(slots: Slots) -> None:
        try:
            results = program(*read(slots))
        except _NAN_ERRORS as error:
            raise FloatingPointError(_not_finite(run, error)) from None
        for place in gone:
            slots[place] = None
        for place, result in zip(made, results, strict=True):
            slots[place] = result

    return act


def _not_finite(run: RunTask, error: Exception) -> str:
    what = [f"{_WORDS[a.op]} of stage {a.stage} for microbatch {a.microbatch}" for a in run.actions]
    kind = "inf" if "inf" in str(error) and "nan" not in str(error) else "nan"
    told = f", the {' and the '.join(what)}," if what else ""
    return (
        f"Task {run.name}{told} on rank {run.rank} returned {kind}, and no task before it did. "
        "This is checked because `jax_debug_nans` or `jax_debug_infs` is set."
    )


_WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward to the activations",
    Op.W: "backward to the weights",
}


def _move(
    given: Sequence[int], made: Sequence[int], move: Callable[[Sequence[Any]], Sequence[Any]]
) -> Act:
    read = _read(given)

    def act(slots: Slots) -> None:
        for place, array in zip(made, move(read(slots)), strict=True):
            slots[place] = array

    return act


def _send(given: Sequence[int], send: Callable[[Sequence[Any]], None]) -> Act:
    read = _read(given)
    return lambda slots: send(list(read(slots)))


def _receive(made: Sequence[int], receive: Callable[[], Sequence[Any]]) -> Act:
    def act(slots: Slots) -> None:
        for place, array in zip(made, receive(), strict=True):
            slots[place] = array

    return act


def _free(places: Sequence[int]) -> Act:
    def act(slots: Slots) -> None:
        for place in places:
            slots[place] = None

    return act
