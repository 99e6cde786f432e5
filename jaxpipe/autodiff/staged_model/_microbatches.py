"""Functions that every engine applies to microbatches alike: slices, dropout keys, and sums."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar, Shaped

from ._staged_model import Aux


def index_leading(tree: PyTree, index: Any) -> PyTree:
    """Returns entry `index` of dim 0 of every leaf, an arbitrary one if `index` is out of range."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


class SameForAllMicrobatches:
    """Base class of pytree nodes whose random keys are parameters, and no keys of dropout."""


def fold_in_microbatch(keys: PyTree, microbatch: Any) -> PyTree:
    """Returns `keys` with the index of a microbatch folded into every random key.

    Other leaves, and those of a node `SameForAllMicrobatches`, are returned unchanged.
    """

    def is_same(x: Any) -> bool:
        return isinstance(x, SameForAllMicrobatches)

    def fold_leaf(leaf: Any) -> Any:
        if is_same(leaf) or not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        folded = jax.vmap(lambda key: jax.random.fold_in(key, microbatch))(leaf.reshape(-1))
        return folded.reshape(leaf.shape)

    return jax.tree.map(fold_leaf, keys, is_leaf=is_same)


def accum_dtype(value: Any) -> Any:
    """Returns the dtype, at least float32, in which values of this dtype are summed."""
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.result_type(float)  # float64 under x64
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def slice_sequences(tree: PyTree, num_slices: int, dim: int) -> PyTree:
    """Cuts the T positions in `dim` of [M, ...] leaves into slices: [M * s, ...] leaves with T / s.

    Example:
        >>> slice_sequences(jnp.arange(8).reshape(2, 4), 2, dim=1).tolist()
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def cut(leaf: jax.Array) -> jax.Array:
        shape = leaf.shape
        length = shape[dim] // num_slices
        slices = leaf.reshape(*shape[:dim], num_slices, length, *shape[dim + 1 :])
        slices = jnp.moveaxis(slices, dim, 1)
        return slices.reshape(shape[0] * num_slices, *slices.shape[2:])

    return tree if num_slices == 1 else jax.tree.map(cut, tree)


def sum_scalars(tree: PyTree[Shaped[Array, "steps ..."]]) -> PyTree:
    """Returns scalars summed over dim 0, the steps of a scan; arrays [steps, ...] stay as they are.

    Example:
        >>> sums = sum_scalars({"loss": jnp.ones(3), "of_rows": jnp.ones((3, 2))})
        >>> float(sums["loss"]), sums["of_rows"].shape
        (3.0, (3, 2))
    """
    return jax.tree.map(lambda x: jnp.sum(x, axis=0) if x.ndim == 1 else x, tree)


def split_metrics(metrics: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (scalars, arrays) of metrics, which may be shapes."""
    scalars = {name: x for name, x in metrics.items() if jnp.ndim(x) == 0}
    return scalars, {name: x for name, x in metrics.items() if name not in scalars}


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, such as "['logits']"."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def from_leaves_by_path(leaves: dict[str, Any], like: PyTree) -> PyTree:
    """Returns the inverse of `leaves_by_path`; `like` has the structure of the tree."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(like))
    return jax.tree.structure(like).unflatten([leaves[jax.tree_util.keystr(p)] for p in paths])


def merge_leading(tree: PyTree) -> PyTree:
    """Returns [a * b, ...] leaves from [a, b, ...] leaves."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def combine_losses(loss: Scalar, loss_metrics: Aux, stage_aux: Aux) -> tuple[Scalar, Aux]:
    """Adds the entry "loss" of `stage_aux` to the loss, and returns it with all other metrics."""
    clash = sorted(set(loss_metrics) & set(stage_aux))
    if clash:
        raise ValueError(f"`loss` and `layer` both return {clash}. Rename them in one of the two.")
    metrics = loss_metrics | {name: x for name, x in stage_aux.items() if name != "loss"}
    return loss + stage_aux.get("loss", 0.0), metrics
