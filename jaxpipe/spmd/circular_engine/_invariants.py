"""Values that all ticks of a circular pipeline read: its shape, the traced stage, its inputs."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree, Shaped

from ...autodiff.backward import Pullback, pullback
from ...autodiff.staged_model import Aux, fold_in_microbatch, index_leading
from .._options import EngineOptions
from ..ranks import AXIS, pvary
from ..weight_gather import Gather, WeightGather, read_after, weight_gather
from ._shape import PipelineShape, TickWork, check_circular

Stage = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, Aux]]


class CircularOptions(NamedTuple):
    """Options of a circular pipeline.

    Attributes:
        engine: Options of the engine, of which a loop reads delay and scans.
        remat: Wraps a stage, and so decides which residuals a tick stores for the backward.
        mark_idle: `StagedModel.mark_idle`, by which a stage knows whether its results are used.
    """

    engine: EngineOptions
    remat: Callable[[Callable], Callable]
    gather: Gather
    mark_idle: Callable[[PyTree, Array], PyTree] = lambda inputs, busy: inputs


class CircularInvariants(NamedTuple):
    """Loop invariants: the values that a tick reads and does not change, on one rank.

    Attributes:
        gather: Functions that gather this rank's weights and reduce-scatter their gradients.
    """

    shape: PipelineShape
    stage: Pullback
    gather: WeightGather
    batch_inputs: PyTree[Shaped[Array, "M ..."]]
    keys: PyTree[Shaped[Array, "R ..."]]
    options: CircularOptions


def prepare(
    stage: Stage,
    options: CircularOptions,
    weights: PyTree[Shaped[Array, "R ..."]],
    inputs: PyTree[Shaped[Array, "n ..."]],
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "R ..."]],
) -> tuple[CircularInvariants, PyTree]:
    """Traces the stage and its backward; returns the loop invariants and the shapes of its aux."""
    S, n = lax.axis_size(AXIS), jax.tree.leaves(inputs)[0].shape[0]
    R = jax.tree.leaves((weights, keys))[0].shape[0]
    check_circular(S, R, S * n, delay=options.engine.forwarding_delay)

    gather = weight_gather(options.gather, weights, read=read_after)
    # Only the types of these arguments are used, to trace the stage.
    x, first, key = (index_leading(tree, 0) for tree in (inputs, batch_inputs, keys))
    first = options.mark_idle(first, pvary(jnp.asarray(True)))
    examples = gather.unshard(gather.window(gather.prefetch(0), 0)), x, first, key
    _, aux_shapes = jax.eval_shape(stage, *examples)
    shape = PipelineShape(S, R, S * n, 1 + options.engine.forwarding_delay)

    def varying(*arguments: PyTree) -> tuple[PyTree, Aux]:
        y, aux = stage(*arguments)
        return y, jax.tree.map(pvary, aux)  # also of constants, as their cotangents do

    # A result that is handed over late has a tick of its own to arrive.
    in_parts = not options.engine.forwarding_delay
    traced = pullback(options.remat(varying), *examples, in_parts=in_parts)
    invariants = CircularInvariants(
        shape=shape,
        stage=traced,
        gather=gather,
        batch_inputs=batch_inputs,
        keys=keys,
        options=options,
    )
    return invariants, aux_shapes


def begins_repeat(work: TickWork) -> Bool[Array, ""]:
    """Returns whether a rank begins a repeat with `work`."""
    return work.busy & (work.microbatch == 0)


def batch_inputs_and_keys(invariants: CircularInvariants, work: TickWork) -> tuple[PyTree, PyTree]:
    """Returns batch_inputs and keys of the microbatch that a rank works on."""
    keys = fold_in_microbatch(index_leading(invariants.keys, work.repeat), work.microbatch)
    inputs = index_leading(invariants.batch_inputs, work.microbatch)
    return invariants.options.mark_idle(inputs, pvary(jnp.asarray(work.busy))), keys
