"""Runs stages of any framework as a circular pipeline, and collects the values they record.

R repeats, S ranks, M microbatches; p devices that shard the rows of a microbatch, each of which
calls the stage with its own rows, or 1. A stage is a pure function `(weights, x, batch_inputs,
rng) -> (y, records)`. Records (Flax calls them sown values) travel with their microbatch. Every
stage writes its own entries, so the pipeline returns records per stage and microbatch, of any
shapes. All weights, keys and records here are [R, S, ...]; `to_stored` and `from_stored` have the
form in which a module stores them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from ..._compat import of_user
from ...spmd.ranks import AXIS, in_stage
from ._settings import PipelineSettings

# `(weights, x, batch_inputs, rng) -> (y, records)`, a pure function.
Stage = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class ActivationInFlight(NamedTuple):
    """An activation in flight, with the values that earlier stages have recorded for it.

    Attributes:
        records: [p, R * S, ...] leaves. Inside a stage p is 1.
        stage: [p], the index of the next stage.
    """

    x: PyTree
    records: PyTree
    stage: Int[Array, "... p"]


def from_stored(tree: PyTree, settings: PipelineSettings) -> PyTree:
    """Returns [R, S, ...] leaves of leaves as a module stores them, [S, ...] with one repeat."""
    return tree if settings.dims[0] > 1 else jax.tree.map(lambda x: x[None], tree)


def to_stored(tree: PyTree, settings: PipelineSettings) -> PyTree:
    """Inverts `from_stored`."""
    return tree if settings.dims[0] > 1 else jax.tree.map(lambda x: x[0], tree)


def stage_keys(key: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Returns keys of these dims: `key` folded with each stage's index, whatever the layout."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(math.prod(dims)))
    return keys.reshape(dims)


def to_microbatches(x: PyTree, num_microbatches: int, batch_size: int | None = None) -> PyTree:
    """Splits [batch, ...] leaves, which must have `batch_size` rows if it is given, into M."""

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
    """Returns `x` after a check that its leaves are [M, rows, ...]."""
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
    """Merges [M, rows, ...] leaves into [M * rows, ...] leaves."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x)


def outputs_of(y: PyTree, x: PyTree) -> PyTree:
    """Returns the outputs of `y`, a stage's result, which may be (outputs, None) as for scans."""
    is_pair = isinstance(y, tuple) and len(y) == 2 and y[1] is None
    return y[0] if is_pair and jax.tree.structure(y) != jax.tree.structure(x) else y


def of_layers(stage: Stage) -> Stage:
    """Returns `stage`, which runs layers whose loops may begin with constants."""

    def run(weights, x, batch_inputs, rng):
        with of_user():
            return stage(weights, x, batch_inputs, rng)

    return run


def without_records(stage: Stage) -> Stage:
    """Returns `stage` with the contract of the engines: it drops records and returns no aux."""
    return lambda weights, x, batch_inputs, rng: (stage(weights, x, batch_inputs, rng)[0], {})


def with_records(stage: Stage) -> Stage:
    """Returns `stage` with the contract of the engines, for `ActivationInFlight`."""

    def record(weights, in_flight, batch_inputs, rng):
        y, new = stage(weights, in_flight.x, batch_inputs, rng)
        (stage_id,) = in_flight.stage
        records = jax.tree.map(
            lambda entries, x: lax.dynamic_update_index_in_dim(entries, x[None], stage_id, 1),
            in_flight.records,
            new,
        )
        return ActivationInFlight(y, records, in_flight.stage + 1), {}

    return record


def pipeline_stages(
    engine: Callable,
    stage: Stage,
    weights: PyTree,
    inputs: PyTree,
    batch_inputs: PyTree,
    keys: PyTree,
    settings: PipelineSettings,
    mesh: Mesh | None = None,
) -> tuple[PyTree, PyTree]:
    """Runs microbatches through all stages; returns outputs and [R, S, M, ...] records.

    Records that p devices compute from their own rows are summed.
    """
    stage = of_layers(stage)
    shapes = record_shapes(stage, weights, inputs, batch_inputs, keys, mesh, settings.batch_axes)
    stage = settings.remat_stage(stage)
    if not jax.tree.leaves(shapes):
        return engine(without_records(stage), weights, inputs, batch_inputs, keys)[0], shapes
    (repeats, ranks), microbatches = settings.dims, settings.pipeline_shape.num_microbatches
    if settings.batch_axes:
        _check_scalars(shapes, settings.batch_axes)
    each = (microbatches, num_parts(mesh, settings.batch_axes))
    empty = jax.tree.map(lambda s: jnp.zeros((*each, repeats * ranks, *s.shape), s.dtype), shapes)
    in_flight = ActivationInFlight(inputs, empty, jnp.zeros(each, jnp.int32))
    done = engine(with_records(stage), weights, in_flight, batch_inputs, keys)[0]

    def in_order(x):  # [M, p, R * S, ...] -> [R, S, M, ...]
        x = jnp.moveaxis(jnp.sum(x, axis=1, dtype=x.dtype), 0, 1)
        return x.reshape(repeats, ranks, microbatches, *x.shape[2:])

    return done.x, jax.tree.map(in_order, done.records)


def _check_scalars(records: PyTree, batch_axes: tuple[str, ...]) -> None:
    """Checks that all records are scalars: records of devices with their own rows are summed."""
    for path, x in jax.tree_util.tree_leaves_with_path(records):
        if x.ndim:
            raise ValueError(
                f"The stage records {jax.tree_util.keystr(path)} of shape {x.shape}, and with "
                f"`pipeline_batch_axes` = {batch_axes} devices see their own rows, and their "
                "records are added up. Record scalars, or leave `pipeline_batch_axes` at ()."
            )


def num_parts(mesh: Mesh | None, batch_axes: tuple[str, ...]) -> int:
    """Returns p, the number of devices that shard the rows of a microbatch."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in batch_axes)


def record_shapes(
    stage: Stage,
    weights: Any,
    inputs: Any,
    batch_inputs: Any,
    keys: Any,
    mesh: Mesh | None = None,
    batch_axes: tuple[str, ...] = (),
) -> PyTree:
    """Returns shapes and dtypes of the records of one stage and microbatch."""

    def first(dims, tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[dims:], x.dtype), tree)

    def run(weights, x, batch_inputs, rng):
        y, records = stage(weights, x, batch_inputs, rng)
        traces.append((_described(x), _described(y), first(0, records)))

    traces: list[Any] = []
    arrays = first(2, weights), first(1, inputs), first(1, batch_inputs), first(2, keys)
    if mesh is not None:  # A stage may communicate over the axes that are manual where it runs.
        rows = PartitionSpec(batch_axes)
        arrays = *arrays[:1], *(_sharded(tree, mesh, rows) for tree in arrays[1:3]), arrays[3]
        specs = PartitionSpec(), rows, rows, PartitionSpec()
        run = jax.shard_map(
            in_stage(run), mesh=mesh, axis_names={AXIS, *batch_axes}, in_specs=specs, out_specs=None
        )
    jax.eval_shape(run, *arrays)
    ((input_types, output_types, records),) = traces
    if input_types != output_types:
        raise ValueError(
            f"The stage was given {input_types} and returned {output_types}. A stage must return "
            "what the next one can take: the same structure, shapes and dtypes."
        )
    return records


def _sharded(tree: PyTree, mesh: Mesh, spec: PartitionSpec) -> PyTree:
    where = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _described(tree: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}
