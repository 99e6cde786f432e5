"""The circular pipeline without a loop: all iterations are unrolled into the program."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ...autodiff import Remat, recompute
from ...autodiff.staged_model import Aux
from ..circular_engine import PipelineShape
from ..ranks import on_ranks
from ..weight_gather import EACH_TICK, Gather, identity
from ._iteration import (
    init_states,
    microbatch_and_repeat_ids,
    permute_output,
    run_one_iteration,
    take_repeats,
)
from ._weight_window import from_window, window_at


def circular_unrolled(
    stage: Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, Aux]],
    weights: PyTree,
    inputs: PyTree,
    batch_inputs: PyTree = (),
    keys: PyTree = (),
    *,
    mesh: Mesh | None = None,
    delay: bool = False,
    remat: Remat = recompute,
    gather: Gather = EACH_TICK,
) -> tuple[PyTree, Aux]:
    """Runs the stages as `circular` does, unrolled, and lets JAX derive the backward.

    XLA sees every iteration and may overlap and fuse across them, and decides how gradients are
    summed. Compile time grows with the number of iterations, M * R + d * (S - 1).

    Args:
        stage: `(weights of one stage, x, batch_inputs of one microbatch, its keys) -> (y, aux)`,
            or `-> y` without aux, which is dropped.
        weights: [R, S, ...] leaves, dim 1 sharded over the axis `stage`.
        inputs: [M, ...] leaves, dim 0 sharded over the axis `stage`.
        batch_inputs: [M, ...] leaves that every stage may read, replicated over the ranks.
        keys: [R, S, ...] dropout keys, folded with the microbatch's index before use; or ().
        mesh: A mesh with an axis `stage` of size S. None runs all ranks on one device.
        delay: Whether results are handed over one tick late, to overlap transfer and computation.
        remat: Wraps the stage. The default recomputes the stage in the backward.
        gather: When and how weights that are sharded over other axes are gathered.

    Returns:
        (outputs, {}). The outputs have the shapes of `inputs`.
    """
    repeats, ranks = jax.tree.leaves(weights)[0].shape[:2]
    num_microbatches = jax.tree.leaves(inputs)[0].shape[0]
    shape = PipelineShape(ranks, repeats, num_microbatches, 2 if delay else 1)
    unshard = on_ranks(
        lambda w: gather.unshard(gather.cast(w)), mesh=mesh, in_dims=(0,), out_dims=0
    )
    weights_at = _UNSHARD[gather.when](weights, shape, unshard, mesh)
    state = init_states(inputs, keys, shape)
    for t in range(shape.num_ticks):
        state = run_one_iteration(remat(stage), state, weights_at(t), batch_inputs, shape, mesh)
    outputs = permute_output(state["state_io"], shape)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs), {}


def _every_tick(
    weights: PyTree, shape: PipelineShape, unshard: Callable, mesh: Mesh | None
) -> Callable:
    def weights_at(t: int) -> PyTree:
        return unshard(take_repeats(weights, microbatch_and_repeat_ids(t, shape)[1], mesh=mesh))

    return weights_at


def _once(weights: PyTree, shape: PipelineShape, unshard: Callable, mesh: Mesh | None) -> Callable:
    copy = jax.vmap(unshard)(weights)
    return _every_tick(copy, shape, identity, mesh)


def _every_repeat(
    weights: PyTree, shape: PipelineShape, unshard: Callable, mesh: Mesh | None
) -> Callable:
    starts = range(0, shape.num_ticks, shape.num_microbatches)
    windows = [window_at(weights, t, shape, unshard) for t in starts]
    return lambda t: from_window(windows[t // shape.num_microbatches], t, shape)


_UNSHARD: dict[str, Callable] = {"tick": _every_tick, "once": _once, "repeat": _every_repeat}
"""Functions that return, from the stored weights, the function of the weights of an iteration."""
