"""What leaves a pipeline besides scalars: arrays with an entry for every row of the batch.

Engines return them as metrics, in the pieces that they compute: [M * s, D, rows, ...] for M
microbatches of s slices, whose rows D devices divide.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..autodiff.staged_model import from_leaves_by_path, leaves_by_path
from ..engines.fsdp import row_axes
from ..sharding.specs import axes_of, reshard, reshard_to_spec
from ._model import Model, ModelFunction
from ._pieces import num_rows


def returning_outputs(model: Model) -> Model:
    """Returns a model whose loss is zero, and whose metrics are the leaves of its output."""
    output = _output_function(model)

    def loss(w: PyTree, x: PyTree, batch: PyTree, key: Any) -> tuple[Array, dict[str, Array]]:
        returned = output(w, x, batch, key)
        _check_has_rows(returned, num_rows(batch))
        return jnp.zeros(()), leaves_by_path(returned)

    of_rows = ModelFunction(loss, output.takes_key, is_output=True)
    return replace(model, loss=of_rows, vocab_parallel_loss=None)


def _output_function(model: Model) -> ModelFunction:
    """Returns the function `output` of a model; by default one that returns x."""
    if model.output is None:
        return ModelFunction(lambda w, x, batch, key: x)
    assert isinstance(model.output, ModelFunction), "a `Model` reads its functions"
    return model.output


def _check_has_rows(returned: PyTree, count: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(returned):
        if jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.extended):
            raise ValueError(
                f"The output{jax.tree_util.keystr(path)} is a random key. `apply` returns numbers: "
                "give an `output` that returns nothing else."
            )
        if jnp.shape(leaf)[:1] != (count,):
            raise ValueError(
                f"The output{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}, of a "
                f"microbatch of {count} rows. `apply` returns arrays [rows, ...]: give an "
                "`output` that returns no others. One number for a microbatch is a metric of "
                "`loss`."
            )


def from_metrics(metrics: dict[str, Array], model: Model, *shapes: PyTree) -> PyTree:
    """Returns the output of a model of `returning_outputs`, given the shapes of its arguments."""
    return from_leaves_by_path(metrics, jax.eval_shape(_output_function(model), *shapes))


def merge_pieces(x: Array, num_slices: int, mesh: Mesh) -> Array:
    """Returns [B, ...] rows in their order from [M * s, D, rows, ...], [B, T, ...] from slices."""
    count, rest = math.prod(x.shape[:3]) // num_slices, x.shape[3:]
    if num_slices > 1:
        x = x.reshape(x.shape[0] // num_slices, num_slices, *x.shape[1:])
        x, rest = jnp.moveaxis(x, 1, 3), (num_slices * rest[0], *rest[1:])
    axes = row_axes(mesh)
    if AxisType.Explicit in mesh.axis_types:  # which refuse to merge a sharded dim with others
        x = reshard_to_spec(x, PartitionSpec(None, None, None), mesh)
    x = x.reshape(count, *rest)
    return reshard_to_spec(x, PartitionSpec(axes), mesh) if axes else x


def sharded(outputs: PyTree, spec: PyTree, mesh: Mesh, *, has_stages: bool) -> PyTree:
    """Returns outputs that are sharded as a spec says, or a tree of specs that is a prefix."""

    def shard(spec: Any, tree: PyTree) -> PyTree:
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f"`spec` has {spec!r} as a leaf. Give a `PartitionSpec`, or a tree of them that is "
                "a prefix of the output."
            )
        allowed = [axis for axis in mesh.axis_names if has_stages or axis != "stage"]
        unknown = sorted(set(axes_of(spec)) - set(allowed))
        if unknown:
            raise ValueError(
                f"`spec` names {', '.join(map(repr, unknown))}. Give axes of {allowed}"
                + ("." if has_stages else ": the rank of the last stage has all outputs.")
            )
        return jax.tree.map(lambda leaf: reshard(leaf, NamedSharding(mesh, spec)), tree)

    return jax.tree.map(shard, spec, outputs)
