"""The circular pipeline on whole arrays: as a layer, and as an engine with loss and gradients.

S ranks, R repeats, M microbatches, n = M / S of them on each rank.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree, Scalar

from ... import sharding
from ...autodiff import Model, Remat, Sums, floating, recompute, with_aux
from .._ranks import AXIS, on_ranks
from .._weight_gather import EACH_TICK, Gather
from ._loss import rank_value, rank_value_and_grad
from ._passes import How, Stage, backward_rank, forward_rank
from ._shape import check_circular


def circular(
    stage: Callable[[PyTree, PyTree, PyTree, PyTree], Any],
    weights: PyTree,
    inputs: PyTree,
    side: PyTree = (),
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    delay: bool = False,
    remat: Remat = recompute,
    gather: Gather = EACH_TICK,
    scan_repeats: bool = True,
) -> tuple[PyTree, Sums]:
    """A stack of R * S stages as one differentiable layer, stage `repeat * S + rank` on `rank`.

    Its derivative is written out: it has a reverse mode only.

    Args:
        stage: `(weights of one stage, x, side of one microbatch, its keys) -> (y, sums)`, or `-> y`
            without sums; y is like x. Written for one device; axes of the mesh other than `stage`
            are XLA's business, but for `gather.batch_axes`. Shardings that it names may be over the
            whole mesh: `stage` and batch axes are left out of them. It closes over nothing that is
            differentiated.
        weights: [R, S, ...] leaves, dim 1 split over the axis `stage`.
        inputs: [M, ...] leaves, dim 0 split over the axis `stage`. Any pytree.
        side: [M, ...] leaves that every stage may read, on every rank.
        keys: [R, S, ...] dropout keys, folded with the microbatch's index before use; or ().
        mesh: A mesh with an axis `stage` of size S. None: one device plays all ranks.
        delay: Hand results over one tick late, so that the transfer overlaps with work. Costs S - 1
            ticks more and, if R > 1, needs M >= 2 * S.
        remat: Wraps the stage. Default: keep one input per tick, compute the rest again.
        gather: When weights that are split over other axes are gathered.
        scan_repeats: Whether repeats are a loop of the program (compiles fast), or written out.

    Returns:
        (outputs like `inputs`, sums over all stages and microbatches).

    Raises:
        ValueError: If M is not a multiple of S, or too small; if `stage` changes shapes; if rows do
            not divide over `gather.batch_axes`.

    References:
        The schedule is MaxText's circular pipeline; Narayanan et al., 2021, arXiv 2104.04473, call
        its stage assignment interleaved.
    """
    stacked, microbatches = {"weights": weights, "keys": keys}, {"inputs": inputs, "side": side}
    num_ranks = _check_counts(stacked, microbatches, mesh, delay)
    check_rows(microbatches, gather.batch_axes, mesh)
    layer = _layer(with_aux(stage), mesh, How(delay, remat, gather, scan_repeats))
    shares = _typed(_to_shares(inputs, num_ranks), rows_of(gather, P(AXIS, None)), mesh)
    of_rows, of_ranks = rows_of(gather, P(None)), stacked_specs(gather.weight_specs)
    weights, keys = _typed(weights, of_ranks, mesh), _typed(keys, P(None, AXIS), mesh)
    y, sums = layer(weights, shares, _typed(side, of_rows, mesh), keys)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), y), sums


def _layer(stage: Stage, mesh: Mesh | None, how: How) -> Callable:
    """`(weights, inputs [S, n, ...], side, keys) -> (outputs, sums)` with its own backward."""

    gather = how.gather
    weights, gradients = stacked_specs(gather.weight_specs), stacked_specs(gather.gradient_specs)
    shares, side, keys = rows_of(gather, P(AXIS, None)), rows_of(gather, P(None)), 1
    device = P((AXIS, *gather.batch_axes))

    def forward(keep: bool) -> Callable:
        return on_ranks(
            partial(forward_rank, stage, how, keep),
            mesh=mesh,
            in_dims=(weights, shares, side, keys),
            out_dims=((shares, None), device),
        )

    backward = on_ranks(
        partial(backward_rank, stage, how),
        mesh=mesh,
        in_dims=(weights, shares, side, keys, device, shares, None),
        out_dims=(gradients, shares, side),
    )

    @jax.custom_vjp
    def layer(weights, inputs, side, keys):
        return forward(False)(weights, inputs, side, keys)[0]

    def layer_forward(*arguments):
        results, kept = forward(True)(*arguments)
        return results, (arguments, kept)

    def layer_backward(saved, cotangents):
        (weights, inputs, side, keys), kept = saved
        doutputs, dsums = cotangents
        return *backward(weights, inputs, side, keys, kept, floating(doutputs), dsums), None

    layer.defvjp(layer_forward, layer_backward)
    return layer


def rows_of(gather: Gather, lead: P) -> P:
    """For arrays whose rows come after the dims of `lead`."""
    return P(*lead, gather.batch_axes) if gather.batch_axes else lead


def _typed(tree: PyTree, specs: PyTree, mesh: Mesh | None) -> PyTree:
    """Returns `tree` split as its cotangent will be: with explicit axes the type includes that.

    Args:
        tree: Arrays, of numpy too.
        specs: A spec for every leaf, or for all of a subtree.
        mesh: The mesh, or None.
    """
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return tree

    def of_subtree(spec, subtree):
        return jax.tree.map(lambda x: sharding.reshard_to_spec(jnp.asarray(x), spec, mesh), subtree)

    return jax.tree.map(of_subtree, specs, tree, is_leaf=lambda x: isinstance(x, P))


def stacked_specs(specs: PyTree) -> PyTree:
    """From weights of one stage to leaves [R, S, ...]."""
    return jax.tree.map(
        lambda spec: P(None, AXIS, *spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


def circular_value_and_grad(
    model: Model,
    weights: dict[str, Any],
    side: PyTree,
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    delay: bool = False,
    remat: Remat = recompute,
    gather: Gather = EACH_TICK,
    ends_gather: Gather = EACH_TICK,
    scan_repeats: bool = True,
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
        remat: As in `circular`.
        gather: As in `circular`, for the stages.
        ends_gather: The same for `{"embed": ..., "head": ...}`, whatever its `when`: they are
            gathered once.
        scan_repeats: As in `circular`.

    Returns:
        ((loss, metrics), gradients like `weights`).

    Raises:
        ValueError: As `circular`.
    """
    stacked = {"weights['stages']": weights["stages"], "keys": keys}
    _check_counts(stacked, {"side": side}, mesh, delay)
    check_rows({"side": side}, gather.batch_axes, mesh)
    how = How(delay, remat, gather, scan_repeats)
    of_rank = partial(rank_value_and_grad, model, how, ends_gather)
    run = on_parts(of_rank, mesh, gather, ends_gather, (None, gradient_dims(gather, ends_gather)))
    value, (of_stages, of_ends) = run(weights, side, keys)
    return value, of_ends | {"stages": of_stages}


def circular_value(
    model: Model,
    weights: dict[str, Any],
    side: PyTree,
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    delay: bool = False,
    gather: Gather = EACH_TICK,
    ends_gather: Gather = EACH_TICK,
    scan_repeats: bool = True,
) -> tuple[Scalar, Sums]:
    """Loss and metrics of a batch, without gradients.

    Args:
        model: The model.
        weights: As in `circular_value_and_grad`.
        side: As there.
        keys: As there.
        mesh: As there.
        delay: As there.
        gather: As there.
        ends_gather: As there.
        scan_repeats: As there.

    Returns:
        (loss, metrics).

    Raises:
        ValueError: As `circular`.
    """
    stacked = {"weights['stages']": weights["stages"], "keys": keys}
    _check_counts(stacked, {"side": side}, mesh, delay)
    check_rows({"side": side}, gather.batch_axes, mesh)
    how = How(delay, recompute, gather, scan_repeats)
    of_rank = partial(rank_value, model, how, ends_gather)
    return on_parts(of_rank, mesh, gather, ends_gather, None)(weights, side, keys)


def on_parts(
    f: Callable, mesh: Mesh | None, gather: Gather, ends_gather: Gather, out_dims: Any
) -> Callable:
    """`(weights, side, keys) -> ...` of `f(stages, ends, side, keys)`, written for one rank."""
    in_dims = (
        stacked_specs(gather.weight_specs),
        ends_gather.weight_specs,
        rows_of(gather, P(None)),
        1,
    )
    run = on_ranks(f, mesh=mesh, in_dims=in_dims, out_dims=out_dims)

    def of_whole(weights: dict[str, Any], side: PyTree, keys: PyTree) -> Any:
        ends = {name: w for name, w in weights.items() if name != "stages"}
        return run(weights["stages"], ends, side, keys)

    return of_whole


def gradient_dims(gather: Gather, ends_gather: Gather) -> tuple[PyTree, PyTree]:
    """`out_dims` for gradients of the stages and of the ends."""
    return stacked_specs(gather.gradient_specs), ends_gather.gradient_specs


def _check_counts(stacked: PyTree, microbatches: PyTree, mesh: Mesh | None, delay: bool) -> int:
    """S, after a check of every leaf, and of R, S and M against each other and the mesh.

    Args:
        stacked: Weights and keys, [R, S, ...] leaves.
        microbatches: Inputs and side, [M, ...] leaves.
        mesh: The mesh, or None.
        delay: Whether hand-overs are delayed.
    """
    num_repeats, num_ranks = common_dims(stacked, 2, "[repeats, ranks, ...]")
    (num_microbatches,) = common_dims(microbatches, 1, "[microbatches, ...]")
    check_mesh(mesh, num_ranks, stacked)
    check_circular(num_ranks, num_repeats, num_microbatches, delay=delay)
    return num_ranks


def check_mesh(mesh: Mesh | None, num_ranks: int, stacked: PyTree) -> None:
    """Raises a `ValueError` unless `mesh` has as many ranks as the leaves in dim 1.

    Args:
        mesh: The mesh, or None.
        num_ranks: The size of dim 1.
        stacked: [R, S, ...] leaves.
    """
    if mesh is None:
        return
    ranks = mesh.shape.get(AXIS)
    if ranks is None:
        raise ValueError(
            f"`mesh` has the axes {tuple(mesh.axis_names)}. A pipeline needs one that is named "
            f"{AXIS!r}."
        )
    if ranks == num_ranks:
        return
    path, leaf = jax.tree_util.tree_leaves_with_path(stacked)[0]
    name = _name_of(path)
    raise ValueError(
        f"{name} has shape {leaf.shape}, of which the first two dims are [repeats, ranks]: "
        f"{num_ranks} ranks, but the axis {AXIS!r} of `mesh` {dict(mesh.shape)} has {ranks}. "
        + _stacked_hint(leaf.shape, ranks)
    )


def _stacked_hint(shape: tuple[int, ...], ranks: int) -> str:
    if shape[0] == ranks:
        return (
            f"If dim 0 holds the {ranks} ranks, the repeats are missing: give `w[None]`, of shape "
            f"{(1, *shape)}."
        )
    if shape[0] % ranks == 0:
        stacked = shape[0] // ranks, ranks, *shape[1:]
        return (
            f"If dim 0 holds the {shape[0]} stages in forward order, give "
            f"`w.reshape({stacked[0]}, {ranks}, *w.shape[1:])`, of shape {stacked}."
        )
    return "They must be equal."


def check_rows(microbatches: PyTree, batch_axes: tuple[str, ...], mesh: Mesh | None) -> None:
    """Dim 1 of every leaf holds rows, if devices are to have rows of their own."""
    if not batch_axes:
        return
    if mesh is None:
        raise ValueError(
            f"`gather.batch_axes` is {batch_axes} and `mesh` is None: one device has all rows. "
            "Give a mesh, or no batch axes."
        )
    parts = math.prod(mesh.shape[axis] for axis in batch_axes)
    for path, x in jax.tree_util.tree_leaves_with_path(microbatches):
        if x.ndim < 2 or x.shape[1] % parts:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has dims {x.shape}. Dim 1 must hold rows that "
                f"divide over {' x '.join(batch_axes)} = {parts}, as `gather.batch_axes` says."
            )


def common_dims(tree: dict[str, PyTree], count: int, meaning: str) -> tuple[int, ...]:
    """The first `count` dims, which all leaves must share."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError(f"`{'` and `'.join(tree)}` have no arrays. Give leaves {meaning}.")
    given = [(_name_of(path), jnp.shape(x)) for path, x in leaves]
    first, wanted = given[0]
    for name, shape in given:
        if len(shape) < count:
            raise ValueError(
                f"{name} has shape {shape}. All leaves of `{'` and `'.join(tree)}` are {meaning}: "
                "give it these dims in front."
            )
        if shape[:count] != wanted[:count]:
            raise ValueError(
                f"{name} has shape {shape} and {first} {wanted}. All leaves of "
                f"`{'` and `'.join(tree)}` are {meaning}, with the same sizes of these dims."
            )
    return wanted[:count]


def _name_of(path: tuple) -> str:
    """A leaf as the caller would write it: `weights['w']` of the path `['weights']['w']`."""
    return path[0].key + jax.tree_util.keystr(path[1:])


def _to_shares(tree: PyTree, num_ranks: int) -> PyTree:
    """[M, ...] -> [S, n, ...]"""
    return jax.tree.map(lambda x: x.reshape(num_ranks, -1, *x.shape[1:]), tree)
