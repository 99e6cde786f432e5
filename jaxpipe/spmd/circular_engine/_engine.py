"""The circular pipeline on whole arrays: as a layer, and as an engine with loss and gradients.

S ranks, R repeats, M microbatches, n = M / S of them on each rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree, Scalar

from ...autodiff import Remat, StagedModel, recompute
from ...autodiff.backward import floating
from ...autodiff.staged_model import Aux, with_aux
from ...sharding import num_ranks_of
from ...sharding.specs import typed_by_specs
from .._boundary import check_vocab_parallel
from .._options import NO_OPTIONS, EngineOptions
from .._whole_arrays import (
    check_rows,
    common_dims,
    gradient_dims,
    leaf_name,
    on_parts,
    rows_of,
    stacked_specs,
    value_dims,
    with_arrays,
)
from ..ranks import AXIS, on_ranks
from ..weight_gather import EACH_TICK, Gather
from ._invariants import CircularOptions, Stage
from ._loss import rank_value, rank_value_and_grad
from ._passes import backward_rank, forward_rank
from ._shape import check_circular


def circular(
    stage: Callable[[PyTree, PyTree, PyTree, PyTree], Any],
    weights: PyTree,
    inputs: PyTree,
    batch_inputs: PyTree = (),
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    delay: bool = False,
    remat: Remat = recompute,
    gather: Gather = EACH_TICK,
    scan_repeats: bool = True,
    scan_ticks: bool = True,
) -> tuple[PyTree, Aux]:
    """Runs R * S stages as one differentiable layer; stage `repeat * S + rank` runs on `rank`.

    The layer has a custom VJP, so it supports reverse-mode differentiation only.

    Args:
        stage: `(weights of one stage, x, batch_inputs of one microbatch, its keys) -> (y, aux)`,
            or `-> y` without aux; y has the shapes and dtypes of x. It is written for one device:
            XLA partitions it over the mesh axes other than `stage` and `gather.batch_axes`. It may
            name shardings over the whole mesh: `stage` and the batch axes are removed from them.
            It must not close over arrays that are differentiated.
        weights: [R, S, ...] leaves, dim 1 sharded over the axis `stage`.
        inputs: Any pytree of [M, ...] leaves, dim 0 sharded over the axis `stage`.
        batch_inputs: [M, ...] leaves that every stage may read, replicated over the ranks.
        keys: [R, S, ...] dropout keys, folded with the microbatch's index before use; or ().
        mesh: A mesh with an axis `stage` of size S. None runs all ranks on one device.
        delay: Whether results are handed over one tick late, so that the transfer overlaps with
            computation. This adds S - 1 ticks and, if R > 1, needs M >= 2 * S.
        remat: Wraps the stage. The default stores one input per tick and recomputes the rest.
        gather: When weights that are sharded over other axes are gathered.
        scan_repeats: Whether repeats run in a `lax.scan` (compiles faster) or are unrolled.
        scan_ticks: Whether the ticks of a repeat run in a `lax.scan` or are unrolled.

    Returns:
        (outputs, aux). The outputs have the shapes of `inputs`; aux is summed over all stages
        and microbatches.

    Raises:
        ValueError: If M is not a multiple of S, or too small; if `stage` changes shapes; if rows do
            not divide over `gather.batch_axes`.

    Example:
        >>> import jax.numpy as jnp
        >>> stage = lambda w, x, batch_inputs, rng: x + w
        >>> weights, inputs = jnp.ones((2, 4)), jnp.ones((4, 3))  # [R, S], [M, ...]: 8 stages
        >>> y, _ = jax.jit(lambda w, x: circular(stage, w, x))(weights, inputs)
        >>> y.tolist()[0]
        [9.0, 9.0, 9.0]

    References:
        The schedule is MaxText's circular pipeline; Narayanan et al., 2021, arXiv 2104.04473, call
        its stage assignment interleaved.
    """
    stacked = {"weights": weights, "keys": keys}
    microbatches = {"inputs": inputs, "batch_inputs": batch_inputs}
    num_ranks = _check_counts(stacked, microbatches, mesh, delay)
    check_rows(microbatches, gather.batch_axes, mesh)
    engine = EngineOptions(forwarding_delay=delay, scan_repeats=scan_repeats, scan_ticks=scan_ticks)
    options = CircularOptions(engine, remat, gather)
    shares = jax.tree.map(lambda x: x.reshape(num_ranks, -1, *x.shape[1:]), inputs)
    shares = typed_by_specs(shares, rows_of(gather, P(AXIS, None)), mesh)
    row_spec, stacked_weight_specs = rows_of(gather, P(None)), stacked_specs(gather.weight_specs)
    weights = typed_by_specs(weights, stacked_weight_specs, mesh)
    keys = typed_by_specs(keys, P(None, AXIS), mesh)
    batch_inputs = typed_by_specs(batch_inputs, row_spec, mesh)
    y, aux = _layer(with_aux(stage), mesh, options)(weights, shares, batch_inputs, keys)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), y), aux


def _layer(stage: Stage, mesh: Mesh | None, options: CircularOptions) -> Callable:
    """Returns `circular` as a function with a custom VJP.

    It is `(weights, inputs [S, n, ...], batch_inputs, keys) -> (outputs, aux)`.
    """
    gather = options.gather
    weights, gradients = stacked_specs(gather.weight_specs), stacked_specs(gather.gradient_specs)
    shares, batch_inputs, keys = rows_of(gather, P(AXIS, None)), rows_of(gather, P(None)), 1
    device = P((AXIS, *gather.batch_axes))

    def forward(save_residuals: bool) -> Callable:
        return on_ranks(
            partial(forward_rank, stage, options, save_residuals),
            mesh=mesh,
            in_dims=(weights, shares, batch_inputs, keys),
            out_dims=((shares, None), device),
        )

    backward = on_ranks(
        partial(backward_rank, stage, options),
        mesh=mesh,
        in_dims=(weights, shares, batch_inputs, keys, device, shares, None),
        out_dims=(gradients, shares, batch_inputs),
    )

    @jax.custom_vjp
    def layer(weights, inputs, batch_inputs, keys):
        return forward(False)(weights, inputs, batch_inputs, keys)[0]

    def layer_forward(*arguments):
        results, residuals = forward(True)(*arguments)
        return results, (arguments, residuals)

    def layer_backward(saved, cotangents):
        (weights, inputs, batch_inputs, keys), residuals = saved
        doutputs, daux = cotangents
        return *backward(
            weights, inputs, batch_inputs, keys, residuals, floating(doutputs), daux
        ), None

    layer.defvjp(layer_forward, layer_backward)
    return layer


def circular_value_and_grad(
    model: StagedModel,
    weights: dict[str, Any],
    batch_inputs: PyTree,
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    remat: Remat = recompute,
    gather: Gather = EACH_TICK,
    boundary_gather: Gather = EACH_TICK,
    options: EngineOptions = NO_OPTIONS,
) -> tuple[tuple[Scalar, Aux], dict[str, Any]]:
    """Returns loss, metrics and gradients of a batch that runs through the circular pipeline.

    All ranks compute embedding and loss, each for its share of M / S microbatches, unless they
    compute each loss together.

    Args:
        weights: The groups "embed", "stages" and "head"; leaves of "stages" are [R, S, ...].
        batch_inputs: [M, ...] leaves, the batch, which embedding, stages and loss read.
        keys: [R, S, ...] dropout keys, or () without dropout.
        mesh: A mesh with an axis `stage` of size S. None runs all ranks on one device.
        remat: Wraps the stage. The default stores one input per tick and recomputes the rest.
        options: Options of the engine. `zero1` and `reduce_dtype` are not read: `gather` and
            `boundary_gather` say how gradients are stored and summed.

    Returns:
        ((loss, metrics), gradients). The loss is a scalar; gradients are like `weights`.

    Example:
        >>> import jax.numpy as jnp
        >>> model = StagedModel(
        ...     embed=lambda w, batch: batch["x"] * w,
        ...     stage=lambda w, x, batch, rng: x + w,
        ...     loss=lambda boundary, y, batch: (jnp.sum(y * boundary["head"]), {}),
        ... )
        >>> weights = {"embed": jnp.ones(()), "stages": jnp.ones((1, 2)), "head": jnp.ones(())}
        >>> run = jax.jit(lambda weights, x: circular_value_and_grad(model, weights, {"x": x}))
        >>> (loss, _), grads = run(weights, jnp.ones((2, 4)))  # 2 microbatches
        >>> float(loss), grads["stages"].tolist()
        (24.0, [[8.0, 8.0]])
    """
    stacked = {"weights['stages']": weights["stages"], "keys": keys}
    _check_counts(stacked, {"batch_inputs": batch_inputs}, mesh, options.forwarding_delay)
    check_rows({"batch_inputs": batch_inputs}, gather.batch_axes, mesh)
    check_vocab_parallel(model, options.vocab_parallel)
    rank_options = CircularOptions(options, remat, gather, model.mark_idle)
    rank_fn = partial(rank_value_and_grad, options=rank_options, boundary_gather=boundary_gather)
    out_dims = value_dims(gather), gradient_dims(gather, boundary_gather)
    run = on_parts(rank_fn, model, mesh, gather, boundary_gather, out_dims)
    value, (stage_grads, boundary_grads) = run(weights, batch_inputs, keys)
    return with_arrays(value, batch_inputs), boundary_grads | {"stages": stage_grads}


def circular_value(
    model: StagedModel,
    weights: dict[str, Any],
    batch_inputs: PyTree,
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    gather: Gather = EACH_TICK,
    boundary_gather: Gather = EACH_TICK,
    options: EngineOptions = NO_OPTIONS,
) -> tuple[Scalar, Aux]:
    """Returns loss and metrics of a batch, without gradients.

    Takes the arguments of `circular_value_and_grad`.
    """
    stacked = {"weights['stages']": weights["stages"], "keys": keys}
    _check_counts(stacked, {"batch_inputs": batch_inputs}, mesh, options.forwarding_delay)
    check_rows({"batch_inputs": batch_inputs}, gather.batch_axes, mesh)
    check_vocab_parallel(model, options.vocab_parallel)
    rank_options = CircularOptions(options, recompute, gather, model.mark_idle)
    rank_fn = partial(rank_value, options=rank_options, boundary_gather=boundary_gather)
    run = on_parts(rank_fn, model, mesh, gather, boundary_gather, value_dims(gather))
    return with_arrays(run(weights, batch_inputs, keys), batch_inputs)


def _check_counts(stacked: PyTree, microbatches: PyTree, mesh: Mesh | None, delay: bool) -> int:
    """Checks every leaf, and R, S and M against each other and the mesh."""
    num_repeats, num_ranks = common_dims(stacked, 2, "[repeats, ranks, ...]")
    (num_microbatches,) = common_dims(microbatches, 1, "[microbatches, ...]")
    check_mesh(mesh, num_ranks, stacked)
    check_circular(num_ranks, num_repeats, num_microbatches, delay=delay)
    return num_ranks


def check_mesh(mesh: Mesh | None, num_ranks: int, stacked: PyTree) -> None:
    """Checks that the axis `stage` of `mesh` has `num_ranks` devices; errors name `stacked`."""
    if mesh is None:
        return
    ranks = num_ranks_of(mesh)
    if ranks == num_ranks:
        return
    path, leaf = jax.tree_util.tree_leaves_with_path(stacked)[0]
    name = leaf_name(path)
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
