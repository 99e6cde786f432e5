"""When and how weights that are sharded over fsdp and similar axes are gathered for a stage.

A `Gather` says it for the weights of one stage. Its functions gather weights and reduce-scatter
their gradients; `gather_weights` makes them from logical axes, `gather_by_specs` from mesh axes.
`_weight_gather` makes of it what an engine does with the weights of a rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ...devices import find_hardware
from ...sharding import GATHERED_AXES, Rules, gathered_rules, partition_spec
from ...sharding.specs import (
    axes_of,
    axes_of_dim,
    check_divisible,
    only_axes,
    padded_spec,
    with_axis_type,
    without_axes,
)
from ._collectives import all_gather_leaf, reduce_scatter_leaf

TreeFunction = Callable[[PyTree], PyTree]
When = Literal["tick", "repeat", "once"]
"""When weights are gathered: in every tick, once per repeat, or once."""

REPLICATED = PartitionSpec()


def identity(tree: PyTree) -> PyTree:
    """Returns `tree`."""
    return tree


@dataclass(frozen=True)
class Gather:
    """Functions that gather the weights of one stage and reduce-scatter their gradients.

    Attributes:
        when: In every `tick`; `once` before the first; or once per `repeat`, ahead of it: a rank
            holds the weights of its repeat, and those of the next as far as they are gathered.
        cast: Casts the weights of one stage, before they are gathered, to its compute dtype.
        unshard: Gathers the stored weights of one stage.
        constrain_unsharded: Constrains gradients that are accumulated over ticks to stay unsharded,
            without communication.
        reduce_scatter: Sums unsharded gradients over devices and shards them as they are stored.
        batch_axes: Mesh axes, beside `stage`, that are manual in the pipeline: each device calls
            the stage with its own rows. With them the program contains exactly the gathers and sums
            of `unshard` and `reduce_scatter`; without them XLA's partitioner decides.
        weight_specs: How stored weights of one stage are sharded over `batch_axes`.
        gradient_specs: How their stored gradients are sharded over `batch_axes`.
        sum_specs: How sums of gradients over ticks are sharded over them, before `scatter`.
        reduce_dtype: The dtype in which gradients are summed over `batch_axes`. None: their own.
        key_specs: How the keys of one stage are sharded over `batch_axes`. None: not at all.
        divided_over: Mesh axes over which weights or gradients are divided where they are stored,
            but not where a stage reads them. None if only XLA's partitioner knows.
        by_specs: The specs that it was made of. None if its functions were written by hand.
        scatter: `reduce_scatter` but of the few gradients, such as those of norms, that are stored
            whole where others are sharded: they stay sums of a device until `sum_whole`, so that
            they are summed over devices once. Default: `reduce_scatter`.
        scatter_products: `scatter` of gradients that products have just computed: XLA may choose
            their layout. Default: `scatter`.
        sum_whole: Sums over devices the gradients that `scatter` leaves.
    """

    when: When = "tick"
    cast: TreeFunction = identity
    unshard: TreeFunction = identity
    constrain_unsharded: TreeFunction = identity
    reduce_scatter: TreeFunction = identity
    batch_axes: tuple[str, ...] = ()
    weight_specs: PyTree = REPLICATED
    gradient_specs: PyTree = REPLICATED
    sum_specs: PyTree = REPLICATED
    reduce_dtype: Any = None
    key_specs: PyTree = None
    divided_over: frozenset[str] | None = None
    by_specs: "BySpecs | None" = None
    scatter: TreeFunction = identity
    scatter_products: TreeFunction = identity
    sum_whole: TreeFunction = identity

    def __post_init__(self) -> None:
        if self.scatter is identity:
            object.__setattr__(self, "scatter", self.reduce_scatter)
        if self.scatter_products is identity:
            object.__setattr__(self, "scatter_products", self.scatter)

    def cast_and_unshard(self, weights: PyTree) -> PyTree:
        """Returns the weights of one stage as it computes with them, from stored ones."""
        return self.unshard(self.cast(weights))


class BySpecs(NamedTuple):
    """What a `Gather` was made of.

    Attributes:
        make: `(stored, unsharded, gradients) -> Gather`, like the one that was made.
        specs: These trees of specs, over all axes.
    """

    make: Callable[[PyTree, PyTree, PyTree], Gather]
    specs: tuple[PyTree, PyTree, PyTree]


def join_gathers(gathers: Mapping[str, Gather]) -> Gather:
    """Returns the `Gather` of a dict of trees, each of which has its own; all are of one time."""
    first = next(iter(gathers.values()))

    def each(name: str) -> TreeFunction:
        return lambda trees: {key: getattr(gathers[key], name)(tree) for key, tree in trees.items()}

    def make(*trees: dict[str, PyTree]) -> Gather:
        of_each = {key: [tree[key] for tree in trees] for key in gathers}
        return join_gathers({key: by.make(*of_each[key]) for key, by in by_specs.items()})

    functions = (
        *("cast", "unshard", "constrain_unsharded", "reduce_scatter"),
        *("scatter", "scatter_products", "sum_whole"),
    )
    specs = ("weight_specs", "gradient_specs", "sum_specs")
    by_specs = {key: g.by_specs for key, g in gathers.items() if g.by_specs is not None}
    assert len(by_specs) == len(gathers), "only gathers by specs are joined"
    stored, unsharded, gradients = (
        {key: by.specs[i] for key, by in by_specs.items()} for i in range(3)
    )
    return replace(
        first,
        **{name: each(name) for name in functions},
        **{name: {key: getattr(g, name) for key, g in gathers.items()} for name in specs},
        divided_over=None,
        by_specs=BySpecs(make, (stored, unsharded, gradients)),
    )


EACH_TICK = Gather()
"""Gathers in every tick, with collectives that XLA's partitioner chooses."""


def gather_weights(
    logical: PyTree,
    rules: Rules,
    *,
    when: When,
    cast: TreeFunction = identity,
    batch_axes: tuple[str, ...] = (),
    gradient_rules: Rules | None = None,
) -> Gather:
    """Returns a `Gather` for weights described by logical axes, over fsdp, context and expert.

    Args:
        logical: A tuple of logical axes for every weight of one stage, as in `[layers, ...]`.
        rules: From logical axes to mesh axes.
        when: Gather in every "tick", "once", or once per "repeat".
        cast: Casts the weights to the compute dtype before they are gathered.
        batch_axes: Mesh axes, beside `stage`, that are manual in the pipeline. Only for a stage
            that treats rows one by one, or communicates over these axes itself.
        gradient_rules: Rules for gradients, if they are sharded more than the weights (ZeRO-1).

    Returns:
        A `Gather` whose specs are those of `logical` under the rules, over `batch_axes`.
    """
    stored, unsharded, gradients = (
        specs_of(logical, r) for r in (rules, gathered_rules(rules), gradient_rules or rules)
    )
    return gather_by_specs(
        stored, unsharded, gradients, when=when, cast=cast, batch_axes=batch_axes
    )


def gather_by_specs(
    stored: PyTree,
    unsharded: PyTree,
    gradients: PyTree | None = None,
    *,
    when: When = "tick",
    cast: TreeFunction = identity,
    batch_axes: tuple[str, ...] = (),
    mesh: Mesh | None = None,
    reduce_dtype: Any = None,
) -> Gather:
    """Returns a `Gather` for weights described by specs over mesh axes.

    Args:
        stored: The spec of every weight as it is stored. Dims beyond the end of a spec keep their
            sharding.
        batch_axes: Mesh axes that are manual where the functions are called, beside `stage`: they
            communicate over these by collectives, over all others by constraints.
        reduce_dtype: The dtype in which gradients are summed over `batch_axes`. None: their own.

    Returns:
        The `Gather`. Without a mesh its functions return their argument.
    """
    gradients = stored if gradients is None else gradients
    manual_stored, manual_unsharded, manual_gradients = (
        manual_specs(specs, batch_axes) for specs in (stored, unsharded, gradients)
    )
    constrain_unsharded = constrain_by(unsharded, mesh)
    constrain_gradients = constrain_by(gradients, mesh)

    def unshard(tree: PyTree) -> PyTree:
        return constrain_unsharded(
            map_leaves(all_gather_leaf, tree, manual_stored, manual_unsharded, unsharded)
        )

    def reduce(tree: PyTree, *, dtype: Any, as_rows: bool = True) -> PyTree:
        reduce_leaf = partial(reduce_scatter_leaf, batch_axes, as_rows=as_rows, dtype=dtype)
        return constrain_gradients(map_leaves(reduce_leaf, tree, manual_gradients, unsharded))

    scatter, sum_whole = scatter_and_sum_whole(reduce, manual_gradients, reduce_dtype)

    def reduce_scatter(tree: PyTree) -> PyTree:
        return sum_whole(scatter(tree))

    # Explicit axes keep their type only where a spec has no entries, not even of None.
    no_entries = jax.tree.map(lambda _: REPLICATED, stored)
    return Gather(
        when=when,
        cast=cast,
        unshard=unshard,
        constrain_unsharded=constrain_unsharded,
        reduce_scatter=reduce_scatter,
        batch_axes=batch_axes,
        weight_specs=manual_stored if batch_axes else no_entries,
        gradient_specs=manual_gradients if batch_axes else no_entries,
        sum_specs=manual_unsharded if batch_axes else no_entries,
        reduce_dtype=reduce_dtype,
        divided_over=_divided_over(stored, unsharded) | _divided_over(gradients, unsharded),
        by_specs=BySpecs(
            partial(
                gather_by_specs,
                when=when,
                cast=cast,
                batch_axes=batch_axes,
                mesh=mesh,
                reduce_dtype=reduce_dtype,
            ),
            (stored, unsharded, gradients),
        ),
        scatter=scatter,
        scatter_products=partial(scatter, as_rows=False),
        sum_whole=sum_whole,
    )


def scatter_and_sum_whole(
    reduce: Callable[..., PyTree], gradients: PyTree, reduce_dtype: Any
) -> tuple[Callable[..., PyTree], TreeFunction]:
    """Returns `Gather.scatter` and `Gather.sum_whole`.

    `gradients` are the manual specs of stored gradients, and `reduce(tree, dtype=)` sums and shards
    the leaves that are not None.
    """
    are_sharded = any(axes_of(spec) for spec in jax.tree.leaves(gradients))

    def select(tree: PyTree, *, sharded: bool) -> PyTree:
        def keep(x: jax.Array, spec: PartitionSpec) -> jax.Array | None:
            return x if (bool(axes_of(spec)) or not are_sharded) == sharded else None

        return map_leaves(keep, tree, gradients)

    def scatter(tree: PyTree, **options: Any) -> PyTree:
        reduced = reduce(select(tree, sharded=True), dtype=reduce_dtype, **options)
        return first_of_leaves(reduced, tree)

    def sum_whole(tree: PyTree) -> PyTree:
        # They are small: to round them would save nothing.
        return first_of_leaves(reduce(select(tree, sharded=False), dtype=None), tree)

    return scatter, sum_whole


def first_of_leaves(tree: PyTree, other: PyTree) -> PyTree:
    """Returns `tree` with the leaves of `other` where it has None."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, tree, other, is_leaf=lambda x: x is None
    )


def without_done(spec: PartitionSpec, done: PartitionSpec) -> PartitionSpec:
    """Returns `spec` without the axes that `done` has in the same dim."""
    return PartitionSpec(
        *(
            tuple(a for a in axes_of_dim(axes) if a not in axes_of_dim(before)) or None
            for axes, before in zip(spec, done, strict=True)
        )
    )


def _divided_over(stored: PyTree, unsharded: PyTree) -> frozenset[str]:
    """Returns the axes of specs that those of gathered weights do not have in the same dim."""
    pairs = zip(*map(jax.tree.leaves, (stored, unsharded)), strict=True)
    dims = (dim for pair in pairs for dim in zip(*pair, strict=True))
    return frozenset(axis for a, b in dims for axis in axes_of_dim(a) if axis not in axes_of_dim(b))


def only_after(dependency: PyTree, x: jax.Array) -> jax.Array:
    """Returns `x`, which XLA can neither use nor cast before `dependency` is computed."""
    if x.dtype != jnp.float32:
        return lax.optimization_barrier((x, dependency))[0]
    # The pass of XLA:TPU that lowers precision looks through barriers: it casts all weights before
    # the loop over layers and holds the copy (3.2 GB of llama2-7b's). Integers it leaves alone. A
    # zero that only a barrier returns is a part of the cast; weights that pass one themselves are
    # arrays more.
    zero, _ = lax.optimization_barrier((jnp.uint32(0), dependency))
    return _with_bits(x, zero)


@jax.custom_jvp
def _with_bits(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns float32 `x`, computed from the integer `zero`, with the derivative of the identity.

    JAX takes integers for constants: through their bits `x` would have the derivative zero.
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ zero, x.dtype)


@_with_bits.defjvp
def _with_bits_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _with_bits(*primals), tangents[0]


def map_leaves(f: Callable, tree: PyTree, *specs: PyTree) -> PyTree:
    """Maps `f` over the leaves of `tree` that are not None."""

    def map_leaf(x, *spec):
        return None if x is None else f(x, *spec)

    return jax.tree.map(map_leaf, tree, *specs, is_leaf=lambda x: x is None)


def constrain_by(specs: PyTree, mesh: Mesh | None = None) -> TreeFunction:
    """Returns a function that shards the leaves that are not None over axes that are not manual."""

    def constrain_leaf(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        types = dict(zip(context.axis_names, context.axis_types, strict=True))
        manual = [axis for axis, kind in types.items() if kind == AxisType.Manual]
        if len(manual) == len(types) or not len(spec):
            return x
        spec = without_axes(spec, manual)
        check_divisible(x.shape, spec, dict(context.shape), "weight")
        return _constrain(x, spec, context)

    return lambda tree: map_leaves(constrain_leaf, tree, specs)


def gather_by_constraints(read: PyTree, stored: PyTree, mesh: Mesh) -> TreeFunction:
    """Returns a function that shards weights by `read`, and their gradients by `stored` at once.

    The transpose of a constraint is this constraint. XLA would sum gradients that are whole over
    `data` and `fsdp`, in place of reduce-scatters over `fsdp` and sums of shards over `data`.
    """
    halfway = _planes_of_torus(stored, mesh)

    def gather(weights: PyTree) -> PyTree:
        return constrain_by(read, mesh)(halfway(weights))

    def scatter(gradients: PyTree) -> PyTree:
        return constrain_by(stored, mesh)(halfway(gradients))

    def backward(_: None, gradients: PyTree) -> tuple[PyTree]:
        def of_float(x: jax.Array) -> jax.Array | None:
            return None if x.dtype == jax.dtypes.float0 else x

        return (scatter(jax.tree.map(of_float, gradients)),)

    run = jax.custom_vjp(gather)
    run.defvjp(lambda weights: (gather(weights), None), backward)
    return run


_IN_TWO_STEPS = {"v5p": 8, "tpu7x": 64}
"""Devices from which on a gather over three dims of a torus is faster in two steps."""


def axis_in_two_steps(stored: PyTree, mesh: Mesh) -> str | None:
    """Returns the axis over which weights are gathered in two steps: it divides three dims.

    No SparseCore of v5p takes a gather over three dims (libtpu 0.0.48.1), and over all of 64 or
    more devices XLA:TPU sums whole arrays that are filled with zeros. Along lines, and then over
    planes, gathers and scatters are hidden.
    """
    kind = find_hardware(mesh.devices.flat[0].device_kind)
    named = frozenset().union(*map(axes_of, jax.tree.leaves(stored)))
    if kind is None or kind.kind not in _IN_TWO_STEPS or not named:
        return None
    axis = max(sorted(named), key=lambda name: mesh.shape[name])
    is_large = mesh.shape[axis] >= _IN_TWO_STEPS[kind.kind]
    return axis if is_large and _num_torus_dims(mesh, axis) >= 3 else None


def _planes_of_torus(stored: PyTree, mesh: Mesh) -> TreeFunction:
    """Returns a function that shards weights over planes of a torus, if it takes two steps."""
    axis = axis_in_two_steps(stored, mesh)
    if axis is None:
        return identity
    size = mesh.shape[axis]
    line = next(n for n in range(2, size + 1) if n**3 >= size and size % n == 0)
    at, shape = mesh.axis_names.index(axis), mesh.devices.shape
    devices = mesh.devices.reshape(*shape[:at], size // line, line, *shape[at + 1 :])
    planes = Mesh(devices, (*mesh.axis_names[:at], "planes", "line", *mesh.axis_names[at + 1 :]))

    def shard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        dims = [["planes" if a == axis else a for a in axes_of_dim(names)] for names in spec]
        if not any("planes" in names for names in dims):
            return x
        return _constrain(x, PartitionSpec(*(tuple(names) or None for names in dims)), planes)

    return lambda tree: map_leaves(shard, tree, stored)


def _num_torus_dims(mesh: Mesh, axis: str) -> int:
    """Returns the dims of a torus over which the devices of an axis lie; 0 in several slices."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(
        mesh.shape[axis], -1
    )
    group = devices[:, 0]
    if len({getattr(device, "slice_index", None) for device in group}) > 1:
        return 0
    coordinates = zip(*(getattr(device, "coords", ()) for device in group), strict=True)
    return sum(len(set(along)) > 1 for along in coordinates)


def _constrain(x: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Returns `x` sharded by `spec`: explicit axes by its type, automatic axes by a constraint."""
    if AxisType.Explicit not in mesh.axis_types:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, padded_spec(x, spec, mesh)))
    explicit = padded_spec(x, with_axis_type(spec, mesh, AxisType.Explicit), mesh)
    x = jax.sharding.reshard(x, NamedSharding(mesh, explicit))
    if AxisType.Auto not in mesh.axis_types or len(spec) < x.ndim:
        return x
    automatic = with_axis_type(spec, mesh, AxisType.Auto)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, automatic))


def manual_specs(specs: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns every spec restricted to `axes`."""
    return jax.tree.map(lambda spec: only_axes(spec, axes), specs)


def unsharded_specs(specs: PyTree, axes: Sequence[str] = GATHERED_AXES) -> PyTree:
    """Returns the specs of weights that are gathered over `axes`."""
    return jax.tree.map(lambda spec: without_axes(spec, axes), specs)


def specs_of(logical: PyTree, rules: Rules) -> PyTree:
    """Returns `logical` with a `PartitionSpec` in place of every tuple."""
    return jax.tree.map(
        lambda axes: partition_spec(axes, rules), logical, is_leaf=lambda x: isinstance(x, tuple)
    )
