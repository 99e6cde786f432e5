"""Layers of any framework as a circular pipeline, with what they record on the way.

R repeats, S ranks, L layers per stage, M microbatches; p devices that share the rows of one, each
calling the stage with its own, or 1. A layer is a pure function `(weights, x, side, rng) -> (y,
records)`. Records (what Flax calls sown values) travel with their microbatch: every stage writes
its entries, so they come out per layer and microbatch, whatever their shapes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from ..autodiff import Remat
from ..spmd._ranks import AXIS
from ..spmd._stage_shardings import in_stage
from ._settings import PipelineSettings

Layer = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Underway(NamedTuple):
    """An activation, and what the stages behind it have recorded.

    Attributes:
        x: The activation.
        records: [p, R * S, L, ...] leaves; where a stage runs p is 1.
        stage: [p], the number of the next stage.
    """

    x: PyTree
    records: PyTree
    stage: Int[Array, "... p"]


def layer_keys(key: jax.Array, dims: tuple[int, int, int]) -> jax.Array:
    """[R, S, L] keys: `key` folded with the number of the layer, which no layout changes."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(math.prod(dims)))
    return keys.reshape(dims)


def to_microbatches(x: PyTree, num_microbatches: int, batch_size: int | None = None) -> PyTree:
    """[batch, ...] -> [M, batch / M, ...]

    Raises:
        ValueError: If a leaf has another number of rows, or one that M does not divide.
    """

    def split(path, leaf):
        rows, name = leaf.shape[0], jax.tree_util.keystr(path, simple=True, separator=".")
        if batch_size not in (None, rows):
            raise ValueError(
                f"`{name}` has {rows} rows and `micro_batch_size_to_train_on` is {batch_size}. "
                "It is the number of rows of the whole batch: make them equal."
            )
        if rows % num_microbatches:
            raise ValueError(
                f"`{name}` has {rows} rows, not a multiple of `num_pipeline_microbatches` = "
                f"{num_microbatches}."
            )
        return leaf.reshape(num_microbatches, -1, *leaf.shape[1:])

    return jax.tree_util.tree_map_with_path(split, x)


def check_microbatches(x: PyTree, num_microbatches: int, batch_size: int | None = None) -> PyTree:
    """`x`, if its leaves are [M, rows, ...].

    Raises:
        ValueError: If a leaf has another M, or another number of rows in all than `batch_size`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if leaf.ndim < 2 or leaf.shape[0] != num_microbatches:
            raise ValueError(
                f"`{name}` has dims {leaf.shape}. With `microbatched` they are [microbatches, "
                f"rows, ...], and `num_pipeline_microbatches` is {num_microbatches}."
            )
        if batch_size not in (None, leaf.shape[0] * leaf.shape[1]):
            raise ValueError(
                f"`{name}` has {leaf.shape[0]} x {leaf.shape[1]} rows and "
                f"`micro_batch_size_to_train_on` is {batch_size}. Make them equal."
            )
    return x


def from_microbatches(x: PyTree) -> PyTree:
    """[M, rows, ...] -> [M * rows, ...]"""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x)


def outputs_of(y: PyTree, x: PyTree) -> PyTree:
    """`y`, or its first entry if it is (outputs, None), as of layers that are made for scans."""
    is_pair = isinstance(y, tuple) and len(y) == 2 and y[1] is None
    return y[0] if is_pair and jax.tree.structure(y) != jax.tree.structure(x) else y


def stage_of_layers(layer: Layer, *, scan: bool, remat: Remat) -> Layer:
    """A stage of L layers: like a layer, for weights, keys and records with [L, ...] leaves."""
    layer = remat(layer)

    def scanned(weights, x, side, rng):
        return lax.scan(lambda x, of: layer(of[0], x, side, of[1]), x, (weights, rng))

    def unrolled(weights, x, side, rng):
        records = []
        for i in range(jax.tree.leaves(weights)[0].shape[0]):
            w, key = jax.tree.map(lambda leaf: leaf[i], (weights, rng))  # noqa: B023
            x, of_layer = layer(w, x, side, key)
            records.append(of_layer)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *records)

    return scanned if scan else unrolled


def without_records(stage: Layer) -> Layer:
    """`stage` as engines call it: activations in and out, no sums."""
    return lambda weights, x, side, rng: (stage(weights, x, side, rng)[0], {})


def with_records(stage: Layer) -> Layer:
    """`stage` as engines call it, on `Underway`."""

    def record(weights, underway, side, rng):
        y, new = stage(weights, underway.x, side, rng)
        (number,) = underway.stage
        records = jax.tree.map(
            lambda entries, one: lax.dynamic_update_index_in_dim(entries, one[None], number, 1),
            underway.records,
            new,
        )
        return Underway(y, records, underway.stage + 1), {}

    return record


def pipeline_layers(
    engine: Callable,
    layer: Layer,
    weights: PyTree,
    inputs: PyTree,
    side: PyTree,
    keys: PyTree,
    settings: PipelineSettings,
    mesh: Mesh | None = None,
) -> tuple[PyTree, PyTree]:
    """Sends every microbatch through all layers.

    Args:
        engine: `circular`, or one with its contract, its options filled in.
        layer: The layer.
        weights: [R, S, L, ...] leaves.
        inputs: [M, ...] leaves.
        side: [M, ...] leaves.
        keys: [R, S, L] leaves, or ().
        settings: How.
        mesh: The mesh of `engine`.

    Returns:
        (outputs like `inputs`, records with [R, S, L, M, ...] leaves). What p devices record of
        their own rows is added up.

    Raises:
        ValueError: If `layer` does not return what it was given, or records arrays in parts.
    """
    shapes = layer_shapes(layer, weights, inputs, side, keys, mesh, settings.batch_axes)
    stage = settings_stage(layer, settings)
    if not jax.tree.leaves(shapes):
        return engine(without_records(stage), weights, inputs, side, keys)[0], shapes
    repeats, ranks, layers = settings.dims
    microbatches = settings.counts.num_microbatches
    if settings.batch_axes:
        _check_scalars(shapes, settings.batch_axes)
    each = (microbatches, num_parts(mesh, settings.batch_axes))
    empty = jax.tree.map(
        lambda s: jnp.zeros((*each, repeats * ranks, layers, *s.shape), s.dtype), shapes
    )
    underway = Underway(inputs, empty, jnp.zeros(each, jnp.int32))
    done = engine(with_records(stage), weights, underway, side, keys)[0]

    def in_order(x):  # [M, p, R * S, L, ...] -> [R, S, L, M, ...]
        x = jnp.moveaxis(jnp.sum(x, axis=1, dtype=x.dtype), 0, 2)
        return x.reshape(repeats, ranks, layers, microbatches, *x.shape[3:])

    return done.x, jax.tree.map(in_order, done.records)


def _check_scalars(records: PyTree, batch_axes: tuple[str, ...]) -> None:
    """What devices record of their own rows is added up, which makes sense for scalars alone."""
    for path, x in jax.tree_util.tree_leaves_with_path(records):
        if x.ndim:
            raise ValueError(
                f"A layer records {jax.tree_util.keystr(path)} of shape {x.shape}, and with "
                f"`pipeline_batch_axes` = {batch_axes} devices see their own rows, and their "
                "records are added up. Record scalars, or leave `pipeline_batch_axes` at ()."
            )


def settings_stage(layer: Layer, settings: PipelineSettings) -> Layer:
    """The stage that `settings` make of `layer`."""
    scan = settings.scan_layers and settings.layers_per_stage > 1
    return stage_of_layers(layer, scan=scan, remat=settings.remat_layer)


def num_parts(mesh: Mesh | None, batch_axes: tuple[str, ...]) -> int:
    """p"""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in batch_axes)


def layer_shapes(
    layer: Layer,
    weights: Any,
    inputs: Any,
    side: Any,
    keys: Any,
    mesh: Mesh | None = None,
    batch_axes: tuple[str, ...] = (),
) -> PyTree:
    """Shapes and dtypes of a layer's records, after a check that it returns what it was given."""

    def first(dims, tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[dims:], x.dtype), tree)

    def run(weights, x, side, rng):
        y, records = layer(weights, x, side, rng)
        found.append((_described(x), _described(y), first(0, records)))

    found: list[Any] = []
    arrays = first(3, weights), first(1, inputs), first(1, side), first(3, keys)
    if mesh is not None:  # A layer may communicate over the axes that are manual where it runs.
        rows = PartitionSpec(batch_axes)
        arrays = *arrays[:1], *(_placed(tree, mesh, rows) for tree in arrays[1:3]), arrays[3]
        specs = PartitionSpec(), rows, rows, PartitionSpec()
        run = jax.shard_map(
            in_stage(run), mesh=mesh, axis_names={AXIS, *batch_axes}, in_specs=specs, out_specs=None
        )
    jax.eval_shape(run, *arrays)
    ((given, returned, records),) = found
    if given != returned:
        raise ValueError(
            f"`layers` was given {given} and returned {returned}. A layer must return what the "
            "next one can take: the same structure, shapes and dtypes."
        )
    return records


def _placed(tree: PyTree, mesh: Mesh, spec: PartitionSpec) -> PyTree:
    where = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _described(tree: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}
