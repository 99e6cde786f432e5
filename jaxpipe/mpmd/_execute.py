"""A step of the ranks of this process: a flat loop over instructions that know their arrays.

Nothing is looked up while it runs: buffers are places in a list, programs and shardings are bound.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ._array import MpmdMesh
from ._code import Buffer, Code, Free, Instruction, Receive, Run, Send
from ._compile import Executables

Slots = list[Any]
Act = Callable[[Slots], None]
Place = tuple[Buffer, int]
"""A buffer on a rank."""


@runtime_checkable
class Remote(Protocol):
    """How arrays come to ranks of other processes and from there."""

    def send(self, name: str, rank: int, to: int, arrays: Sequence[jax.Array]) -> None: ...

    def receive(
        self, name: str, rank: int, source: int, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> Sequence[jax.Array]: ...


@dataclass(frozen=True)
class Bound:
    """Instructions with their arrays.

    Attributes:
        acts: What to do, in order, each with the program or transfer that it stands for.
        places: Where the array of each buffer on each local rank is.
        start: The list of arrays at the start of a step.
    """

    acts: tuple[tuple[Instruction, Act], ...]
    places: Mapping[Place, int]
    start: Slots


def bind(code: Code, mesh: MpmdMesh, executables: Executables, remote: Remote | None) -> Bound:
    """Binds the instructions of local ranks to places in a list."""
    local = set(mesh.local_ranks)
    places: dict[Place, int] = {}

    def place(buffer: Buffer, rank: int) -> int:
        return places.setdefault((buffer, rank), len(places))

    def sharding(buffer: Buffer, rank: int) -> NamedSharding:
        return NamedSharding(mesh.unstack[rank], executables.specs[buffer, rank])

    def acts() -> Iterator[tuple[Instruction, Act]]:
        for i, instruction in enumerate(code.instructions):
            rank = instruction.rank
            if rank not in local:
                continue
            match instruction:
                case Run(reads=reads, writes=writes, donated=donated):
                    given = [place(buffer, rank) for buffer in reads]
                    made = [place(buffer, rank) for buffer in writes]
                    gone = [given[d] for d in donated]
                    yield instruction, _run(executables.programs[i], given, made, gone)
                case Send(to=to, buffers=buffers) if to in local:
                    given = [place(buffer, rank) for buffer in buffers]
                    made = [place(buffer, to) for buffer in buffers]
                    shardings = [sharding(buffer, to) for buffer in buffers]
                    yield instruction, _move(given, made, shardings)
                case Send(to=to, buffers=buffers, name=name):
                    assert remote is not None
                    given = [place(buffer, rank) for buffer in buffers]
                    yield instruction, _send(remote, name, rank, to, given)
                case Receive(source=source, buffers=buffers, name=name) if source not in local:
                    assert remote is not None
                    made = [place(buffer, rank) for buffer in buffers]
                    shapes = [_shape(buffer, sharding(buffer, rank)) for buffer in buffers]
                    yield instruction, _receive(remote, name, rank, source, made, shapes)
                case Free(buffers=buffers):
                    yield instruction, _free([place(buffer, rank) for buffer in buffers])

    bound = tuple(acts())
    for buffer, ranks in (*code.inputs, *code.outputs):
        for rank in local.intersection(ranks):
            place(buffer, rank)
    start: Slots = [None] * len(places)
    for (buffer, rank), where in places.items():
        if buffer in code.indices:
            number = jnp.asarray(code.indices[buffer], jnp.int32)
            start[where] = jax.device_put(number, sharding(buffer, rank))
    return Bound(bound, places, start)


def _shape(buffer: Buffer, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    aval = buffer.value.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _read(places: Sequence[int]) -> Callable[[Slots], Sequence[Any]]:
    """`itemgetter`, which gives no tuple for fewer than two places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda slots: [slots[place] for place in places]


def _run(
    program: Callable[..., Any], given: Sequence[int], made: Sequence[int], gone: Sequence[int]
) -> Act:
    read = _read(given)

    def act(slots: Slots) -> None:
        results = program(*read(slots))
        for place in gone:
            slots[place] = None
        for place, result in zip(made, results, strict=True):
            slots[place] = result

    return act


def _move(given: Sequence[int], made: Sequence[int], shardings: Sequence[NamedSharding]) -> Act:
    read, shardings = _read(given), list(shardings)

    def act(slots: Slots) -> None:
        moved = jax.device_put(list(read(slots)), shardings)
        for place, array in zip(made, moved, strict=True):
            slots[place] = array

    return act


def _send(remote: Remote, name: str, rank: int, to: int, given: Sequence[int]) -> Act:
    read = _read(given)
    return lambda slots: remote.send(name, rank, to, read(slots))


def _receive(
    remote: Remote,
    name: str,
    rank: int,
    source: int,
    made: Sequence[int],
    shapes: Sequence[jax.ShapeDtypeStruct],
) -> Act:
    def act(slots: Slots) -> None:
        arrays = remote.receive(name, rank, source, shapes)
        for place, array in zip(made, arrays, strict=True):
            slots[place] = array

    return act


def _free(places: Sequence[int]) -> Act:
    def act(slots: Slots) -> None:
        for place in places:
            slots[place] = None

    return act
