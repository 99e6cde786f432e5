"""Calls a pipeline of NNX layers."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

from ..modules import run_batch, to_batch_inputs
from . import _layer as layers_of
from ._sown import store, without_sown


def weight_state(layers: nnx.Module) -> PyTree:
    """Returns all variables except random state and sown values."""
    return nnx.state(without_sown(layers), nnx.Not(nnx.RngState))


def run(
    pipeline: Any,
    inputs: Any,
    segment_ids: Any,
    positions: Any,
    names: Any,
    *options: Any,
    microbatched: bool = False,
) -> Any:
    """Runs inputs through all layers and stores the values they sow in `pipeline.layers`."""
    layers, deterministic = pipeline.layers, options[0]
    counts = jax.tree.map(lambda count: count, nnx.state(layers, nnx.RngCount))
    ys, sown = run_batch(
        pipeline.layer_function(*options, records=True),
        pipeline.layer_variables(),
        pipeline.get_weight_sharding() if names is None else names,
        inputs,
        to_batch_inputs(segment_ids, positions),
        pipeline.draw_keys,
        pipeline,
        overwritten=layers_of.overwritten_in(weight_state(layers)),
        options=options,
        microbatched=microbatched,
    )
    if deterministic:  # its keys are of no use
        nnx.update(layers, counts)
    if jax.tree.leaves(sown):
        store(layers, sown)
    return ys
