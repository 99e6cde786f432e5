"""Every program of a step, compiled before the first one runs; equal ones once.

Where a group has several devices, how a value is divided is known once the program that makes it
is compiled, so programs wait for those whose values they read. On single devices none waits.
"""

import ctypes
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._compat import load_on_devices, partition_spec_of
from ...ir import Graph, has_print
from ..api._mesh import MpmdMesh
from ..ir._program import Buffer, Code, Receive, Run
from ..passes._fingerprint import content
from ._session import Agreement
from ._submesh import on_submesh

Specs = tuple[PartitionSpec | None, ...]


@dataclass(frozen=True)
class Executables:
    """Compiled programs.

    Attributes:
        programs: By the place of their `Run` in the code. Only those of local ranks.
        specs: How each buffer is divided on each rank that has it.
    """

    programs: Mapping[int, Callable[..., Any]]
    specs: Mapping[tuple[Buffer, int], PartitionSpec]


def check_threads(mesh: MpmdMesh) -> None:
    """Checks that XLA's threads outnumber the CPU devices that wait in them for each other.

    A program of several devices that was started on one of them waits in a thread of XLA's pool for
    the others. If all threads wait, none is left for what they wait for.

    Raises:
        ValueError: If they may run out.
    """
    devices = [device for rank in mesh.local_ranks for device in mesh.unstack[rank].devices.flat]
    if len(devices) == len(mesh.local_ranks) or devices[0].platform != "cpu":
        return
    threads = int(os.environ.get("NPROC", os.cpu_count() or 1))
    if threads <= 2 * len(devices):
        raise ValueError(
            f"Groups have several CPU devices, {len(devices)} in this process, and XLA has "
            f"{threads} threads, which can all come to wait for each other. Set "
            f"NPROC={max(64, 4 * len(devices))} before JAX is imported, or call "
            "`jaxpipe.cli.emulate_devices`."
        )


def compile_code(
    code: Code,
    mesh: MpmdMesh,
    known: Callable[[Buffer], PartitionSpec | None],
    *,
    options: Mapping[str, Any],
    num_threads: int,
    agreement: Agreement | None = None,
) -> Executables:
    """Compiles what ranks of this process run.

    Args:
        code: Complete.
        mesh: The groups.
        known: How a buffer is divided, if that is decided; None leaves it to the compiler.
        options: The options of XLA that the caller gives.
        num_threads: How many programs are compiled at a time.
        agreement: How processes tell each other what their compilers decide, if there are several.
    """
    local = set(mesh.local_ranks)
    single = all(group.size == 1 for group in mesh.unstack)
    specs: dict[tuple[Buffer, int], PartitionSpec | Callable[[], PartitionSpec]] = {}
    for buffer, ranks in code.inputs:
        specs |= {(buffer, rank): known(buffer) or P() for rank in ranks}
    specs |= {(buffer, rank): P() for buffer in code.indices for rank in range(code.num_ranks)}

    def decided(buffer: Buffer) -> PartitionSpec | None:
        """None where the compiler decides; on a single device there is nothing to decide."""
        spec = known(buffer)
        return P() if spec is None and single else spec

    def spec_of(buffer: Buffer, rank: int) -> PartitionSpec:
        found = specs[buffer, rank]
        return found() if callable(found) else found

    with _vain_donations(), ThreadPoolExecutor(num_threads) as pool:
        compiler = _Compiler(mesh, pool, options)
        futures: dict[int, Future] = {}
        for place, instruction in enumerate(code.instructions):
            rank = instruction.rank
            match instruction:
                case Run(reads=reads, writes=writes) if rank in local:
                    given = tuple(spec_of(buffer, rank) for buffer in reads)
                    wanted = tuple(decided(buffer) for buffer in writes)
                    future = compiler.submit(instruction, given, wanted)
                    futures[place] = future
                    for i, (buffer, spec) in enumerate(zip(writes, wanted, strict=True)):
                        specs[buffer, rank] = (
                            _later(future, i, mesh.unstack[rank]) if spec is None else spec
                        )
                    if agreement is not None and None in wanted:
                        future.add_done_callback(_teller(agreement, place, mesh.unstack[rank]))
                case Run(writes=writes):
                    decided_there = [decided(buffer) for buffer in writes]
                    if agreement is not None and any(spec is None for spec in decided_there):
                        told = agreement.ask_specs(place, mesh.process_of(rank))
                        specs |= {(b, rank): spec for b, spec in zip(writes, told, strict=True)}
                    else:
                        pairs = zip(writes, decided_there, strict=True)
                        specs |= {(b, rank): P() if spec is None else spec for b, spec in pairs}
                case Receive(source=source, buffers=buffers):
                    specs |= {(b, rank): specs[b, source] for b in buffers}
        programs = {place: future.result() for place, future in futures.items()}
    _return_free_memory()
    resolved = {key: spec() if callable(spec) else spec for key, spec in specs.items()}
    return Executables(programs, resolved)


P = PartitionSpec


def _return_free_memory() -> None:
    """Returns the memory that compilers have freed to the system, where the C library is glibc.

    glibc keeps it in the arenas of the threads that compiled. Programs run in other threads, whose
    buffers would come on top of it: of a small transformer on four CPU devices that was a fifth of
    the process's peak.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _vain_donations() -> Iterator[None]:
    """What is donated and turns out to be laid out otherwise is just not used again.

    Around all threads, as what is ignored is a setting of the process: a thread that restores it
    would do so for the others too.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def _later(future: Future, i: int, group: Mesh) -> Callable[[], PartitionSpec]:
    return lambda: partition_spec_of(future.result().output_shardings[i], group)


def _teller(agreement: Agreement, place: int, group: Mesh) -> Callable[[Future], None]:
    def tell(future: Future) -> None:
        if future.exception() is None:
            chosen = future.result().output_shardings
            agreement.tell_specs(place, [partition_spec_of(sharding, group) for sharding in chosen])

    return tell


class _Compiler:
    """Compiles equal programs once, and for each group of devices again only if it must."""

    def __init__(
        self, mesh: MpmdMesh, pool: ThreadPoolExecutor, options: Mapping[str, Any]
    ) -> None:
        self.mesh = mesh
        self.pool = pool
        self.options = options
        self.contents: dict[int, Hashable] = {}
        self.first: dict[Hashable, tuple[int, Future]] = {}
        self.on_rank: dict[tuple[Hashable, int], Future] = {}

    def submit(self, run: Run, given: Specs, wanted: Specs) -> Future:
        if id(run.program) not in self.contents:
            self.contents[id(run.program)] = content(run.program)
        key = self.contents[id(run.program)], given, wanted, run.donated
        here = key, run.rank
        if here not in self.on_rank and key in self.first:
            again = partial(self._again, *self.first[key], run, given, wanted)
            self.on_rank[here] = self.pool.submit(_as_here(again))
        elif here not in self.on_rank:
            compiled = _as_here(partial(self._compile, run, given, wanted))
            self.on_rank[here] = self.pool.submit(compiled)
            self.first[key] = run.rank, self.on_rank[here]
        return self.on_rank[here]

    def _compile(self, run: Run, given: Specs, wanted: Specs) -> Any:
        mesh = self.mesh.unstack[run.rank]
        program = on_submesh(run.program, mesh, self.mesh.mpmd_axis_name)
        return compile_program(program, mesh, given, wanted, run.donated, self.options)

    def _again(self, rank: int, first: Future, run: Run, given: Specs, wanted: Specs) -> Any:
        """The same program on the devices of another group."""
        if any(map(has_print, run.program.steps)):
            return self._compile(run, given, wanted)  # a program with callbacks cannot be saved
        devices, others = (list(self.mesh.unstack[r].devices.flat) for r in (rank, run.rank))
        moved = load_on_devices(first.result(), devices, others)
        return self._compile(run, given, wanted) if moved is None else moved


def _as_here(f: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `f` for another thread, with the x64 and dtype promotion settings of this one."""
    settings: Any = jax.config
    x64, promotion = settings.jax_enable_x64, settings.jax_numpy_dtype_promotion

    def run() -> Any:
        with jax.enable_x64(x64), jax.numpy_dtype_promotion(promotion):
            return f()

    return run


def compile_program(
    program: Graph,
    mesh: Mesh,
    given: Specs,
    wanted: Specs,
    donated: tuple[int, ...],
    options: Mapping[str, Any],
) -> Any:
    """Compiles a program for the devices of a mesh."""
    shapes = [
        jax.ShapeDtypeStruct(
            value.aval.shape,
            value.aval.dtype,
            sharding=NamedSharding(mesh, spec or P()),
            weak_type=value.aval.weak_type,
        )
        for value, spec in zip(program.inputs, given, strict=True)
    ]
    out = [None if spec is None else NamedSharding(mesh, spec) for spec in wanted]
    jitted = jax.jit(program, out_shardings=out, donate_argnums=donated, keep_unused=True)
    return jitted.lower(*shapes).compile(compiler_options=_own_options(mesh) | dict(options))


def _own_options(mesh: Mesh) -> dict[str, Any]:
    # Programs are compiled side by side, so XLA:CPU need not divide each among threads as well: of
    # a small transformer that took a quarter more of the processor's time.
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_cpu_parallel_codegen_split_count": "1"} if is_cpu else {}
