"""A function with pipelined loops, as programs of its own for every group of a mesh.

As with `jax.jit`: trace, lower, compile, call. Each stage prints.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..autodiff import Program, Value, program
from ..schedules import Schedule
from ._array import MpmdArray, MpmdMesh, MpmdSharding
from ._code import Buffer, Code
from ._compile import compile_code
from ._execute import Bound, bind
from ._jaxpp_schedules import as_schedule
from ._loops import loop_results
from ._lower import lower
from ._place import placed
from ._session import Agreement, Session, open_session
from ._specs import spread
from ._submesh import check_spec
from ._watchdog import wait


@dataclass(frozen=True)
class Settings:
    """What `mpmd_jit_with_loop` is given beside a function."""

    mesh: MpmdMesh
    in_specs: PyTree
    out_specs: PyTree
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    timeout: float


@dataclass(frozen=True)
class Traced:
    """A function of arrays.

    Attributes:
        in_specs: Of each argument, flat; None where the caller leaves it open.
        out_specs: Of each result, flat, likewise.
    """

    settings: Settings
    program: Program
    in_tree: Any
    out_tree: Any
    in_specs: tuple[P | None, ...]
    out_specs: tuple[P | None, ...]
    donated: frozenset[int]

    def lower(
        self, *, observe: Callable[[str, Any], None] = lambda name, result: None
    ) -> "Lowered":
        """Cuts, places and orders it."""
        mesh = self.settings.mesh
        outer, code = lower(
            self.program,
            mesh.mpmd_dim,
            partial(_checked_schedule, mesh.mpmd_dim),
            donated_inputs=self.donated,
            processes=[mesh.process_of(rank) for rank in range(mesh.mpmd_dim)],
            observe=observe,
        )
        return Lowered(self, outer, code)


@dataclass(frozen=True)
class Lowered:
    """What every rank does, which `str` shows."""

    traced: Traced
    outer: Program
    code: Code

    def __str__(self) -> str:
        return str(self.code)

    def compile(self) -> "Compiled":
        """Compiles every program of this process."""
        traced, code, mesh = self.traced, self.code, self.traced.settings.mesh
        known: dict[Value, P | None] = dict(zip(self.outer.inputs, traced.in_specs, strict=True))
        for (buffer, _), spec in zip(code.outputs, traced.out_specs, strict=True):
            if known.get(buffer.value) is None:
                known[buffer.value] = spec
        specs = {value: P() for value in loop_results(self.outer)} | spread(self.outer, known)

        def spec_of(buffer: Buffer) -> P | None:
            return specs.get(buffer.value)

        session = agreement = None
        if jax.process_count() > 1:
            session = open_session(traced.settings.timeout)
            agreement = Agreement(f"program/{next(session.programs)}")
            agreement.check_program(_digest(str(code)))
        threads = os.cpu_count() or 1
        executables = compile_code(code, mesh, spec_of, num_threads=threads, agreement=agreement)
        bound = bind(code, mesh, executables, session)
        if agreement is not None:
            agreement.wait_for_all()
        return Compiled(self, bound, executables.specs, session)


Specs = Mapping[tuple[Buffer, int], P]


class Compiled:
    """A step that is ready to run.

    Call it with the arguments it was compiled for.
    """

    def __init__(
        self, lowered: Lowered, bound: Bound, specs: Specs, session: Session | None
    ) -> None:
        self.lowered = lowered
        self._specs = specs
        self._bound = bound
        self._acts = [act for _, act in bound.acts]
        self._wait = jax.block_until_ready if session is None else partial(wait, session.dog)
        mesh, code = lowered.traced.settings.mesh, lowered.code
        local = set(mesh.local_ranks)
        self._inputs = [
            [
                (rank, bound.places[buffer, rank], NamedSharding(mesh.unstack[rank], spec))
                for rank in ranks
                if rank in local
                for spec in [specs[buffer, rank]]
            ]
            for buffer, ranks in code.inputs
        ]
        self._outputs = [
            (
                b.value.aval,
                MpmdSharding(mesh, ranks, specs[b, ranks[0]]),
                [(r, bound.places[b, r]) for r in ranks if r in local],
            )
            for b, ranks in code.outputs
        ]

    @property
    def closed_jaxpr(self) -> Code:
        """What every rank does, to be printed."""
        return self.lowered.code

    @property
    def in_shardings(self) -> PyTree[MpmdSharding]:
        """Where the arguments should be, so that calls move nothing."""
        traced, mesh = self.lowered.traced, self.lowered.traced.settings.mesh
        shardings = [
            MpmdSharding(mesh, ranks, self._specs[b, ranks[0]]) if ranks else None
            for b, ranks in self.lowered.code.inputs
        ]
        return traced.in_tree.unflatten(shardings)

    def __call__(self, *args: Any) -> PyTree[MpmdArray]:
        traced = self.lowered.traced
        static = traced.settings.static_argnums
        dynamic = [x for i, x in enumerate(args) if i not in static]
        leaves = traced.in_tree.flatten_up_to(tuple(dynamic))
        slots = list(self._bound.start)
        placed(leaves, self._inputs, slots)
        for act in self._acts:
            act(slots)
        wait = self._wait
        out = [
            MpmdArray(aval.shape, aval.dtype, sharding, {r: slots[p] for r, p in places}, wait)
            for aval, sharding, places in self._outputs
        ]
        return traced.out_tree.unflatten(out)


class MpmdFunction:
    """A function that compiles itself for the arguments it is called with."""

    def __init__(self, f: Callable[..., PyTree], settings: Settings) -> None:
        self._f = f
        self._settings = settings
        self._compiled: dict[Any, Compiled] = {}

    def trace(self, *args: Any) -> Traced:
        """Of arguments only shapes and dtypes are read, and what is static."""
        settings = self._settings
        static = settings.static_argnums
        names = [i for i in range(len(args)) if i not in static]
        dynamic = tuple(args[i] for i in names)
        shapes = jax.tree.map(_shape_of, dynamic)

        def of_dynamic(*dynamic: Any) -> PyTree:
            given = dict(zip(names, dynamic, strict=True))
            return self._f(*(given.get(i, x) for i, x in enumerate(args)))

        mesh = settings.mesh.unstack[0].abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh):
            closed, out = jax.make_jaxpr(of_dynamic, return_shape=True)(*shapes)
        axis = settings.mesh.mpmd_axis_name
        in_specs = _spread_specs(settings.in_specs, dynamic, axis, "in_specs")
        out_specs = _spread_specs(settings.out_specs, out, axis, "out_specs")
        donated = _places_of(names, dynamic, settings.donate_argnums)
        return Traced(
            settings,
            _pure(closed),
            jax.tree.structure(dynamic),
            jax.tree.structure(out),
            in_specs,
            out_specs,
            donated,
        )

    def lower(self, *args: Any) -> Lowered:
        return self.trace(*args).lower()

    def compile(self, *args: Any) -> Compiled:
        """Compiles all programs for arguments like these."""
        return self.lower(*args).compile()

    def __call__(self, *args: Any) -> PyTree[MpmdArray]:
        static = self._settings.static_argnums
        dynamic = [x for i, x in enumerate(args) if i not in static]
        leaves, tree = jax.tree.flatten(dynamic)
        key = tree, tuple(map(_type_of, leaves)), tuple(args[i] for i in static)
        if key not in self._compiled:
            self._compiled[key] = self.compile(*args)
        return self._compiled[key](*args)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _type_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(lambda: jnp.asarray(leaf))


def _pure(closed: Any) -> Program:
    if closed.effects:
        raise ValueError(
            f"The function has the effects {', '.join(map(str, closed.effects))}. Programs of "
            "several groups have no common order: take prints and callbacks out of it."
        )
    return program(closed)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, P)


def _spread_specs(specs: PyTree, tree: PyTree, axis: str, name: str) -> tuple[P | None, ...]:
    """One spec for each leaf, from a tree of them that is a prefix of `tree`."""
    if specs is None:
        return (None,) * len(jax.tree.leaves(tree))
    try:
        spread = jax.tree.map(
            lambda spec, part: [spec] * len(jax.tree.leaves(part)), specs, tree, is_leaf=_is_spec
        )
    except ValueError as error:
        raise ValueError(
            f"`{name}` does not fit the tree it is for: {error} Give a tree of PartitionSpecs "
            "that is a prefix of it."
        ) from None
    flat = tuple(jax.tree.leaves(spread, is_leaf=_is_spec))
    for spec in flat:
        if spec is not None:
            check_spec(spec, axis, f"`{name}`")
    return flat


def _places_of(
    names: Sequence[int], dynamic: tuple[Any, ...], argnums: tuple[int, ...]
) -> frozenset[int]:
    """The places of the leaves of some arguments among all leaves."""
    found, place = set[int](), 0
    for number, argument in zip(names, dynamic, strict=True):
        count = len(jax.tree.leaves(argument))
        if number in argnums:
            found.update(range(place, place + count))
        place += count
    return frozenset(found)


def mpmd_jit_with_loop(
    f: Callable[..., PyTree],
    mpmd_mesh: MpmdMesh,
    *,
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    timeout: float = 300.0,
) -> MpmdFunction:
    """Compiles a function with `treduce` loops into programs of its own for each group.

    Args:
        f: A function of pytrees of arrays, such as a training step. It may have any number of
            loops, or none. What comes before and after them runs on the groups that have what it
            touches: an update of weights where these are.
        mpmd_mesh: The groups.
        in_specs: How arguments are divided within a group: a tree of `PartitionSpec`, a prefix of
            the arguments that are not static. None leaves it open.
        out_specs: The same of results.
        donate_argnums: Arguments whose memory results may take.
        static_argnums: Arguments that are no arrays, hashable. Others give another program.
        timeout: With several processes: how long no program and no transfer may finish, in seconds,
            before every process ends with an error that names what it waits for.

    Raises:
        ValueError: If a spec divides something over the groups; and when compiling, if marks and
            schedule do not fit, or the mesh and the schedule.
    """
    settings = Settings(
        mpmd_mesh,
        in_specs,
        out_specs,
        _numbers(donate_argnums),
        _numbers(static_argnums),
        timeout,
    )
    return MpmdFunction(f, settings)


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _checked_schedule(num_ranks: int, schedule: Any, num_microbatches: int) -> Schedule:
    checked = as_schedule(schedule, num_microbatches)
    if len(checked.programs) != num_ranks:
        raise ValueError(
            f"The schedule is for {len(checked.programs)} ranks, and the mesh has {num_ranks} "
            "groups. Give as many of one as of the other."
        )
    return checked
