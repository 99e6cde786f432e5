"""Moves arrays between groups: copied in a process, pulled across two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ....mpmd.runtime import (
    CompileHandshake,
    Session,
    abbreviate,
    layout,
    mover,
    open_session,
    receiver,
    sender,
)
from ._operations import MpmdValue, Operation, Recording, Spec

TIMEOUT = 300.0
"""Time that a step may stand still, in seconds, as in functions with loops."""


@dataclass(frozen=True)
class Connection:
    """What the processes of a job share while they compile a program; nothing with one process."""

    session: Session | None = None
    handshake: CompileHandshake | None = None
    layouts: dict[str, str] = field(default_factory=dict)
    peers: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, program: Recording) -> "Connection":
        """Checks that all processes recorded one program."""
        if jax.process_count() == 1:
            return cls()
        session = open_session(TIMEOUT)
        handshake = CompileHandshake(f"program/{next(session.programs)}")
        handshake.check_program(abbreviate("; ".join(map(_described, program.operations))))
        return cls(session, handshake)

    def check_layouts(self) -> None:
        """Waits for all processes, and checks that both ends of a channel expect the same."""
        if self.handshake is not None:
            self.handshake.wait_for_all(self.layouts, self.peers)


def _described(operation: Operation) -> str:
    shapes = [f"{x.dtype}{list(x.shape)}" for x in (*operation.inputs, *operation.outputs)]
    return f"{operation.name} {shapes}"


def move(operation: Operation, connection: Connection) -> Callable:
    """Returns the function of a `transfer`, a `stack` or a `slice`."""
    match operation.name:
        case "stack":
            return _stack(operation)
        case "slice":
            return _slice(operation)
    return _transfer(operation, connection)


def elsewhere(spec: Spec) -> jax.Array:
    """Returns an array of another process, without data."""
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, [], dtype=spec.dtype)


def _transfer(operation: Operation, connection: Connection) -> Callable:
    sources, targets = ([x.spec for x in v] for v in (operation.inputs, operation.outputs))
    if connection.session is None:
        copy = mover(sources, targets)
        return lambda *arrays: copy(arrays)
    ends = [
        (_process_of(x), _process_of(y))
        for x, y in zip(operation.inputs, operation.outputs, strict=True)
    ]
    here, moves = jax.process_index(), []
    for pair in sorted(set(ends)):
        of_pair = [i for i, end in enumerate(ends) if end == pair]
        connection.session.channels[pair] += 1
        channel = connection.session.channels[pair]
        if here not in pair:
            continue
        source, target = pair
        before, after = ([specs[i] for i in of_pair] for specs in (sources, targets))
        if source == target:
            moves.append((of_pair, mover(before, after), True))
            continue
        name = f"channel {channel} from process {source} to process {target}"
        connection.layouts[name] = abbreviate(layout(before if here == source else after))
        connection.peers.add(target if here == source else source)
        transport = connection.session.transport
        if here == source:
            moves.append((of_pair, sender(transport, target, channel, before), False))
        else:
            pull = receiver(transport, source, channel, after)
            moves.append((of_pair, lambda _, pull=pull: pull(), True))

    def run(*arrays: Any) -> list[Any]:
        results: list[Any] = [None] * len(arrays)
        for indices, act, returns in moves:
            moved = act([arrays[i] for i in indices])
            for i, x in zip(indices, moved if returns else (), strict=False):
                results[i] = x
        return [elsewhere(s) if x is None else x for x, s in zip(results, targets, strict=True)]

    return run


def _process_of(value: MpmdValue) -> int:
    processes = {device.process_index for device in value.sharding.device_set}
    if len(processes) > 1:
        raise ValueError(
            f"`transfer` is given an array on devices of the processes {sorted(processes)}. Take "
            "it apart with `slice`."
        )
    return processes.pop()


def _from_shards(spec: Spec, arrays: Sequence[jax.Array]) -> jax.Array:
    devices = {*spec.sharding.device_set}
    shards = [s.data for x in arrays for s in x.addressable_shards if s.device in devices]
    return jax.make_array_from_single_device_arrays(
        spec.shape, spec.sharding, shards, dtype=spec.dtype
    )


def _stack(operation: Operation) -> Callable:
    (stacked,) = operation.outputs
    if operation.inputs[0].ndim == stacked.ndim:
        return lambda *arrays: [_from_shards(stacked.spec, arrays)]
    local = [i for i, x in enumerate(operation.inputs) if x.sharding.addressable_devices]
    expand = [(i, _with_first_dim(operation.inputs[i], stacked.sharding.spec)) for i in local]
    return lambda *arrays: [_from_shards(stacked.spec, [run(arrays[i]) for i, run in expand])]


def _with_first_dim(value: MpmdValue, spec: PartitionSpec) -> Callable:
    """Returns the compiled function that gives an array the first dim of a stack."""
    mesh = value.sharding.mesh
    with jax.set_mesh(mesh):
        jitted = jax.jit(lambda x: x[None], out_shardings=NamedSharding(mesh, spec))
        return jitted.lower(value.spec).compile()


def _slice(operation: Operation) -> Callable:
    return lambda array: [_from_shards(x.spec, [array]) for x in operation.outputs]
