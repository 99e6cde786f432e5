"""Calls a pipeline of NNX layers."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

from ..modules._frontend import run_batch
from ..modules._methods import to_batch_inputs
from ..modules._weight_sharding import rules_in_stage
from . import _layer as layers_of
from . import _stacked as stacked
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
    state = weight_state(layers)
    names = stacked.logical_specs(state) if names is None else names
    rules = rules_in_stage(pipeline.settings.rules)
    ys, sown = run_batch(
        layers_of.layer_function(layers, rules, True, *options),
        layers_of.weights_of(state),
        names,
        inputs,
        to_batch_inputs(segment_ids, positions),
        layers_of.draw_keys(layers, advance=not deterministic),
        pipeline,
        overwritten=layers_of.overwritten_in(state),
        microbatched=microbatched,
    )
    if jax.tree.leaves(sown):
        store(layers, sown)
    return ys
