"""Compiles and runs a program that is written by hand: a process runs the tasks of its groups.

Arrays between groups are copied in a process, and pulled across two.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ....mpmd.api import MpmdMesh
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
from ._operations import (
    Buffer,
    MpmdValue,
    Operation,
    Recording,
    Spec,
    flat_donated,
    recording,
)


class _CompiledOperation(NamedTuple):
    """A compiled operation: arrays by the index of their value, before and after."""

    run: Callable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True)
class LoweredMpmdFun:
    """A compiled program.

    Attributes:
        mpmd_mesh: The mesh with its groups.
        in_shardings: The sharding of each argument.
        out_shape: Shapes, dtypes and shardings of the results.
        used_inputs: Whether this process reads an argument, in the tree of the arguments.
    """

    mpmd_mesh: MpmdMesh
    in_shardings: PyTree
    out_shape: PyTree
    used_inputs: PyTree
    _specs: Sequence[Spec]
    _steps: Sequence[_CompiledOperation]
    _outputs: Sequence[tuple[int | None, Any]]
    _donated: Sequence[int]

    @property
    def out_shardings(self) -> PyTree:
        """Returns the sharding of each result."""
        return jax.tree.map(lambda x: x.sharding, self.out_shape)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the tasks of this process. Results that live elsewhere have no data.

        Raises:
            ValueError: If an argument has another shape, dtype or sharding than it was lowered for.
        """
        leaves, tree = jax.tree.flatten(arguments)
        _check_arguments(leaves, tree, self._specs, jax.tree.structure(self.in_shardings))
        arrays = dict(enumerate(leaves))
        for step in self._steps:
            results = step.run(*[arrays[i] for i in step.inputs])
            arrays.update(zip(step.outputs, results, strict=True))
            for i in step.last:
                del arrays[i]
        for i in self._donated:
            leaves[i].delete()
        results = [x if i is None else arrays[i] for i, x in self._outputs]
        return jax.tree.unflatten(jax.tree.structure(self.out_shape), results)


@dataclass(frozen=True)
class FunctionByHand:
    """A function of tasks and transfers. It compiles for the types of its first arguments."""

    fun: Callable
    mpmd_mesh: MpmdMesh
    in_shardings: PyTree
    donate_argnums: Sequence[int]
    infer_donation: bool
    _lowered: dict[Any, LoweredMpmdFun] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program, compiled for these types."""
        leaves, tree = jax.tree.flatten(arguments)
        key = tree, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._lowered:
            self._lowered[key] = self.lower(*arguments)
        return self._lowered[key](*arguments)

    def lower(self, *arguments: Any) -> LoweredMpmdFun:
        """Compiles the tasks of this process for arrays, or for shapes and dtypes."""
        leaves, tree = jax.tree.flatten(arguments)
        prefix = tuple(self.in_shardings)
        shardings = jax.tree.broadcast(prefix, arguments)
        flat_shardings = jax.tree.leaves(shardings)
        program = Recording(self.mpmd_mesh)
        for i, sharding in enumerate(flat_shardings):
            if not isinstance(sharding, NamedSharding):
                raise TypeError(f"`in_shardings` has {sharding!r}. Give a NamedSharding.")
            program.groups_of(sharding.mesh, f"Argument {i}")
        specs = [
            Spec(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, flat_shardings, strict=True)
        ]
        inputs = [MpmdValue(program, spec) for spec in specs]
        token = recording.set(program)
        try:
            result = self.fun(*jax.tree.unflatten(tree, inputs))
        finally:
            recording.reset(token)
        results, out_tree = jax.tree.flatten(result)
        for i, x in enumerate(results):
            if isinstance(x, MpmdValue) and x.donated_to is not None:
                raise ValueError(f"Result {i} of the function was donated to `{x.donated_to}`.")
        donated = flat_donated(arguments, self.donate_argnums)
        steps, outputs, deleted = _compile(program, inputs, results, donated, self.infer_donation)
        shapes = [x.spec if isinstance(x, MpmdValue) else x for x in results]
        read = {id(x) for operation in program.operations for x in operation.inputs}
        used = [id(x) in read and bool(x.sharding.addressable_devices) for x in inputs]
        return LoweredMpmdFun(
            mpmd_mesh=self.mpmd_mesh,
            in_shardings=jax.tree.unflatten(tree, flat_shardings),
            out_shape=jax.tree.unflatten(out_tree, shapes),
            used_inputs=jax.tree.unflatten(tree, used),
            _specs=specs,
            _steps=steps,
            _outputs=outputs,
            _donated=deleted,
        )


def mpmd(
    mpmd_mesh: MpmdMesh,
    *,
    in_shardings: PyTree,
    donate_argnums: int | Sequence[int] | None = None,
    infer_donation: bool = False,
) -> Callable[[Callable], FunctionByHand]:
    """Returns a decorator of a function that calls `task`, `transfer`, `stack` and `slice`.

    Args:
        mpmd_mesh: The mesh with its groups.
        in_shardings: Shardings over meshes of groups: a tree that is a prefix of the tuple of
            arguments.
        donate_argnums: Arguments that the function may delete.
        infer_donation: Whether tasks may reuse the memory of arrays that no later task reads.

    Returns:
        A decorator. The decorated function takes arrays of groups and returns such.
    """
    chosen = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums or ())

    def decorate(fun: Callable) -> FunctionByHand:
        function = FunctionByHand(fun, mpmd_mesh, in_shardings, chosen, infer_donation)
        for name in ("__name__", "__doc__"):
            object.__setattr__(function, name, getattr(fun, name, None))
        return function

    return decorate


def _compile(
    program: Recording,
    inputs: Sequence[MpmdValue],
    results: Sequence[Any],
    donated: Sequence[int],
    infer_donation: bool,
) -> tuple[list[_CompiledOperation], Sequence[tuple[int | None, Any]], list[int]]:
    """Returns the steps of this process, where results are after them, and deleted arguments."""
    operation_outputs = [value for operation in program.operations for value in operation.outputs]
    ids = {id(value): i for i, value in enumerate([*inputs, *operation_outputs])}
    kept = {ids[id(x)] for x in results if isinstance(x, MpmdValue)}
    last: dict[int, int] = {}
    for n, operation in enumerate(program.operations):
        last |= {ids[id(x)]: n for x in (*operation.inputs, *operation.outputs)}
    reusable = _reusable(program, inputs, results, donated, infer_donation)
    steps, connection = [], _Connection.open(program)
    for n, operation in enumerate(program.operations):
        reads = tuple(ids[id(x)] for x in operation.inputs)
        ends = tuple({i for i, at in last.items() if at == n and i >= len(inputs)} - kept)
        is_task = operation.mesh is not None
        run = _runner(operation, reusable[n]) if is_task else _move(operation, connection)
        steps.append(
            _CompiledOperation(run, reads, tuple(ids[id(x)] for x in operation.outputs), ends)
        )
    connection.check_layouts()
    outputs = [(ids[id(x)], None) if isinstance(x, MpmdValue) else (None, x) for x in results]
    in_use = {buffer for x in results if isinstance(x, MpmdValue) for buffer in _buffers(x)}
    deleted = [i for i in donated if not any(b.is_sent or b in in_use for b in _buffers(inputs[i]))]
    return steps, outputs, deleted


def _buffers(value: MpmdValue) -> list[Buffer]:
    return [*value.buffers.values()]


def _reusable(
    program: Recording,
    inputs: Sequence[MpmdValue],
    results: Sequence[Any],
    donated: Sequence[int],
    infer_donation: bool,
) -> list[tuple[int, ...]]:
    """Returns the inputs of each operation whose memory no value needs after it."""
    last: dict[Buffer, int] = {}
    for n, operation in enumerate(program.operations):
        values = (*operation.inputs, *operation.outputs)
        last |= {buffer: n for x in values for buffer in _buffers(x)}
    of_inputs = {buffer for x in inputs for buffer in _buffers(x)}
    may_go = {buffer for i in donated for buffer in _buffers(inputs[i])}
    may_go |= {*last} - of_inputs if infer_donation else set()
    may_go -= {buffer for x in results if isinstance(x, MpmdValue) for buffer in _buffers(x)}
    argnums = []
    for n, operation in enumerate(program.operations):
        reads = Counter(buffer for x in operation.inputs for buffer in _buffers(x))
        free = {b for b in reads if b in may_go and last[b] == n and not b.is_sent}
        argnums.append(
            tuple(
                k
                for k, x in enumerate(operation.inputs)
                if all(b in free and reads[b] == 1 for b in _buffers(x))
            )
        )
    return argnums


def _runner(operation: Operation, donated: tuple[int, ...]) -> Callable:
    everything = (*operation.inputs, *operation.outputs)
    if not any(x.sharding.addressable_devices for x in everything):
        specs = [x.spec for x in operation.outputs]
        return lambda *arrays: map(_elsewhere, specs)
    if not all(x.sharding.is_fully_addressable for x in everything):
        raise ValueError(
            f"Task `{operation.name}` runs on devices of several processes. Give each process a "
            "task of its own, on groups whose devices are its own."
        )
    argnums = tuple(sorted({*operation.donated, *donated}))
    with jax.set_mesh(operation.mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        jitted = operation.jit(donate_argnums=argnums)
        return jitted.lower(*[x.spec for x in operation.inputs]).compile()


def _check_arguments(
    leaves: Sequence[Any], tree: Any, specs: Sequence[Spec], expected: Any
) -> None:
    if tree != expected:
        raise ValueError(f"The arguments are {tree}, and the function was lowered for {expected}.")
    for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
        if not isinstance(x, jax.Array) or (x.shape, x.dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"Argument {i} is {x!r}, and the function was lowered for {spec}.")
        if x.sharding != spec.sharding and not x.sharding.is_equivalent_to(spec.sharding, x.ndim):
            raise ValueError(f"Argument {i} has {x.sharding}, and `in_shardings` {spec.sharding}.")


TIMEOUT = 300.0
"""Time that a step may stand still, in seconds, as in functions with loops."""


@dataclass(frozen=True)
class _Connection:
    """The session that the processes of a job share while they compile, if there are several."""

    session: Session | None = None
    handshake: CompileHandshake | None = None
    layouts: dict[str, str] = field(default_factory=dict)
    peers: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, program: Recording) -> "_Connection":
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


def _move(operation: Operation, connection: _Connection) -> Callable:
    """Returns the function of a `transfer`, a `stack` or a `slice`."""
    match operation.name:
        case "stack":
            return _stack(operation)
        case "slice":
            return lambda array: [_from_shards(x.spec, [array]) for x in operation.outputs]
    return _transfer(operation, connection)


def _elsewhere(spec: Spec) -> jax.Array:
    """Returns an array of another process, without data."""
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, [], dtype=spec.dtype)


def _transfer(operation: Operation, connection: _Connection) -> Callable:
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
        return [_elsewhere(s) if x is None else x for x, s in zip(results, targets, strict=True)]

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
