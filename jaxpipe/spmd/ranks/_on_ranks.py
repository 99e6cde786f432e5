"""Functions of one rank, run on all ranks: on a mesh, or with all ranks on one device.

The same function runs both ways, so every pipeline has a one-device twin to test against.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ... import _compat
from ...sharding.specs import axes_of, axes_of_dim, with_axis_type, without_axes
from ._stage_shardings import in_stage
from ._varying import pvary, split_like

AXIS = "stage"
"""Name of the mesh axis along which the ranks are."""


def on_ranks(
    f: Callable, *, mesh: Mesh | None, in_dims: tuple, out_dims: Any, num_ranks: int | None = None
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
        `(*arguments) -> result`, where arguments and result are those of all ranks.
    """
    dims = in_dims, out_dims
    in_specs, out_specs = jax.tree.map(_spec, dims, is_leaf=lambda dim: dim is None)
    if mesh is None:
        ins, outs = jax.tree.map(_dim, (in_specs, out_specs))
        return jax.vmap(f, axis_name=AXIS, axis_size=num_ranks, in_axes=ins, out_axes=outs)

    def local(*arguments):
        pairs = zip(arguments, in_specs, strict=True)
        seen = [_each(lambda x, dim: lax.squeeze(x, [dim]), x, spec) for x, spec in pairs]
        results = f(*jax.tree.map(pvary, seen))
        return _each(lambda x, dim: lax.expand_dims(x, [dim]), results, out_specs)

    manual = {AXIS}.union(*map(axes_of, jax.tree.leaves((in_specs, out_specs))))
    mapped = jax.shard_map(
        in_stage(local), mesh=mesh, axis_names=manual, in_specs=in_specs, out_specs=out_specs
    )
    if AxisType.Explicit not in mesh.axis_types:
        return mapped

    def run(*arguments):
        typed = partial(_typed, manual=manual, mesh=mesh)
        pairs = zip(arguments, in_specs, strict=True)
        return mapped(*(_each_leaf(typed, x, spec) for x, spec in pairs))

    return run


def _typed(x: Any, spec: PartitionSpec, manual: Collection[str], mesh: Mesh) -> jax.Array:
    """Returns `x` split over manual axes as `spec` says, in its type: JAX 0.12 asks for that."""
    x = jnp.asarray(x)
    before = jax.typeof(x).sharding.spec
    dims = zip(
        *(_axes_of_dims(s, x.ndim) for s in (spec, without_axes(before, manual))), strict=True
    )
    after = with_axis_type(
        before.update(partitions=[a + b for a, b in dims]), mesh, AxisType.Explicit
    )
    if _axes_of_dims(after, x.ndim) == _axes_of_dims(before, x.ndim):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, after))


def _axes_of_dims(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    dims = list(map(axes_of_dim, spec.partitions))
    return dims + [()] * (ndim - len(dims))


def _spec(dim: int | PartitionSpec | None) -> PartitionSpec:
    if isinstance(dim, PartitionSpec):
        return dim
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, AXIS)


def _dim(spec: PartitionSpec) -> int | None:
    """Returns the dim that `spec` shards over the axis `stage`, or None."""
    return next((i for i, axes in enumerate(spec) if AXIS in axes_of_dim(axes)), None)


def _each_leaf(change: Callable, tree: Any, specs: Any) -> Any:
    """Applies `change(leaf, spec)` to all leaves; `specs` is a prefix of the tree."""

    def below(spec, subtree):
        return jax.tree.map(lambda x: change(x, spec), subtree)

    return jax.tree.map(below, specs, tree)


def _each(change: Callable, tree: Any, specs: Any) -> Any:
    """Applies `change(leaf, dim)` to the leaves for which `specs` has a dim of ranks."""

    def at_dim(x, spec):
        dim = _dim(spec)
        return x if dim is None else change(x, dim)

    return _each_leaf(at_dim, tree, specs)


def empty(x: Any, length: int) -> jax.Array:
    """Returns [length, ...] arbitrary values like the abstract `x`, which each rank will overwrite.

    It varies over `stage` and the manual axes over which an entry varies, and over no other: what
    is the same on all devices of an axis is so after it has been read again.
    """
    axes = x.manual_axis_type.varying | (set(jax.sharding.get_abstract_mesh().manual_axes) & {AXIS})
    array = split_like(x, _compat.empty((length, *x.shape), x.dtype))
    return lax.pcast(array, tuple(sorted(axes)), to="varying")


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
    return jnp.where(lax.axis_index(AXIS) < 0, x, jnp.full_like(x, worst))
