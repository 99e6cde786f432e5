"""The stages of compilation of an MPMD function: traced, lowered, compiled, as in `jax.stages`."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ...ir.graph import Graph
from ...schedules import Schedule
from ...schedules.lock_step import check_no_slices
from ..ir._check_graph import check_graph
from ..ir._mpmd_graph import LoweringOptions, MpmdGraph, PipelinedLoop, SlicedSchedule
from ..ir._program import (
    Buffer,
    Delete,
    Instruction,
    MpmdProgram,
    RankBuffer,
    Recv,
    RunTask,
    Send,
    check,
)
from ..passes import LOWERING
from ..runtime._compile import compile_code
from ..runtime._execute import BoundInstruction, BoundProgram, Thunk, bind
from ..runtime._session import CompileHandshake, Session, open_session
from ..runtime._transfers import channel_layouts
from ..runtime._watchdog import report_failure, wait
from ._arguments import (
    ArgumentSlot,
    StaticArguments,
    assign_arguments,
    check_given_once,
    check_types,
    delete_arguments,
    deleted_arguments,
    leaves_like,
)
from ._array import MpmdArray
from ._mesh import MpmdMesh, MpmdSharding, no_ambient_mesh
from ._tasks import as_schedule


@dataclass(frozen=True)
class Settings:
    """The arguments of `mpmd_jit_with_loop` other than the function.

    Attributes:
        names: The names of the two arguments by which the caller gave `in_specs` and `out_specs`.
        timeout: Seconds without a finished program or transfer until a step of several processes
            fails.
    """

    mesh: MpmdMesh
    in_specs: PyTree
    out_specs: PyTree
    names: tuple[str, str]
    static: StaticArguments
    compiler_options: Mapping[str, Any]
    timeout: float


@dataclass(frozen=True)
class Traced:
    """A traced function of arrays.

    Attributes:
        settings: The arguments of `mpmd_jit_with_loop`.
        in_tree: The structure of `(args, kwargs)` without static arguments.
        out_tree: The structure of the result.
        in_specs: The spec of each leaf of the arguments, or None if the compiler chooses.
        out_specs: The spec of each leaf of the result, or None if the compiler chooses.
        in_ranks: The groups that hold each leaf of the arguments, or None if any may be given it.
        out_ranks: The groups of each leaf of the result, or None if the compiler chooses.
        donated: The indices of donated arguments among all leaves.
    """

    settings: Settings
    graph: Graph
    in_tree: Any
    out_tree: Any
    in_specs: tuple[P | None, ...]
    out_specs: tuple[P | None, ...]
    in_ranks: tuple[tuple[int, ...] | None, ...]
    out_ranks: tuple[tuple[int, ...] | None, ...]
    donated: frozenset[int]

    def lower(
        self, *, observe: Callable[[str, Any], None] = lambda name, result: None
    ) -> "Lowered":
        """Applies the passes of `mpmd.passes`.

        `observe` is called with the name and the result of every pass, which `str` shows.
        """
        mesh = self.settings.mesh
        options = LoweringOptions(
            mesh.mpmd_dim,
            partial(_checked_schedule, mesh.mpmd_dim),
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            in_ranks=self.in_ranks,
            out_ranks=self.out_ranks,
            donated_inputs=self.donated,
            processes=tuple(mesh.process_of(rank) for rank in range(mesh.mpmd_dim)),
            mpmd_axis=mesh.mpmd_axis_name,
        )
        return Lowered(self, _lower(self.graph, options, observe))


@dataclass(frozen=True)
class Lowered:
    """A lowered function: the instructions of every rank, which `str` shows.

    Attributes:
        program: The instructions of all ranks.
    """

    traced: Traced
    program: MpmdProgram

    def __str__(self) -> str:
        return str(self.program)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Returns the schedule of each loop, in the order of the program."""
        return self.program.schedules

    def compile(self) -> "Compiled":
        """Compiles every program that this process runs. Collective: every process must call it."""
        traced, program, mesh = self.traced, self.program, self.traced.settings.mesh
        session = handshake = None
        if jax.process_count() > 1:
            session = open_session(traced.settings.timeout)
            handshake = CompileHandshake(f"program/{next(session.programs)}")
            digest = hashlib.sha256(str(program).encode()).hexdigest()[:16]
            handshake.check_program(digest)
        executables = compile_code(program, mesh, traced.settings.compiler_options, handshake)
        bound = bind(program, mesh, executables, session)
        if handshake is not None:
            handshake.wait_for_all(*channel_layouts(program, mesh, executables.specs))
        return Compiled(self, bound, executables.specs, session)


TASK, SEND, RECV, DELETE = map(Primitive, ("task", "send", "recv", "delete"))


class MpmdEqn(NamedTuple):
    """An instruction of a rank, as an equation of a jaxpr whose `primitive.name` says its kind."""

    primitive: Primitive
    params: dict[str, Any]
    invars: tuple[Buffer, ...]
    outvars: tuple[Buffer, ...]


@dataclass(frozen=True)
class ClosedJaxpr:
    """The instructions of all ranks, under JaxPP's names."""

    program: MpmdProgram

    @property
    def eqns(self) -> list[MpmdEqn]:
        """Returns the instructions of all ranks, in an order in which they could run."""
        return list(map(_eqn, self.program.instructions))

    @property
    def jaxpr(self) -> "ClosedJaxpr":
        """Returns `self`: JaxPP's closed jaxpr has its equations in this attribute."""
        return self

    def __str__(self) -> str:
        return str(self.program)


def _eqn(instruction: Instruction) -> MpmdEqn:
    match instruction:
        case RunTask(rank, name, graph, reads, writes, actions, donated, loop):
            params = {
                "task_name": name,
                "mpmd_idx": rank,
                "task_info": tuple((a.stage, a.op, a.microbatch) for a in actions),
                "call_jaxpr": graph,
                "loop": loop,
                "donate_invars": tuple(i in donated for i in range(len(reads))),
            }
            return MpmdEqn(TASK, params, reads, writes)
        case Send(rank, to, buffers):
            return MpmdEqn(SEND, {"mpmd_idx": rank, "tgt_mpmd_idx": to}, buffers, ())
        case Recv(rank, source, buffers):
            return MpmdEqn(RECV, {"mpmd_idx": rank, "src_mpmd_idx": source}, (), buffers)
        case Delete(rank, buffers):
            return MpmdEqn(DELETE, {"mpmd_idx": rank}, buffers, ())


Specs = Mapping[RankBuffer, P]

OBSERVER: ContextVar[Callable[["Compiled"], Sequence[Thunk]] | None]
OBSERVER = ContextVar("observer", default=None)
"""A function that returns the thunks that a compiled step runs in place of its own, or None."""


class _ResultSlots(NamedTuple):
    """The type of a result, and the index of its array for each local rank that holds it."""

    aval: Any
    sharding: MpmdSharding
    slot_on: Mapping[int, int]


class Compiled:
    """A compiled function, ready to be called.

    A call takes arguments of the structure, shapes and dtypes that the function was compiled for.
    """

    def __init__(
        self, lowered: Lowered, bound: BoundProgram, specs: Specs, session: Session | None
    ) -> None:
        self.lowered = lowered
        self._bound = bound
        self._specs = specs
        self._session = session
        self._thunks = [thunk for _, thunk in bound.thunks]
        self._wait = jax.block_until_ready if session is None else partial(wait, session.watchdog)
        mesh, program = lowered.traced.settings.mesh, lowered.program
        local = set(mesh.local_ranks)
        self._inputs = [
            [
                ArgumentSlot(
                    rank,
                    bound.slot_of[buffer, rank],
                    NamedSharding(mesh.unstack[rank], specs[buffer, rank]),
                )
                for rank in ranks
                if rank in local
            ]
            for buffer, ranks in program.inputs
        ]
        self._outputs = [
            _ResultSlots(
                b.value.aval,
                MpmdSharding(mesh, ranks, specs[b, ranks[0]]),
                {r: bound.slot_of[b, r] for r in ranks if r in local},
            )
            for b, ranks in program.outputs
        ]

        avals = [buffer.value.aval for buffer, _ in program.inputs]
        self._shapes = [aval.shape for aval in avals]
        self._dtypes = [aval.dtype for aval in avals]
        self._deleted_arguments = deleted_arguments(
            program, lowered.traced.donated, crosses=session is not None
        )

    @property
    def thunks(self) -> Sequence[BoundInstruction]:
        """Returns every instruction of this process, in order, with the thunk that runs it."""
        return self._bound.thunks

    @property
    def slot_of(self) -> Mapping[RankBuffer, int]:
        """Maps each buffer on each local rank to its slot in the list of arrays that thunks use."""
        return self._bound.slot_of

    def with_thunks(self, wrap: Callable[[Instruction, Thunk], Thunk]) -> "Compiled":
        """Returns the same compiled function with wrapped thunks, for example to measure time.

        `wrap` maps an instruction of this process and its thunk to the thunk that runs in its
        place. Programs are not compiled again.
        """
        thunks = tuple(
            BoundInstruction(instruction, wrap(instruction, thunk))
            for instruction, thunk in self._bound.thunks
        )
        bound = replace(self._bound, thunks=thunks)
        return Compiled(self.lowered, bound, self._specs, self._session)

    @property
    def closed_jaxpr(self) -> ClosedJaxpr:
        """Returns the instructions of all ranks, to print or to read as equations."""
        return ClosedJaxpr(self.lowered.program)

    @property
    def programs(self) -> Mapping[str, jax.stages.Compiled]:
        """Returns the compiled XLA programs of this process by `name@rank`, such as `fwd_0__1@0`.

        If the function has several loops, a name begins with its loop: `loop_1.fwd_0__1@0`.
        Each has JAX's `as_text`, `cost_analysis` and `memory_analysis`. Equal tasks share one
        program.
        """
        return self._bound.programs

    @property
    def in_shardings(self) -> PyTree[MpmdSharding]:
        """Returns the shardings that arguments need so that a call moves no array.

        They form a tree like `(args, kwargs)` without static arguments. An argument that no group
        reads has an `MpmdSharding` without groups.
        """
        traced, mesh = self.lowered.traced, self.lowered.traced.settings.mesh
        inputs = zip(self.lowered.program.inputs, traced.in_specs, strict=True)
        shardings = [
            MpmdSharding(mesh, ranks, self._specs[b, ranks[0]] if ranks else spec or P())
            for (b, ranks), spec in inputs
        ]
        return traced.in_tree.unflatten(shardings)

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree[MpmdArray]:
        traced = self.lowered.traced
        arguments, _ = traced.settings.static.split(args, kwargs)
        leaves = leaves_like(traced.in_tree, arguments)
        check_types(arguments, leaves, self._shapes, self._dtypes)
        check_given_once(arguments, leaves, traced.donated)
        slots = list(self._bound.initial)
        with no_ambient_mesh():
            assign_arguments(leaves, self._inputs, slots)
            observe = OBSERVER.get()
            try:
                for thunk in self._thunks if observe is None else observe(self):
                    thunk(slots)
            except Exception as error:
                if self._session is not None:
                    report_failure(self._session.watchdog, error)
                raise
        wait = self._wait
        out = [
            MpmdArray.of_ranks(
                {rank: slots[slot] for rank, slot in slot_on.items()},
                sharding,
                aval.shape,
                aval.dtype,
                weak_type=aval.weak_type,
                wait=wait,
            )
            for aval, sharding, slot_on in self._outputs
        ]
        if self._deleted_arguments:
            delete_arguments(leaves, self._deleted_arguments)
        return traced.out_tree.unflatten(out)


def _lower(
    traced: Graph, options: LoweringOptions, observe: Callable[[str, Any], None]
) -> MpmdProgram:
    """Applies the passes in order, and checks and shows to `observe` the result of each."""
    result: Any = MpmdGraph(traced.inputs, traced.eqns, traced.outputs, options)
    checked: tuple[PipelinedLoop, ...] = ()
    for one_pass in LOWERING:
        result = one_pass(result)
        if isinstance(result, MpmdGraph):
            check_graph(result, checked)
            checked = result.loops
        else:
            check(result)
        observe(one_pass.__name__, result)
    assert isinstance(result, MpmdProgram), "the last pass returns a program"
    return result


def _checked_schedule(num_ranks: int, schedule: Any, num_microbatches: int) -> Schedule:
    has_parts = isinstance(schedule, SlicedSchedule)
    whole = schedule.schedule if has_parts else schedule
    checked = as_schedule(whole, num_microbatches, num_ranks)
    if len(checked.programs) != num_ranks:
        raise ValueError(
            f"The schedule is for {len(checked.programs)} ranks, and the mesh has {num_ranks} "
            "groups. Give as many of one as of the other."
        )
    if not has_parts:
        check_no_slices(checked)
    return checked
