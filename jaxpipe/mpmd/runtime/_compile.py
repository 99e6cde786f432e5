"""Compiles every program of a step before the first one runs, and equal programs only once.

If a group has several devices, the sharding of a value is known only after the program that
computes it is compiled, so a program waits for those whose values it reads. If every group has a
single device, no program waits.
"""

import ctypes
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._compat import load_on_devices, partition_spec_of
from ...devices import num_cores
from ...ir.graph import Cond, Eqn, Graph, PrimitiveCall, Scan, ShardMap, has_print
from ..api._mesh import MpmdMesh, check_memory_kind, check_spec
from ..ir._fingerprint import fingerprint
from ..ir._program import Buffer, MpmdProgram, RankBuffer, Recv, RunTask
from ._session import CompileHandshake

Specs = tuple[P | None, ...]


@dataclass(frozen=True)
class Executables:
    """The programs of local ranks by index of their `RunTask`, and the sharding of each buffer."""

    programs: Mapping[int, Callable[..., Any]]
    specs: Mapping[RankBuffer, P]


def compile_code(
    program: MpmdProgram,
    mesh: MpmdMesh,
    options: Mapping[str, Any],
    handshake: CompileHandshake | None,
) -> Executables:
    """Compiles the programs that ranks of this process run.

    If there are several processes, `handshake` exchanges the choices of their compilers.
    """
    local = set(mesh.local_ranks)
    single = all(group.size == 1 for group in mesh.unstack)
    specs: dict[RankBuffer, P | Callable[[], P]] = {}
    for buffer, ranks in program.inputs:
        specs |= {(buffer, rank): program.specs.get(buffer.value) or P() for rank in ranks}
    specs |= {
        (buffer, rank): P() for buffer in program.indices for rank in range(program.num_ranks)
    }

    def requested_spec(buffer: Buffer) -> P | None:
        """Returns the sharding of a buffer, None if the compiler chooses it."""
        spec = program.specs.get(buffer.value)
        return P() if spec is None and single else spec

    def spec_of(buffer: Buffer, rank: int) -> P:
        known_spec = specs[buffer, rank]
        return known_spec() if callable(known_spec) else known_spec

    with _ignore_unused_donations(), ThreadPoolExecutor(num_cores()) as pool:
        compiler = _Compiler(mesh, pool, options)
        futures: dict[int, Future] = {}
        for index, instruction in enumerate(program.instructions):
            rank = instruction.rank
            match instruction:
                case RunTask(reads=reads, writes=writes) if rank in local:
                    in_specs = tuple(spec_of(buffer, rank) for buffer in reads)
                    out_specs = tuple(requested_spec(buffer) for buffer in writes)
                    future = compiler.submit(instruction, in_specs, out_specs)
                    futures[index] = future
                    for i, (buffer, spec) in enumerate(zip(writes, out_specs, strict=True)):
                        specs[buffer, rank] = (
                            _output_spec(future, i, mesh.unstack[rank]) if spec is None else spec
                        )
                    if handshake is not None and None in out_specs:
                        future.add_done_callback(_spec_sender(handshake, index, mesh.unstack[rank]))
                case RunTask(writes=writes):
                    remote_specs = [requested_spec(buffer) for buffer in writes]
                    if handshake is not None and None in remote_specs:
                        remote_specs = handshake.get_specs(index, mesh.process_of(rank))
                    pairs = zip(writes, remote_specs, strict=True)
                    specs |= {(b, rank): P() if spec is None else spec for b, spec in pairs}
                case Recv(source=source, buffers=buffers):
                    specs |= {(b, rank): specs[b, source] for b in buffers}
        programs = {index: future.result() for index, future in futures.items()}
    _return_free_memory()
    resolved = {key: spec() if callable(spec) else spec for key, spec in specs.items()}
    return Executables(programs, resolved)


def _return_free_memory() -> None:
    """Returns the memory that compilers have freed to the system, where the C library is glibc."""
    # glibc keeps freed memory in the arenas of the threads that compiled, and programs run in
    # others: a fifth of the peak memory of a process with a small transformer on four CPU devices.
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _ignore_unused_donations() -> Iterator[None]:
    """Ignores the warning that a donated buffer could not be reused because layouts differ.

    One filter covers all threads, because warning filters belong to the process: a thread that
    restores them would do so for the other threads too.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def _output_spec(future: Future, i: int, group: Mesh) -> Callable[[], P]:
    """Returns a function that waits for a compilation and returns its output `i`'s sharding."""
    return lambda: partition_spec_of(future.result().output_shardings[i], group)


def _spec_sender(handshake: CompileHandshake, index: int, group: Mesh) -> Callable[[Future], None]:
    """Returns a callback that sends the shardings that a compiler chose to other processes."""

    def send_specs(future: Future) -> None:
        if future.exception() is None:
            chosen = future.result().output_shardings
            handshake.put_specs(index, [partition_spec_of(sharding, group) for sharding in chosen])

    return send_specs


class _Compiler:
    """Compiles equal programs once, and again for another group if they cannot be loaded there."""

    def __init__(
        self, mesh: MpmdMesh, pool: ThreadPoolExecutor, options: Mapping[str, Any]
    ) -> None:
        self.mesh = mesh
        self.pool = pool
        self.options = options
        self.fingerprints: dict[int, Hashable] = {}
        self.first: dict[Hashable, tuple[int, Future]] = {}
        self.on_rank: dict[tuple[Hashable, int], Future] = {}

    def submit(self, run: RunTask, in_specs: Specs, out_specs: Specs) -> Future:
        if id(run.graph) not in self.fingerprints:
            self.fingerprints[id(run.graph)] = fingerprint(run.graph)
        key = self.fingerprints[id(run.graph)], in_specs, out_specs, run.donated
        here = key, run.rank
        if here not in self.on_rank and key in self.first:
            again = partial(self._load_or_compile, *self.first[key], run, in_specs, out_specs)
            self.on_rank[here] = self.pool.submit(_with_current_settings(again))
        elif here not in self.on_rank:
            compiled = _with_current_settings(partial(self._compile, run, in_specs, out_specs))
            self.on_rank[here] = self.pool.submit(compiled)
            self.first[key] = run.rank, self.on_rank[here]
        return self.on_rank[here]

    def _compile(self, run: RunTask, in_specs: Specs, out_specs: Specs) -> Any:
        mesh = self.mesh.unstack[run.rank]
        graph = _on_submesh(run.graph, mesh, self.mesh.mpmd_axis_name)
        return compile_graph(graph, mesh, in_specs, out_specs, run.donated, self.options)

    def _load_or_compile(
        self, rank: int, first: Future, run: RunTask, in_specs: Specs, out_specs: Specs
    ) -> Any:
        """Loads a compiled program on the devices of another group, or compiles it again."""
        if any(map(has_print, run.graph.eqns)):
            # A program with callbacks cannot be saved.
            return self._compile(run, in_specs, out_specs)
        devices, compiled_for = (list(self.mesh.unstack[r].devices.flat) for r in (rank, run.rank))
        moved = load_on_devices(first.result(), devices, compiled_for)
        return self._compile(run, in_specs, out_specs) if moved is None else moved


def _with_current_settings(f: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `f` for another thread, with the x64 and dtype promotion settings of this one."""
    settings: Any = jax.config
    x64, promotion = settings.jax_enable_x64, settings.jax_numpy_dtype_promotion

    def run() -> Any:
        with jax.enable_x64(x64), jax.numpy_dtype_promotion(promotion):
            return f()

    return run


def compile_graph(
    graph: Graph,
    mesh: Mesh,
    in_specs: Specs,
    out_specs: Specs,
    donated: tuple[int, ...],
    options: Mapping[str, Any],
) -> Any:
    """Compiles a graph for a mesh; a spec of None is replicated for inputs, open for outputs."""
    shapes = [
        jax.ShapeDtypeStruct(
            value.aval.shape,
            value.aval.dtype,
            sharding=NamedSharding(mesh, spec or P()),
            weak_type=value.aval.weak_type,
        )
        for value, spec in zip(graph.inputs, in_specs, strict=True)
    ]
    # Without inputs, which say for which devices, JAX would compile for the first one of all.
    left_to_compiler = None if graph.inputs else P()
    out_specs = tuple(left_to_compiler if spec is None else spec for spec in out_specs)
    out = [None if spec is None else NamedSharding(mesh, spec) for spec in out_specs]
    jitted = jax.jit(graph, out_shardings=out, donate_argnums=donated, keep_unused=True)
    return jitted.lower(*shapes).compile(compiler_options=dict(options))


def _on_submesh(graph: Graph, mesh: Mesh, mpmd_axis: str) -> Graph:
    """Replaces every mesh in a program by that of a group, whatever mesh it was traced with."""
    eqns = tuple(
        replace(eqn, operation=_operation_on_submesh(eqn, mesh, mpmd_axis)) for eqn in graph.eqns
    )
    return replace(graph, eqns=eqns)


def _operation_on_submesh(eqn: Eqn, mesh: Mesh, mpmd_axis: str) -> Any:
    match eqn.operation:
        case Scan() as loop:
            return replace(loop, body=_on_submesh(loop.body, mesh, mpmd_axis))
        case Cond(branches):
            inside = tuple(_on_submesh(branch, mesh, mpmd_axis) for branch in branches)
            return Cond(inside, eqn.operation.num_accumulators)
        case ShardMap() as shards:
            if mpmd_axis in shards.axes and shards.mesh.shape[mpmd_axis] > 1:
                raise ValueError(
                    f"A `shard_map` inside a stage is over the axis {mpmd_axis!r} of all groups, "
                    "along which programs differ. Take the mesh from the context, "
                    "`jax.sharding.get_abstract_mesh()`: there it has size 1."
                )
            return replace(shards, body=_on_submesh(shards.body, mesh, mpmd_axis), mesh=mesh)
        case PrimitiveCall("sharding_constraint", params=params) as plain:
            spec = params["sharding"].spec
            check_spec(spec, mpmd_axis, "`with_sharding_constraint` inside a stage")
            check_memory_kind(
                params["sharding"].memory_kind, mesh, "`with_sharding_constraint` inside a stage"
            )
            sharding = NamedSharding(mesh, spec)
            if not eqn.inputs:  # the constraint of a literal
                assert plain.equation is not None
                (literal,) = plain.equation.invars
                assert isinstance(literal, Literal)
                value = jnp.asarray(literal.val, eqn.outputs[0].aval.dtype)
                return replace(plain, run=lambda: [value], params={}, equation=None)
            params = {"sharding": spec, "dims": params["unconstrained_dims"]}
            run = partial(_constrain, sharding)
            return replace(plain, run=run, params=params, equation=None)
    return eqn.operation


def _constrain(sharding: NamedSharding, x: Any) -> list[Any]:
    return [lax.with_sharding_constraint(x, sharding)]
