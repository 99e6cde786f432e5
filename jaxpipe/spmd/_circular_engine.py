"""The circular pipeline on whole arrays: as a layer, and as an engine with loss and gradients.

S ranks, R repeats, M microbatches, n = M / S of them on each rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import PyTree, Scalar

from ..autodiff import Model, Sums, joined, total
from ._circular import Remat, check_circular, run_rank
from ._ranks import AXIS, on_ranks

# Inside a scan nothing can be shared between forward and backward but what the scan saves.
recompute: Remat = partial(jax.checkpoint, prevent_cse=False)
"""Keeps the input of a tick and computes the rest again in the backward."""


def keep(work: Callable) -> Callable:
    """Keeps everything that the backward needs: no rematerialisation."""
    return work


def circular(
    stage: Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, Sums]],
    weights: PyTree,
    inputs: PyTree,
    side: PyTree = (),
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    delay: bool = False,
    remat: Remat = recompute,
) -> tuple[PyTree, Sums]:
    """A stack of R * S stages as one differentiable layer, stage `repeat * S + rank` on `rank`.

    Args:
        stage: `(weights of one stage, x, side of one microbatch, its keys) -> (y, sums)`; y is like
            x. Written for one device; axes of the mesh other than `stage` are XLA's business.
        weights: [R, S, ...] leaves, dim 1 split over the axis `stage`.
        inputs: [M, ...] leaves, dim 0 split over the axis `stage`. Any pytree.
        side: [M, ...] leaves that every stage may read, on every rank.
        keys: [R, S, ...] dropout keys, folded with the microbatch's index before use; or ().
        mesh: A mesh with an axis `stage` of size S. None: one device plays all ranks.
        delay: Hand results over one tick late, so that the transfer overlaps with work. Costs S - 1
            ticks more and, if R > 1, needs M >= 2 * S.
        remat: Wraps the work of a tick. Default: keep one input per tick, compute the rest again.

    Returns:
        (outputs like `inputs`, sums over all stages and microbatches).

    Raises:
        ValueError: If M is not a multiple of S, or too small; if `stage` changes shapes.

    References:
        The schedule is MaxText's circular pipeline; Narayanan et al., 2021, arXiv 2104.04473, call
        its stage assignment interleaved.
    """
    stacked, microbatches = {"weights": weights, "keys": keys}, {"inputs": inputs, "side": side}
    num_ranks = _check_counts(stacked, microbatches, mesh, delay)

    def rank(weights, inputs, side, keys):
        y, sums = run_rank(stage, weights, inputs, side, keys, delay=delay, remat=remat)
        return y, lax.psum(sums, AXIS)

    run = on_ranks(rank, mesh=mesh, in_dims=(1, 0, None, 1), out_dims=(0, None))
    y, sums = run(weights, _to_shares(inputs, num_ranks), side, keys)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), y), sums


def circular_value_and_grad(
    model: Model,
    weights: dict[str, Any],
    side: PyTree,
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    delay: bool = False,
    remat: Remat = recompute,
) -> tuple[tuple[Scalar, Sums], dict[str, Any]]:
    """Loss, metrics and gradients of a batch through the circular pipeline.

    Embedding and loss are computed by all ranks, each for its share of the microbatches.

    Args:
        model: The model.
        weights: The three groups; leaves of `weights["stages"]` are [R, S, ...].
        side: [M, ...] leaves.
        keys: [R, S, ...] leaves, or () without dropout.
        mesh: As in `circular`.
        delay: As in `circular`.
        remat: As in `circular`; it wraps the loss of a microbatch too.

    Returns:
        ((loss, metrics), gradients like `weights`).

    Raises:
        ValueError: As `circular`.
    """
    _check_counts({"weights": weights["stages"], "keys": keys}, {"side": side}, mesh, delay)

    def rank_loss(stages, ends, side, keys):
        share = _share_of_rank(side)
        x = jax.vmap(model.embed, in_axes=(None, 0))(ends["embed"], share)
        y, of_stages = run_rank(model.stage, stages, x, side, keys, delay=delay, remat=remat)
        loss = remat(partial(model.loss, model.ends(ends)))
        losses, of_loss = lax.map(lambda xs: loss(*xs), (y, share))
        return lax.psum(joined(jnp.sum(losses), total(of_loss), of_stages), AXIS)

    run = on_ranks(rank_loss, mesh=mesh, in_dims=(1, None, None, 1), out_dims=None)

    def loss(weights):
        ends = {name: w for name, w in weights.items() if name != "stages"}
        return run(weights["stages"], ends, side, keys)

    return jax.value_and_grad(loss, has_aux=True)(weights)


def _check_counts(stacked: PyTree, microbatches: PyTree, mesh: Mesh | None, delay: bool) -> int:
    """S, after a check of every leaf, and of R, S and M against each other and the mesh.

    Args:
        stacked: Weights and keys, [R, S, ...] leaves.
        microbatches: Inputs and side, [M, ...] leaves.
        mesh: The mesh, or None.
        delay: Whether hand-overs are delayed.
    """
    num_repeats, num_ranks = _common_dims(stacked, 2, "[repeats, ranks, ...]")
    (num_microbatches,) = _common_dims(microbatches, 1, "[microbatches, ...]")
    if mesh is not None and mesh.shape.get(AXIS) != num_ranks:
        raise ValueError(
            f"`weights` has {num_ranks} ranks in dim 1, but the axis {AXIS!r} of `mesh` "
            f"{dict(mesh.shape)} has {mesh.shape.get(AXIS)}. They must be equal."
        )
    check_circular(num_ranks, num_repeats, num_microbatches, delay=delay)
    return num_ranks


def _common_dims(tree: dict[str, PyTree], count: int, meaning: str) -> tuple[int, ...]:
    """The first `count` dims, which all leaves must share."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError(f"`{'` and `'.join(tree)}` have no arrays. Give leaves {meaning}.")
    dims = {jax.tree_util.keystr(path): x.shape[:count] for path, x in leaves}
    first, wanted = next(iter(dims.items()))
    for name, found in dims.items():
        if found != wanted or len(found) < count:
            raise ValueError(
                f"{name} starts with dims {found} and {first} with {wanted}. All leaves of "
                f"`{'` and `'.join(tree)}` are {meaning}."
            )
    return wanted


def _to_shares(tree: PyTree, num_ranks: int) -> PyTree:
    """[M, ...] -> [S, n, ...]"""
    return jax.tree.map(lambda x: x.reshape(num_ranks, -1, *x.shape[1:]), tree)


def _share_of_rank(tree: PyTree) -> PyTree:
    """[M, ...] -> this rank's [n, ...]"""

    def share(x):
        size = x.shape[0] // lax.axis_size(AXIS)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size)

    return jax.tree.map(share, tree)
