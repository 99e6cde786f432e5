"""A Linen layer as a pure function, and the two things a pipeline module does with it."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax.core import unfreeze
from flax.core.spmd import get_logical_axis_rules

from .. import sharding, spmd
from . import _collections as collections
from . import _stacked as stacked

NAME = "layers"
"""The variables of all layers lie at this name in each collection of the pipeline."""


def layer_function(
    layer: nn.Module, rules: spmd.AxisRules | None, mutable: Any, *options: Any
) -> spmd.Layer:
    """`layer` as `(variables, x, side, rngs) -> (y, sown)`.

    Args:
        layer: A module; its call is `(inputs, segment_ids, positions, deterministic, model_mode)`,
            and it returns the outputs, or (outputs, None).
        rules: Logical axis rules to run it under, without "stage", or None for those in context.
        mutable: The filter of collections that it may write.
        options: `deterministic` and `model_mode`.
    """
    layer = layer.clone(parent=None, name=None)

    def apply(variables, x, side, rngs):
        with nullcontext() if rules is None else nn.logical_axis_rules(rules):
            y, sown = layer.apply(
                variables,
                x,
                side["segment_ids"],
                side["positions"],
                *options,
                rngs=rngs or None,
                mutable=mutable,
            )
        sown = {name: of for name, of in unfreeze(sown).items() if jax.tree.leaves(of)}
        collections.check_sown(sown)
        return outputs_of(y, x), sown

    return apply


def outputs_of(y: Any, x: Any) -> Any:
    """`y`, or its first entry if it is (outputs, None), as of layers that are made for scans."""
    is_pair = isinstance(y, tuple) and len(y) == 2 and y[1] is None
    return y[0] if is_pair and jax.tree.structure(y) != jax.tree.structure(x) else y


def axis_rules(settings: spmd.PipelineSettings) -> spmd.AxisRules:
    """The config's rules, else those in Flax's context, else jaxpipe's."""
    if settings.rules is not None:
        return settings.rules
    return spmd.axis_rules(get_logical_axis_rules() or sharding.DEFAULT_RULES)


def rules_in_stage(rules: spmd.AxisRules | None) -> spmd.AxisRules | None:
    """`rules` where the axis `stage` is each rank's own."""
    return rules and tuple((name, tuple(a for a in axes if a != "stage")) for name, axes in rules)


def init_of(layer: nn.Module, rules: spmd.AxisRules | None) -> Callable:
    """`(keys, inputs, segment_ids, positions, deterministic, model_mode) -> variables`."""
    layer = layer.clone(parent=None, name=None)

    def init(keys, *arguments):
        with nullcontext() if rules is None else nn.logical_axis_rules(rules):
            return collections.stored(unfreeze(layer.init(keys, *arguments)))

    return init


def init_stages(pipeline: Any) -> Callable:
    """The layer's `init` for all layers of a repeat."""
    rules = rules_in_stage(pipeline.settings.rules)
    return stacked.init_stages(init_of(pipeline.layers, rules))


def init_all(pipeline: Any) -> Callable:
    """The layer's `init` for all layers of the pipeline, of keys by stream."""
    dims = pipeline.settings.dims
    stack = stacked.stack_repeats(init_stages(pipeline), dims)

    def init(keys: dict[str, jax.Array], *arguments: Any) -> dict[str, Any]:
        return stack({name: spmd.layer_keys(key, dims) for name, key in keys.items()}, *arguments)

    return init


def microbatches(pipeline: Any, inputs: Any, segment_ids: Any, positions: Any) -> tuple[Any, Any]:
    """[batch, ...] leaves as [M, rows, ...]: (inputs, side)."""
    counts, rows = pipeline.settings.counts, pipeline.settings.batch_size
    side = spmd.side_of(segment_ids, positions)
    split = spmd.to_microbatches({"inputs": inputs} | side, counts.num_microbatches, rows)
    inputs = spmd.place_microbatches(split.pop("inputs"), pipeline.axis_rules, pipeline.mesh)
    return inputs, split


def initialize(pipeline: Any, inputs: Any, segment_ids: Any, positions: Any, *options: Any) -> Any:
    """Makes the variables of all layers, and returns the inputs: nothing is computed with them."""
    xs, side = microbatches(pipeline, inputs, segment_ids, positions)
    x, of = jax.tree.map(lambda leaf: leaf[0], (xs, side))
    keys = {name: pipeline.make_rng(name) for name in pipeline.scope.rngs}
    variables = init_all(pipeline)(keys, x, of["segment_ids"], of["positions"], *options)
    for name, collection in variables.items():
        pipeline.put_variable(name, NAME, collection)
    return inputs


def stacked_variables(pipeline: Any) -> dict[str, Any]:
    """The variables of all layers by collection, in their boxes."""
    found = {name: of[NAME] for name, of in pipeline.variables.items() if NAME in of}
    return {name: of for name, of in unfreeze(found).items() if not collections.is_sown(name, of)}


def draw_keys(pipeline: Any) -> dict[str, jax.Array] | tuple:
    """[R, S, L] keys by stream, () if there are none."""
    dims = pipeline.settings.dims
    names = pipeline.scope.rngs
    return {name: spmd.layer_keys(pipeline.make_rng(name), dims) for name in names} or ()


def run(
    pipeline: Any, inputs: Any, segment_ids: Any, positions: Any, names: Any, *options: Any
) -> Any:
    """Sends [batch, ...] inputs through all layers, and stores what these sow."""
    settings, mesh = pipeline.settings, pipeline.mesh
    boxed = stacked_variables(pipeline)
    names = stacked.logical_specs(boxed) if names is None else names
    weights = stacked.without_boxes(boxed)
    if settings.debug_sharding:
        specs = spmd.physical_specs(names, pipeline.axis_rules, mesh)
        logging.getLogger("jaxpipe").info(spmd.describe_placement(weights, names, specs))
    mutable = collections.mutable_in_layer(pipeline.scope.mutable, boxed)
    layer = layer_function(pipeline.layers, rules_in_stage(settings.rules), mutable, *options)
    xs, side = microbatches(pipeline, inputs, segment_ids, positions)
    engine = spmd.circular if settings.scan_ticks else spmd.circular_unrolled
    engine = partial(engine, mesh=mesh, delay=settings.counts.hop > 1, remat=settings.remat_tick)
    keys = draw_keys(pipeline)
    ys, sown = spmd.pipeline_layers(engine, layer, weights, xs, side, keys, settings)
    for name, collection in sown.items():
        pipeline.put_variable(name, NAME, collection)
    return spmd.from_microbatches(ys)


def weight_sharding(pipeline: Any, inputs: Any, *rest: Any) -> Any:
    """Logical specs of the variables that a call with these arguments would make."""
    segment_ids, positions, *options = (*rest, *(None, None, False, "train")[len(rest) :])

    def init(inputs, segment_ids, positions):
        key = jax.random.key(0)
        xs, side = microbatches(pipeline, inputs, segment_ids, positions)
        x, of = jax.tree.map(lambda leaf: leaf[0], (xs, side))
        keys = {"params": key}
        return init_all(pipeline)(keys, x, of["segment_ids"], of["positions"], *options)

    return stacked.logical_specs(jax.eval_shape(init, inputs, segment_ids, positions))
