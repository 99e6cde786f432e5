"""Functions of one rank, run on all ranks: on a mesh, or with all ranks on one device.

The same function runs both ways, so every pipeline has a one-device twin to test against.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..ir import pvary_like
from ..sharding import axes_of
from ._stage_shardings import in_stage

AXIS = "stage"


def on_ranks(
    f: Callable,
    *,
    mesh: Mesh | None,
    in_dims: tuple,
    out_dims: Any,
    num_ranks: int | None = None,
) -> Callable:
    """Maps `f`, written for one rank inside the axis `stage`, over the ranks.

    Args:
        f: A function of arrays of one rank. It may use collectives over the manual axes.
        mesh: A mesh with the axis `stage`; its other axes stay automatic. None runs all ranks on
            one device, under `jax.vmap`.
        in_dims: For each argument the dim, of size S, that holds one slice per rank and that `f`
            does not see; None if every rank gets the whole argument. A `PartitionSpec` with `stage`
            in one dim has the same meaning, and its other axes become manual too: `f` sees the
            shard of one device. An argument may have a tree of dims and specs.
        out_dims: The same for the result. None if every rank returns the same value, as with
            `psum`.
        num_ranks: S. Needed only if `mesh` is None and no argument has a dim of ranks.

    Returns:
        A function of whole arrays.
    """
    in_specs, out_specs = (jax.tree.map(_spec, d, is_leaf=_is_dim) for d in (in_dims, out_dims))
    if mesh is None:
        ins, outs = (jax.tree.map(_dim, d, is_leaf=_is_dim) for d in (in_specs, out_specs))
        return jax.vmap(f, axis_name=AXIS, axis_size=num_ranks, in_axes=ins, out_axes=outs)

    def local(*arguments):
        seen = [_each(_drop, x, spec) for x, spec in zip(arguments, in_specs, strict=True)]
        return _each(_add, f(*jax.tree.map(vary, seen)), out_specs)

    leaves = jax.tree.leaves((in_specs, out_specs), is_leaf=_is_dim)
    return jax.shard_map(
        in_stage(local),
        mesh=mesh,
        axis_names={AXIS}.union(*map(axes_of, leaves)),
        in_specs=in_specs,
        out_specs=out_specs,
    )


def vary(x: jax.Array) -> jax.Array:
    """Marks an array that devices share as varying over all manual axes.

    It is called on the arguments of `shard_map`, so that a gradient is summed over devices once.
    Otherwise JAX sums at every use, in a loop in every iteration, and in the dtype of the use.
    bfloat16 is summed in float32: for precision, and because XLA:CPU fails on bfloat16 sums.
    """
    missing = tuple(set(jax.sharding.get_abstract_mesh().manual_axes) - varying(x))
    if not missing:
        return x
    wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    return jax.lax.pcast(wide, missing, to="varying").astype(x.dtype)


def varying(x: jax.Array) -> frozenset[str]:
    """Returns the manual axes over which `x` varies."""
    return jax.typeof(x).manual_axis_type.varying


def either(
    predicate: Any, yes: Callable, no: Callable, *operands: Any, like: Any, often: str = ""
) -> Any:
    """Returns `yes(*operands)` or `no(*operands)`; on a mesh only the chosen branch runs.

    Args:
        predicate: A boolean scalar. `yes` runs if it is true.
        yes: A function of `operands`.
        no: A function of `operands` with results of the same shapes and dtypes.
        *operands: Arguments of both.
        like: A tree as both return. Results vary over the manual axes as its leaves do.
        often: A name scope, as returned by `how_often`, from which an audit of the compiled program
            reads how often `yes` runs. Empty for none.

    Returns:
        The result of the chosen branch.
    """

    types = jax.tree.map(jax.typeof, like)

    def branch(f: Callable) -> Callable:
        # Always returns at least two results: XLA's verifier requires both branches of a
        # single-result conditional to have the same sharding.
        return lambda *operands: (jax.tree.map(pvary_like, types, f(*operands)), jnp.int32(0))

    with jax.named_scope(often) if often else nullcontext():
        result, second = jax.lax.cond(predicate, branch(yes), branch(no), *operands)
    leaves, tree = jax.tree.flatten(result)
    if len(leaves) == 1:
        leaves = jax.lax.optimization_barrier((*leaves, second))[:1]  # or it would be dropped
    return jax.tree.unflatten(tree, leaves)


def how_often(
    table: Sequence[Sequence[int]], chosen: Callable[[int], bool] = lambda number: number >= 0
) -> str:
    """Returns a name scope such as `taken_3_of_10`: in how many ticks a condition is true.

    Args:
        table: [num_ticks][num_ranks] integers.
        chosen: Whether the condition is true for an integer of the table.

    Returns:
        `taken_{count}_of_{num_ticks}`, with the count of the rank on which it is true most often.
    """
    most = max(sum(map(chosen, column)) for column in zip(*table, strict=True))
    return f"taken_{most}_of_{len(table)}"


def _is_dim(x: Any) -> bool:
    return x is None or isinstance(x, int | PartitionSpec)


def _spec(dim: int | PartitionSpec | None) -> PartitionSpec:
    if isinstance(dim, PartitionSpec):
        return dim
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, AXIS)


def _dim(spec: PartitionSpec) -> int | None:
    """Returns the dim that `spec` shards over the axis `stage`, or None."""
    return next((i for i, axes in enumerate(spec) if AXIS in names_of(axes)), None)


def is_spec(x: Any) -> bool:
    """Returns whether `x` is a `PartitionSpec`. Serves as `is_leaf` for trees of specs."""
    return isinstance(x, PartitionSpec)


def names_of(axes: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one dim of a `PartitionSpec` as a tuple, empty for None."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _each(change: Callable, tree: Any, specs: Any) -> Any:
    """Applies `change(leaf, dim)` to the leaves for which `specs` has a dim of ranks."""

    def below(spec, subtree):
        dim = _dim(spec)
        return jax.tree.map(lambda x: x if dim is None else change(x, dim), subtree)

    return jax.tree.map(below, specs, tree, is_leaf=_is_dim)


def poison(x: jax.Array) -> jax.Array:
    """Returns an array like `x` of NaN or the largest integer, to expose reads of unset buffers.

    The `where` makes the result vary over the ranks.
    """
    if jnp.issubdtype(x.dtype, jnp.inexact):
        worst = jnp.nan
    elif jnp.issubdtype(x.dtype, jnp.integer):
        worst = jnp.iinfo(x.dtype).max
    else:
        return x  # booleans and random keys have no value that would show
    return jnp.where(jax.lax.axis_index(AXIS) < 0, x, jnp.full_like(x, worst))


def zeros(x: Any, *, lead: tuple[int, ...] = (), dtype: Any = None) -> jax.Array:
    """Returns zeros like `x` that vary over the same manual axes, as the carry of a scan must.

    Args:
        x: An array; or a shape and dtype, for zeros that vary over all manual axes.
        lead: Sizes of dims in front of those of `x`.
        dtype: The dtype of the result. None for that of `x`.

    Returns:
        Zeros [*lead, *x.shape].
    """
    dtype = dtype or x.dtype
    if not isinstance(x, jax.Array):
        return vary(_split_like(x, jnp.zeros((*lead, *x.shape), dtype)))
    axes = tuple(varying(x))
    nothing = jnp.zeros_like(x, dtype=dtype)
    nothing = jax.lax.pcast(nothing, tuple(set(axes) - varying(nothing)), to="varying")
    return jnp.broadcast_to(nothing, (*lead, *x.shape))


def _split_like(aval: Any, x: jax.Array) -> jax.Array:
    """Reshards the last dims of `x` over explicit axes as those of `aval` are."""
    split = getattr(aval, "sharding", None)
    if not isinstance(split, NamedSharding) or not axes_of(split.spec):
        return x
    dims = (*[None] * (x.ndim - aval.ndim), *split.spec.partitions)
    return jax.sharding.reshard(x, split.spec.update(partitions=dims))


def _drop(x: jax.Array, dim: int) -> jax.Array:
    return jax.lax.squeeze(x, [dim])


def _add(x: jax.Array, dim: int) -> jax.Array:
    return jax.lax.expand_dims(x, [dim])
