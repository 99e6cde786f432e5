"""The call of a pipeline module, the same for both rims: a layer's function, and a batch."""

import logging
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from ._circular_engine import circular
from ._layers import Layer, from_microbatches, pipeline_layers, to_microbatches
from ._methods import PipelineMethods
from ._placement import describe_placement, physical_specs, place_microbatches
from ._unrolled import circular_unrolled


def split_batch(pipeline: PipelineMethods, inputs: PyTree, side: PyTree) -> tuple[PyTree, PyTree]:
    """[batch, ...] leaves of inputs and side as [M, rows, ...], on the pipeline's mesh."""
    counts, rows = pipeline.settings.counts, pipeline.settings.batch_size
    split = to_microbatches({"inputs": inputs} | side, counts.num_microbatches, rows)
    inputs = place_microbatches(split.pop("inputs"), pipeline.axis_rules, pipeline.mesh)
    return inputs, split


def run_batch(
    layer: Layer,
    weights: PyTree,
    names: PyTree,
    inputs: PyTree,
    side: dict[str, Any],
    keys: PyTree,
    pipeline: PipelineMethods,
) -> tuple[PyTree, PyTree]:
    """Sends a batch through all layers.

    Args:
        layer: `(weights, x, side, rng) -> (y, records)`.
        weights: [R, S, L, ...] leaves.
        names: Logical specs of the weights.
        inputs: [batch, ...] leaves.
        side: [batch, ...] leaves by name.
        keys: [R, S, L] leaves, or ().
        pipeline: Settings, axis rules and mesh.

    Returns:
        (outputs like `inputs`, records with [R, S, L, M, ...] leaves).
    """
    settings, mesh = pipeline.settings, pipeline.mesh
    specs = physical_specs(names, pipeline.axis_rules, mesh)
    if settings.debug_sharding:
        logging.getLogger("jaxpipe").info(describe_placement(weights, names, specs))
    engine = partial(
        circular if settings.scan_ticks else circular_unrolled,
        mesh=mesh,
        delay=settings.counts.hop > 1,
        remat=settings.remat_tick,
    )
    xs, side = split_batch(pipeline, inputs, side)
    ys, records = pipeline_layers(engine, layer, weights, xs, side, keys, settings)
    return from_microbatches(ys), records


def first_microbatch(
    pipeline: PipelineMethods, inputs: PyTree, side: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """What a layer is initialised with: (inputs, side) of microbatch 0."""
    return jax.tree.map(lambda leaf: leaf[0], split_batch(pipeline, inputs, side))
