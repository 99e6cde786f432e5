"""A function with pipelined loops, as programs of its own for every group of a mesh."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding
from jaxtyping import PyTree

from .. import schedules
from ..autodiff import Program, program
from ._array import MpmdArray, MpmdMesh, MpmdSharding
from ._compiled import Compiled, Lowered, Settings, Traced
from ._reduce import Last, treduce_i
from ._submesh import check_spec

_LOG = logging.getLogger("jaxpipe.mpmd")


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
        in_places = _spread(settings.in_specs, dynamic, settings.mesh, "in_specs")
        out_places = _spread(settings.out_specs, out, settings.mesh, "out_specs")
        donated = _places_of(names, dynamic, settings.donate_argnums)
        return Traced(
            settings,
            _pure(closed),
            jax.tree.structure(dynamic),
            jax.tree.structure(out),
            tuple(map(_spec_of, in_places)),
            tuple(map(_spec_of, out_places)),
            tuple(x.mpmd_idxs if isinstance(x, MpmdSharding) else None for x in out_places),
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
            if self._compiled:
                _LOG.warning(
                    "%s is compiled once more: it is called with other shapes, dtypes or static "
                    "arguments than before.",
                    getattr(self._f, "__name__", "A step"),
                )
            self._compiled[key] = self.compile(*args)
        return self._compiled[key](*args)


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


def _is_place(x: Any) -> bool:
    return x is None or isinstance(x, P | Sharding | MpmdSharding)


def _spec_of(place: Any) -> P | None:
    return place if place is None or isinstance(place, P) else place.spec


def _spread(places: PyTree, tree: PyTree, mesh: MpmdMesh, name: str) -> tuple[Any, ...]:
    """One spec or sharding for each leaf, from a tree of them that is a prefix of `tree`."""
    if places is None:
        return (None,) * len(jax.tree.leaves(tree))
    try:
        spread = jax.tree.map(
            lambda place, part: [place] * len(jax.tree.leaves(part)),
            places,
            tree,
            is_leaf=_is_place,
        )
    except ValueError as error:
        raise ValueError(
            f"`{name}` does not fit the tree it is for: {error} Give a tree of PartitionSpecs "
            "that is a prefix of it."
        ) from None
    flat = tuple(jax.tree.leaves(spread, is_leaf=_is_place))
    for place in flat:
        spec = _spec_of(place)
        if spec is not None:
            check_spec(spec, mesh.mpmd_axis_name, f"`{name}`")
        if isinstance(place, MpmdSharding):
            mesh.mpmd_submesh(place.mpmd_idxs)  # raises if there are no such groups
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
    in_shardings: PyTree = None,
    out_shardings: PyTree = None,
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
        in_shardings: In place of `in_specs`, a tree of shardings of which only the specs are read.
        out_shardings: In place of `out_specs`, likewise. Of an `MpmdSharding` the groups count too:
            the result is put there. So a function that makes the first weights, given the
            `in_shardings` of a compiled step, makes those of a stage on that stage's group alone.
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
        _specs("in", in_specs, in_shardings),
        _specs("out", out_specs, out_shardings),
        _numbers(donate_argnums),
        _numbers(static_argnums),
        timeout,
    )
    return MpmdFunction(f, settings)


def mpmd_jit_by_yield(
    f: Callable[..., PyTree],
    mpmd_mesh: MpmdMesh,
    *,
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    in_shardings: PyTree = None,
    out_shardings: PyTree = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    timeout: float = 300.0,
) -> MpmdFunction:
    """Compiles a function without a loop: each group runs what stands between two of its marks.

    With `jax.value_and_grad` inside, groups run their backwards in turn as well.

    Args:
        f: A function with a mark at the end of every stage, as many stages as there are groups.
        mpmd_mesh: The groups, in the order of the stages.
        in_specs: As in `mpmd_jit_with_loop`.
        out_specs: As there.
        in_shardings: As there.
        out_shardings: As there.
        donate_argnums: As there.
        static_argnums: As there.
        timeout: As there.

    Raises:
        ValueError: As there.
    """
    schedule = schedules.gpipe(mpmd_mesh.mpmd_dim, 1)

    def once(*args: Any) -> PyTree:
        return treduce_i(lambda _: f(*args), 1, schedule=schedule, operation=Last)

    return mpmd_jit_with_loop(
        once,
        mpmd_mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        timeout=timeout,
    )


def _specs(side: str, specs: PyTree, shardings: PyTree) -> PyTree:
    if shardings is None:
        return specs
    if specs is not None:
        raise ValueError(
            f"Both `{side}_specs` and `{side}_shardings` are given. Give one of them: only the "
            "specs of shardings count, and of results the groups of an `MpmdSharding`."
        )
    return shardings


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)
