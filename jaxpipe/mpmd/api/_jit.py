"""Compiles a function with pipelined loops into separate programs for the groups of a mesh."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..._compat import trace_settings, translated_shardings, without_refs
from ..._input import clause, shorten
from ...ir.graph import Graph, any_equation, effects_of, to_graph
from ...schedules import builders
from ...sharding.specs import axes_of, without_axes
from ...xla.compiler_flags import FLAGS, StepTraits, default_options
from ..ir._marks import tracing
from ..ir._reduce import Last, treduce_i
from ._arguments import broadcast_prefix, static_arguments, type_of
from ._array import MpmdArray
from ._in_group import constraints_in_group, shard_map_in_group, sharding_in_group
from ._mesh import (
    DELAYED,
    MpmdMesh,
    MpmdSharding,
    check_memory_kind,
    check_reduced,
    no_ambient_mesh,
)
from ._stages import Compiled, Lowered, Settings, Traced

_LOG = logging.getLogger("jaxpipe.mpmd")


class MpmdFunction:
    """A function that is compiled at its first call, and again for arguments of another type."""

    def __init__(self, jitted: Any, settings: Settings) -> None:
        self._jitted = jitted
        self._settings = settings
        # By types, and by the groups of arguments; with loops, which do not read these, by ().
        self._compiled: dict[Any, dict[Any, Compiled]] = {}

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces the function for arguments of these shapes and dtypes.

        Arrays may be given as `jax.ShapeDtypeStruct`.
        """
        settings = self._settings
        held_on = _groups_of(jax.tree.leaves(settings.static.split(args, kwargs)[0]))
        static = settings.static
        argnums = static.indices(len(args))
        args = tuple(x if i in argnums else jax.tree.map(_shape_of, x) for i, x in enumerate(args))
        kwargs = {
            name: x if name in static.argnames else jax.tree.map(_shape_of, x)
            for name, x in kwargs.items()
        }
        with tracing():
            traced = _traced(self._jitted, settings.mesh, args, kwargs)
        in_info, out_info = traced.args_info, traced.out_info
        in_leaves = _leaf_shardings(settings.in_specs, in_info[0], settings.mesh, settings.names[0])
        out_leaves = _leaf_shardings(settings.out_specs, out_info, settings.mesh, settings.names[1])
        named = jax.tree.leaves(in_info[1])
        donated = [i for i, x in enumerate(jax.tree.leaves(in_info)) if x.donated]
        return Traced(
            settings=settings,
            graph=_to_pure_graph(traced.jaxpr),
            in_tree=jax.tree.structure(in_info),
            out_tree=jax.tree.structure(out_info),
            in_specs=(*map(_spec_of, in_leaves), *(None for _ in named)),
            out_specs=tuple(map(_spec_of, out_leaves)),
            in_ranks=held_on,
            out_ranks=tuple(
                leaf.mpmd_idxs or None if isinstance(leaf, MpmdSharding) else None
                for leaf in out_leaves
            ),
            donated=frozenset(donated),
        )

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the function for arguments like these, and lowers it to the tasks of each rank."""
        return self.trace(*args, **kwargs).lower()

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compiles all programs for arguments like these."""
        return self.lower(*args, **kwargs).compile()

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree[MpmdArray]:
        dynamic, static = self._settings.static.split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        key = tree, tuple(map(type_of, leaves)), static, trace_settings()
        try:
            by_groups = self._compiled.setdefault(key, {})
        except TypeError:
            raise ValueError(
                f"The static arguments {shorten(repr(static.values()), 300)} are not "
                "hashable. Give hashable values, such as tuples in place of lists."
            ) from None
        compiled = by_groups.get(()) or by_groups.get(_groups_of(leaves))
        if compiled is None:
            if any(self._compiled.values()):
                _LOG.warning(
                    "%s is compiled once more: it is called with other shapes, dtypes, groups or "
                    "static arguments, or under other settings of JAX, than before.",
                    getattr(self._jitted, "__name__", "A step"),
                )
            compiled = self.compile(*args, **kwargs)
            by_groups[() if compiled.lowered.schedules else _groups_of(leaves)] = compiled
        try:
            return compiled(*args, **kwargs)
        except AttributeError:  # tracers have no sharding, and looking at each would cost time
            if not any(isinstance(leaf, Tracer) for leaf in leaves):
                raise
            raise ValueError(
                "A step of programs for each rank is called inside of `jax.jit`, `jax.grad` or "
                "another transformation, which cannot trace it. Call it outside of them."
            ) from None


def _traced(jitted: Any, mesh: MpmdMesh, args: Any, kwargs: Any) -> Any:
    """Returns a trace with the mesh of one group, or of all groups if the function names it.

    A constraint to a `NamedSharding` over all groups gives its result a type on that mesh, and JAX
    refuses to combine it with a type on the mesh of one group.
    """
    translated = translated_shardings(
        partial(sharding_in_group, mesh),
        partial(shard_map_in_group, mesh),
        constraints_in_group(mesh) if mesh.has_explicit_axes else None,
    )
    with no_ambient_mesh():
        try:
            with translated, jax.sharding.use_abstract_mesh(mesh.unstack[0].abstract_mesh):
                traced = jitted.trace(*args, **kwargs)
            if not _changes_mesh(traced.jaxpr.jaxpr, mesh.mpmd_axis_name):
                return traced
        except ValueError as error:
            if "educed axes can only refer to" in str(error):
                raise ValueError(f"{clause(error)}. {DELAYED.format(axis='fsdp')}") from None
            if "should match the mesh passed to shard_map" in str(error):
                raise ValueError(
                    f"{clause(error)}. Call `jax.shard_map` inside of `fun`, where it may name the "
                    "mesh of all groups, or leave out its `mesh`: then it takes that of a group."
                ) from None
            if "cannot change the size of the mesh" not in str(error):
                raise
        with jax.sharding.use_abstract_mesh(mesh.auto_mesh.abstract_mesh):
            return jitted.trace(*args, **kwargs)


def _changes_mesh(jaxpr: Any, axis: str) -> bool:
    """Returns whether an equation of `jaxpr` reshards to a mesh of several groups."""
    return any_equation(
        jaxpr,
        lambda e: (
            e.primitive.name == "reshard" and e.params["dst_sharding"].mesh.shape.get(axis, 1) > 1
        ),
    )


def _groups_of(leaves: Sequence[Any]) -> tuple[tuple[int, ...] | None, ...]:
    """Returns the groups that hold each array, None for arrays of no group."""
    return tuple(x.mpmd_idxs or None if isinstance(x, MpmdArray) else None for x in leaves)


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | MpmdArray | jax.ShapeDtypeStruct):
        shape, dtype, weak_type = type_of(leaf)
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return leaf


def _to_pure_graph(closed: Any) -> Graph:
    closed = without_refs(closed)
    if names := effects_of(closed, prints=True):
        raise ValueError(
            f"The function has the effects of {', '.join(names)}. Programs of several groups have "
            "no common order: use `jax.debug.print` or `jax.debug.callback` without `ordered`, or "
            "return what is to be shown."
        )
    return to_graph(closed, prints=True)


def _spec_of(sharding: Any) -> P | None:
    return sharding if sharding is None or isinstance(sharding, P) else sharding.spec


def _leaf_shardings(prefix: PyTree, tree: PyTree, mesh: MpmdMesh, name: str) -> list[Any]:
    """Returns a spec or sharding for each leaf of `tree`, of which `prefix` is a prefix tree.

    The axis of the groups is dropped from specs, as it has size 1 within a group.
    """
    prefix = tuple(prefix) if isinstance(prefix, list) and isinstance(tree, tuple) else prefix
    axis, shardings = mesh.mpmd_axis_name, []
    for path, sharding in broadcast_prefix(prefix, tree, name):
        if isinstance(sharding, MpmdSharding):
            if sharding.mesh_ids:
                mesh.mpmd_submesh(sharding.mpmd_idxs)  # raises if a group is out of range
        elif isinstance(sharding, P):
            check_reduced(sharding, f"`{path}`")
        elif isinstance(sharding, Sharding):
            check_memory_kind(sharding.memory_kind, mesh.jax_mesh, f"`{path}`")
            if not isinstance(sharding, NamedSharding):
                raise ValueError(
                    f"`{path}` is a {type(sharding).__name__}, which has no spec. Give a "
                    "`PartitionSpec`, a `NamedSharding` or an `MpmdSharding`."
                )
            check_reduced(sharding.spec, f"`{path}`")
        spec = _spec_of(sharding)
        if spec is not None and axis in axes_of(spec):
            _LOG.warning(
                "`%s` has the spec %s. Within a group %r has size 1 and divides nothing: the array "
                "is whole on every group that needs it.",
                *(path, spec, axis),
            )
            sharding = without_axes(spec, (axis,))
        shardings.append(sharding)
    return shardings


def mpmd_jit_with_loop(
    fun: Callable[..., PyTree],
    mpmd_mesh: MpmdMesh,
    *,
    in_shardings: PyTree = None,
    out_shardings: PyTree = None,
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    compiler_options: dict[str, Any] | None = None,
    timeout: float = 300.0,
) -> MpmdFunction:
    """Compiles a function with `treduce` loops into separate programs for each group.

    Args:
        fun: A function of pytrees of arrays, such as a training step. It may have any number of
            loops, or none. The code outside of loops runs on the groups that hold its inputs: a
            weight update, for example, on the groups that hold the weights.
        mpmd_mesh: The mesh with its groups.
        in_shardings: The sharding of arguments within a group: a tree of `PartitionSpec`,
            `NamedSharding` or `MpmdSharding`, a prefix of the positional arguments that are not
            static. Only the spec of a sharding is read. None leaves the choice to the compiler,
            which also chooses for keyword arguments.
        out_shardings: The same for results. An `MpmdSharding` also selects the groups of a result:
            a function that makes the first weights, given the `in_shardings` of a compiled step,
            makes the weights of a stage on the group of that stage only.
        in_specs: Another name of `in_shardings`.
        out_specs: Another name of `out_shardings`.
        static_argnums: Indices of hashable arguments that are not arrays. The function is compiled
            again for other values.
        static_argnames: Names of static arguments.
        donate_argnums: Indices of arguments whose memory results may reuse. As with `jax.jit`, the
            call deletes the donated arguments that have the shape and dtype of a result.
        donate_argnames: Names of donated arguments.
        compiler_options: XLA options for every program. Default: those of the table of flags.
        timeout: Seconds without a finished program or transfer, with several processes, after which
            every process ends with an error that names the program or transfer it waits for.

    Returns:
        A function that is called like `fun`.

    Raises:
        ValueError: If an argument is both donated and static, or `fun` does not have it. When
            compiling: if specs do not fit arguments and results, a sharding asks for other than the
            default memory, or the schedule does not fit the marks or the mesh.

    Example:
        >>> from jaxpipe import mpmd
        >>> from jaxpipe.sharding import make_mesh
        >>> def step(w, xs):
        ...     stages = lambda x: (mpmd.mark_stage_end(x * w) * w).sum()
        ...     return mpmd.treduce(stages, xs, schedule="gpipe", operation=mpmd.Add)
        >>> mesh = MpmdMesh(make_mesh({"stage": 2}, devices=jax.devices()[:2]), "stage")
        >>> float(mpmd_jit_with_loop(step, mesh)(2.0, jax.numpy.ones((3, 4))))
        48.0
    """
    jitted = jax.jit(  # checks the names of arguments, and traces
        fun,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    if AxisType.Explicit in mpmd_mesh.unstack[0].axis_types:
        raise ValueError(
            f"The groups of `mpmd_mesh`, a {type(mpmd_mesh).__name__}, have explicit axes. Give a "
            "`jaxpipe.mpmd.MpmdMesh`, within whose groups axes are automatic."
        )
    if compiler_options is None:
        device = mpmd_mesh.jax_mesh.devices.flat[0]
        traits = StepTraits(device.platform, device.device_kind, "mpmd", program_per_rank=True)
        compiler_options = default_options(FLAGS, traits, device)
    settings = Settings(
        mesh=mpmd_mesh,
        in_specs=_given_once("in", in_specs, in_shardings),
        out_specs=_given_once("out", out_specs, out_shardings),
        names=(
            "in_specs" if in_shardings is None else "in_shardings",
            "out_specs" if out_shardings is None else "out_shardings",
        ),
        static=static_arguments(fun, _as_list(static_argnums), _as_list(static_argnames)),
        compiler_options=compiler_options,
        timeout=timeout,
    )
    return MpmdFunction(jitted, settings)


def mpmd_jit_by_yield(
    fun: Callable[..., PyTree],
    mpmd_mesh: MpmdMesh,
    *,
    target_num_stages: int | None = None,
    in_shardings: PyTree = None,
    out_shardings: PyTree = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    compiler_options: dict[str, Any] | None = None,
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    timeout: float = 300.0,
) -> MpmdFunction:
    """Compiles a function without a loop: each group runs the code between two stage marks.

    With `jax.value_and_grad` inside, the groups also run the backwards of their stages in turn.

    Args:
        fun: A function with a mark at the end of every stage.
        mpmd_mesh: The mesh with its groups. Stage i runs on group i modulo the number of groups.
        target_num_stages: The number of stages, a multiple of the number of groups. None means one
            stage for each group.
        in_shardings: The sharding of arguments within a group: a tree of `PartitionSpec`,
            `NamedSharding` or `MpmdSharding`, a prefix of the positional arguments that are not
            static.
        out_shardings: The same for results. An `MpmdSharding` also names the groups of a result.
        static_argnums: Indices of hashable arguments that are not arrays.
        static_argnames: Names of static arguments.
        donate_argnums: Indices of arguments whose memory results may reuse.
        donate_argnames: Names of donated arguments.
        compiler_options: XLA options for every program. Default: those of the table of flags.
        in_specs: Another name of `in_shardings`.
        out_specs: Another name of `out_shardings`.
        timeout: Seconds without a finished program or transfer, with several processes, until the
            step fails.

    Returns:
        A function that is called like `fun`.

    Raises:
        ValueError: If `target_num_stages` is not a multiple of the number of groups, or an argument
            is both donated and static. When compiling: if the number of marks is not the number of
            stages or one less, or specs do not fit arguments and results.
    """
    ranks = mpmd_mesh.mpmd_dim
    chunks, rest = divmod(ranks if target_num_stages is None else target_num_stages, ranks)
    if rest or chunks < 1:
        raise ValueError(
            f"`target_num_stages` is {target_num_stages}, and the mesh has {ranks} groups. Give a "
            f"multiple of {ranks}: every group runs the same number of stages."
        )
    schedule = (
        builders.gpipe(ranks, 1)
        if chunks == 1
        else builders.interleaved_gpipe(ranks, 1, num_chunks=chunks, group_size=1)
    )

    @wraps(fun)
    def once(*args: Any, **kwargs: Any) -> PyTree:
        return treduce_i(lambda _: fun(*args, **kwargs), 1, schedule, Last)

    return mpmd_jit_with_loop(
        once,
        mpmd_mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        in_specs=in_specs,
        out_specs=out_specs,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        compiler_options=compiler_options,
        timeout=timeout,
    )


def _given_once(side: str, specs: PyTree, shardings: PyTree) -> PyTree:
    if shardings is not None and specs is not None:
        raise ValueError(
            f"Both `{side}_specs` and `{side}_shardings` are given. Give one of them: they are two "
            "names of one argument."
        )
    return specs if shardings is None else shardings


def _as_list(names: Any) -> list[Any]:
    """Returns the names or indices as a list, also if a single one or None is given."""
    if names is None:
        return []
    return [names] if isinstance(names, str | int) else list(names)
