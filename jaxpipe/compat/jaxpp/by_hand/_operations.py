"""Operations of a program that is written by hand, recorded in the order of the calls.

A value stands for an array of the program: its shape, its dtype and its sharding over the mesh of
the groups that hold it. Functions take values and return new ones; nothing runs.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ....mpmd.api import MpmdMesh as _MpmdMesh

Spec = jax.ShapeDtypeStruct
"""Shape, dtype and sharding."""


class MpmdMesh(_MpmdMesh):
    """A mesh of devices whose groups keep the types of its axes, explicit ones too.

    It is a mesh for programs that are written by hand. Functions with loops take a
    `jaxpipe.mpmd.MpmdMesh`, within whose groups axes are automatic.
    """

    def mpmd_submesh(self, mpmd_indices: Sequence[int]) -> "MpmdMesh":
        """Returns a mesh of the groups with these indices, in the given order."""
        devices = super().mpmd_submesh(mpmd_indices).jax_mesh.devices
        mesh = Mesh(devices, self.jax_mesh.axis_names, axis_types=self.jax_mesh.axis_types)
        return MpmdMesh(mesh, self.mpmd_axis_name)


@dataclass(eq=False)
class Buffer:
    """The memory of an array on one group, which `stack` and `slice` hand on to other values."""

    is_sent: bool = False
    donated_to: str | None = None


class MpmdValue:
    """An array of a program that is being recorded."""

    def __init__(self, program: "Recording", spec: Spec, buffers: dict[int, Buffer] | None = None):
        self.program = program
        self.spec = spec
        self.shape, self.dtype = spec.shape, spec.dtype
        self.sharding: Any = spec.sharding
        self.ndim = len(spec.shape)
        groups = program.groups_of(spec.sharding.mesh, "An array") if buffers is None else ()
        self.buffers = {group: Buffer() for group in groups} if buffers is None else buffers

    @property
    def donated_to(self) -> str | None:
        """Returns the task that the value, or a part of its memory, was donated to, or None."""
        return next((b.donated_to for b in self.buffers.values() if b.donated_to), None)


@dataclass(frozen=True)
class Operation:
    """A step of a program.

    Attributes:
        jit: Function of the keyword arguments of `jax.jit` that returns the task's function of
            arrays.
        mesh: The mesh of a task, None for what moves arrays.
        donated: Indices of `inputs` that the user donates.
    """

    name: str
    inputs: tuple[MpmdValue, ...]
    outputs: tuple[MpmdValue, ...]
    jit: Callable = jax.jit
    mesh: Mesh | None = None
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recording:
    """A program that is being recorded."""

    mpmd_mesh: _MpmdMesh
    operations: list[Operation] = field(default_factory=list)

    def groups_of(self, mesh: Any, what: str) -> tuple[int, ...]:
        """Returns the groups whose devices form a mesh."""
        ranks = [self.mpmd_mesh.device_mpmd_idx.get(d) for d in mesh.devices.flat]
        groups = tuple(dict.fromkeys(rank for rank in ranks if rank is not None))
        if None in ranks or mesh != self.mpmd_mesh.mpmd_submesh(groups).jax_mesh:
            raise ValueError(
                f"{what} is on the mesh {mesh}, which is not that of one or several groups. Give "
                "a mesh of `mpmd_mesh.unstack` or `mpmd_mesh.mpmd_submesh(groups).jax_mesh`."
            )
        return groups

    def add(
        self,
        name: str,
        inputs: Sequence[MpmdValue],
        specs: Sequence[Spec],
        *,
        buffers: Sequence[dict[int, Buffer]] | None = None,
        **more: Any,
    ) -> list:
        """Adds an operation and returns its outputs, which have memory of their own by default."""
        memory = [None] * len(specs) if buffers is None else buffers
        outputs = [MpmdValue(self, spec, of) for spec, of in zip(specs, memory, strict=True)]
        self.operations.append(Operation(name, tuple(inputs), tuple(outputs), **more))
        return outputs


recording: ContextVar[Recording | None] = ContextVar("recording", default=None)
"""The program that is being recorded."""


def _current(name: str) -> Recording:
    program = recording.get()
    if program is None:
        raise ValueError(f"`{name}` was called outside of a function that `mpmd` decorates.")
    return program


def _values(name: str, leaves: Sequence[Any], program: Recording) -> list[MpmdValue]:
    for i, x in enumerate(leaves):
        if not isinstance(x, MpmdValue) or x.program is not program:
            raise TypeError(
                f"Argument {i} of {name} is a {type(x).__name__}. Give arrays of the program: its "
                "arguments, and results of `task`, `transfer`, `stack` and `slice`."
            )
        if x.donated_to is not None:
            raise ValueError(f"Argument {i} of {name} was donated to `{x.donated_to}`.")
    return list(leaves)


def task(
    fun: Callable | None = None,
    /,
    *,
    out_shardings: Any,
    name: str | None = None,
    in_shardings: Any = None,
    mesh: Mesh | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Callable:
    """Makes a function a task: a program of its own, on one group or on several as one.

    Args:
        fun: A function of arrays and trees of them.
        out_shardings: Shardings of the results over the mesh of the groups, or specs: a tree that
            is a prefix of the results.
        name: The name in messages. Default: that of `fun`.
        in_shardings: Shardings or specs that the arguments must have. Default: those that they
            have.
        mesh: The mesh of the task. Default: that of the shardings.
        donate_argnums: Arguments whose memory the task may reuse. They must not have been sent.

    Returns:
        A function of values of a program, which it also returns.

    Raises:
        ValueError: If shardings are on different meshes, or a donated argument was sent.
        TypeError: If an argument is no array of the program, or `out_shardings` leaves a result
            without a sharding.
    """
    if fun is None:
        return partial(
            task,
            out_shardings=out_shardings,
            name=name,
            in_shardings=in_shardings,
            mesh=mesh,
            donate_argnums=donate_argnums,
        )
    called = name or getattr(fun, "__name__", "task")

    @wraps(fun)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        program = _current("task")
        leaves, tree = jax.tree.flatten((arguments, more))
        inputs = _values(f"task `{called}`", leaves, program)
        donated = flat_donated(arguments, donate_argnums)
        for i in donated:
            if any(buffer.is_sent for buffer in inputs[i].buffers.values()):
                raise ValueError(
                    f"Task `{called}` donates argument {i}, which was sent. Its memory belongs to "
                    "the transfer: leave it out of `donate_argnums`."
                )
        shardings_or_specs = jax.tree.leaves((in_shardings, out_shardings))
        named_shardings = [x for x in shardings_or_specs if isinstance(x, NamedSharding)]
        meshes = {x.sharding.mesh for x in inputs} | {x.mesh for x in named_shardings}
        meshes |= {mesh} - {None}
        if len(meshes) != 1:
            raise ValueError(
                f"Task `{called}` has arrays and shardings on {len(meshes)} meshes: {[*meshes]}. "
                "Give those of one, and move arrays with `transfer`."
            )
        on: Any = meshes.pop()
        program.groups_of(on, f"Task `{called}`")
        _check_inputs(called, inputs, arguments, in_shardings, on)
        named = partial(_named, on, f"`out_shardings` of task `{called}`")
        output_shardings = jax.tree.map(named, out_shardings, is_leaf=_is_none)

        def flat(*leaves: Any) -> list:
            arguments, more = jax.tree.unflatten(tree, leaves)
            result = fun(*arguments, **more)
            results.append(jax.tree.structure(result))
            prefix = jax.tree.broadcast(output_shardings, result)
            shardings.append(jax.tree.leaves(prefix))
            return jax.tree.leaves(result)

        results: list[Any] = []
        shardings: list[Any] = []
        with jax.set_mesh(on):
            shapes = jax.eval_shape(flat, *[x.spec for x in inputs])
        specs = [
            Spec(x.shape, x.dtype, sharding=s) for x, s in zip(shapes, shardings[0], strict=True)
        ]
        jit = partial(jax.jit, flat, out_shardings=shardings[0])
        outputs = program.add(called, inputs, specs, jit=jit, mesh=on, donated=donated)
        for buffer in (buffer for i in donated for buffer in inputs[i].buffers.values()):
            buffer.donated_to = called
        return jax.tree.unflatten(results[0], outputs)

    return wrapped


def flat_donated(arguments: tuple, donate_argnums: Any) -> tuple[int, ...]:
    """Returns the indices of donated leaves, of the indices of arguments, one of these or None."""
    chosen = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums or ()
    is_donated = [i in chosen for i, x in enumerate(arguments) for _ in jax.tree.leaves(x)]
    return tuple(i for i, donated in enumerate(is_donated) if donated)


def _is_none(x: Any) -> bool:
    return x is None


def _named(mesh: Any, what: str, sharding: Any) -> NamedSharding:
    if isinstance(sharding, PartitionSpec):
        return NamedSharding(mesh, sharding)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{what} has {sharding!r}. Give a NamedSharding, or a PartitionSpec, for each array."
        )
    return sharding


def _check_inputs(
    name: str, inputs: Sequence[MpmdValue], arguments: Any, in_shardings: Any, mesh: Any
) -> None:
    if in_shardings is None:
        return
    of_task = in_shardings if isinstance(in_shardings, tuple) else (in_shardings,)
    input_shardings = jax.tree.broadcast(of_task, arguments, is_leaf=_is_none)
    what = f"`in_shardings` of task `{name}`"
    for x, sharding in zip(
        inputs, jax.tree.leaves(input_shardings, is_leaf=_is_none), strict=False
    ):
        if sharding is None:
            continue
        if not _named(mesh, what, sharding).is_equivalent_to(x.sharding, x.ndim):
            raise ValueError(f"{what} has {sharding}, and the argument {x.sharding}.")


class TransferFuture:
    """A transfer that has started."""

    def __init__(self, tree: Any, values: Sequence[MpmdValue]):
        self._tree, self._values, self._is_done = tree, values, False

    def done(self) -> Any:
        """Returns the arrays on the groups that receive them. It may be called once."""
        if self._is_done:
            raise RuntimeError("`done` of a transfer was called twice. Keep what it returns.")
        self._is_done = True
        return jax.tree.unflatten(self._tree, self._values)


def transfer(arrays: Any, *, out_shardings: Any) -> TransferFuture:
    """Starts to send arrays to other groups.

    Args:
        arrays: A tree of values.
        out_shardings: A NamedSharding over the mesh of another group, with the spec of the array,
            for each array: a tree that is a prefix of `arrays`.

    Returns:
        A future, whose `done()` returns a tree like `arrays`.

    Raises:
        NotImplementedError: If an array would have another spec than before.
        ValueError: If there is no array, or a group would send to itself.
        TypeError: If an array is no array of the program, or has no NamedSharding.
    """
    program = _current("transfer")
    leaves, tree = jax.tree.flatten(arrays)
    if not leaves:
        raise ValueError("`transfer` is given no arrays. Give at least one.")
    inputs = _values("transfer", leaves, program)
    target_shardings = jax.tree.broadcast(out_shardings, arrays, is_leaf=_is_none)
    specs = []
    for x, to in zip(inputs, jax.tree.leaves(target_shardings, is_leaf=_is_none), strict=True):
        if not isinstance(to, NamedSharding):
            raise TypeError(
                f"`out_shardings` of `transfer` has {to!r}. Give a NamedSharding over the mesh of "
                "the group that receives the array."
            )
        same = NamedSharding(x.sharding.mesh, to.spec, memory_kind=to.memory_kind)
        is_same = same == x.sharding or same.is_equivalent_to(x.sharding, x.ndim)
        if not is_same or same.mesh.axis_sizes != to.mesh.axis_sizes:
            raise NotImplementedError(
                f"`transfer` is given an array with {x.sharding} and the sharding {to}. Give a "
                f"NamedSharding with the array's {x.sharding.spec}, and reshard in a task."
            )
        groups = (program.groups_of(s.mesh, "An array of `transfer`") for s in (x.sharding, to))
        if {*next(groups)} & {*next(groups)}:
            raise ValueError(f"`transfer` is given an array of {x.sharding.mesh} for {to.mesh}.")
        specs.append(Spec(x.shape, x.dtype, sharding=to))
        for buffer in x.buffers.values():
            buffer.is_sent = True
    return TransferFuture(tree, program.add("transfer", inputs, specs))


def stack(*arrays: Any) -> Any:
    """Makes one array of arrays of several groups; nothing moves between devices.

    Arrays of one group each that are not sharded along the axis of the groups get a new first dim,
    which is: each device copies its shard. Those whose first dim is sharded so already are
    concatenated without a copy.

    Raises:
        ValueError: If a group has several of the arrays, or they differ in shape or spec.
    """
    program = _current("stack")
    inputs, axis = _values("stack", arrays, program), program.mpmd_mesh.mpmd_axis_name
    if not inputs:
        raise ValueError("`stack` is given no arrays. Give at least one.")
    groups = [program.groups_of(x.sharding.mesh, "An array of `stack`") for x in inputs]
    every = [group for one in groups for group in one]
    first, has_dim = inputs[0], _first_axis(inputs[0]) == axis
    extents = {x.shape[0] / len(g) if has_dim else 1 for x, g in zip(inputs, groups, strict=True)}
    kinds = {(x.shape[has_dim:], x.dtype, x.sharding.spec) for x in inputs}
    if len({*every}) < len(every) or len(kinds) > 1 or len(extents) > 1:
        raise ValueError(
            f"`stack` is given arrays {[(x.shape, x.sharding.spec) for x in inputs]} of the groups "
            f"{groups}. Give arrays of one shape and spec, of different groups."
        )
    if not has_dim and any(len(g) > 1 for g in groups):
        raise ValueError(f"`stack` is given an array that the groups {groups} have as replicas.")
    mesh, spec = program.mpmd_mesh.mpmd_submesh(every).jax_mesh, first.sharding.spec
    extent = int(extents.pop() * len(every))
    shape = (extent, *first.shape[has_dim:])
    spec = spec if has_dim else spec.update(partitions=(axis, *spec.partitions))
    specs = [Spec(shape, first.dtype, sharding=NamedSharding(mesh, spec))]
    shared = [dict(pair for x in inputs for pair in x.buffers.items())] if has_dim else None
    (stacked,) = program.add("stack", inputs, specs, buffers=shared)
    return stacked


def slice(array: Any, groups: Sequence[int | Sequence[int]]) -> tuple[Any, ...]:
    """Takes an array of several groups apart, without a copy.

    Args:
        array: A value. Its first dim may be sharded over the groups: then each result has a part.
        groups: The groups of each result, in the order of the array's mesh.

    Returns:
        A value for each entry of `groups`.

    Raises:
        ValueError: If `groups` do not partition the groups of the array in their order.
    """
    program = _current("slice")
    (x,) = _values("slice", [array], program)
    parts = [(g,) if isinstance(g, int) else tuple(g) for g in groups]
    own = program.groups_of(x.sharding.mesh, "The array of `slice`")
    if tuple(group for part in parts for group in part) != own or not all(parts):
        raise ValueError(f"`groups` is {groups}, and the array is on {own}. Partition these.")
    divided = _first_axis(x) == program.mpmd_mesh.mpmd_axis_name
    specs = []
    for part in parts:
        mesh = program.mpmd_mesh.mpmd_submesh(part).jax_mesh
        shape = (x.shape[0] // len(own) * len(part), *x.shape[1:]) if divided else x.shape
        specs.append(Spec(shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)))
    shared = [{group: x.buffers[group] for group in part} for part in parts]
    return tuple(program.add("slice", [x], specs, buffers=shared))


def _first_axis(x: MpmdValue) -> Any:
    return (*x.sharding.spec, None)[0] if x.ndim else None
