"""Runs a Linen layer as a pure function, and initializes and calls a pipeline module with it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax.core import unfreeze
from flax.errors import ModifyScopeVariableError

from ...._input import clause
from ....spmd.ranks import at_init
from .._frontend import first_microbatch, run_batch
from .._layers import Layer, layer_keys, outputs_of
from .._methods import to_batch_inputs
from .._settings import AxisRules
from .._weight_sharding import reshard_weight, rules_in_stage
from . import _collections as collections
from . import _stacked as stacked

NAME = "layers"
"""Name of the variables of all layers in each collection of the pipeline."""


def layer_function(layer: nn.Module, rules: AxisRules | None, mutable: Any, *options: Any) -> Layer:
    """Returns `layer` as a function `(variables, x, batch_inputs, rngs) -> (y, sown)`.

    Its call is `(inputs, segment_ids, positions, deterministic, model_mode)`, and it runs under
    `rules`, or those in context. Writing a collection that it may not is a `ValueError`.
    """
    layer = layer.clone(parent=None, name=None)

    def apply(variables, x, batch_inputs, rngs):
        with nullcontext() if rules is None else nn.logical_axis_rules(rules):
            try:
                y, sown = layer.apply(
                    variables,
                    x,
                    batch_inputs["segment_ids"],
                    batch_inputs["positions"],
                    *options,
                    rngs=rngs or None,
                    mutable=mutable,
                )
            except ModifyScopeVariableError as error:
                what = clause(str(error).split(" (http")[0])
                raise ValueError(f"{what}. {collections.NOT_CARRIED}") from error
        sown = {
            name: collection
            for name, collection in unfreeze(sown).items()
            if jax.tree.leaves(collection)
        }
        collections.check_sown(sown)
        return outputs_of(y, x), sown

    return apply


def init_of(layer: nn.Module, rules: AxisRules | None) -> Callable:
    """Returns the layer's `init` of keys and a call's arguments, without sown collections."""
    layer = layer.clone(parent=None, name=None)

    def init(keys, *arguments):
        with nullcontext() if rules is None else nn.logical_axis_rules(rules):
            return collections.stored(unfreeze(layer.init(keys, *arguments)))

    return at_init(init)


def init_stages(pipeline: Any) -> Callable:
    """Returns the layer's `init` for all layers of a repeat."""
    rules = rules_in_stage(pipeline.settings.rules)
    return stacked.init_stages(init_of(pipeline.layers, rules))


def init_all(pipeline: Any) -> Callable:
    """Returns the layer's `init` for all layers of the pipeline, from keys by random stream."""
    dims = pipeline.settings.dims
    stack = stacked.stack_repeats(pipeline.get_vmap_func_for_init(), dims)

    def init(keys: dict[str, jax.Array], *arguments: Any) -> dict[str, Any]:
        layers = {name: layer_keys(key, dims) for name, key in keys.items()}
        return stack(layers, *arguments)

    return init


def initialize(
    pipeline: Any,
    inputs: Any,
    segment_ids: Any,
    positions: Any,
    *options: Any,
    microbatched: bool = False,
) -> Any:
    """Creates the variables of all layers and returns the inputs unchanged."""
    keys = {name: pipeline.make_rng(name) for name in pipeline.scope.rngs}
    arrays = inputs, segment_ids, positions
    variables = init_batch(pipeline, keys, *arrays, *options, microbatched=microbatched)
    reshard = partial(reshard_weight, rules=pipeline.axis_rules, mesh=pipeline.mesh)
    for name, collection in stacked.reshard_variables(variables, reshard).items():
        pipeline.put_variable(name, NAME, collection)
    return inputs


def init_batch(
    pipeline: Any,
    keys: dict,
    inputs: Any,
    segment_ids: Any,
    positions: Any,
    *options: Any,
    microbatched: bool = False,
) -> dict[str, Any]:
    """Returns the variables of all layers, from keys by random stream and a call's arguments."""
    batch_inputs = to_batch_inputs(segment_ids, positions)
    x, batch_inputs = first_microbatch(pipeline.settings, inputs, batch_inputs, microbatched)
    return init_all(pipeline)(
        keys, x, batch_inputs["segment_ids"], batch_inputs["positions"], *options
    )


def weight_sharding(pipeline: Any, *arguments: Any) -> Any:
    """Returns logical specs of the variables that a call with these arguments would create."""
    filled = (*arguments, *(None, None, False, "train")[len(arguments) - 1 :])
    arrays, options = filled[:3], filled[3:]

    def init(*arrays):
        return init_batch(pipeline, {"params": jax.random.key(0)}, *arrays, *options)

    return stacked.logical_specs(jax.eval_shape(init, *arrays))


def stacked_variables(pipeline: Any) -> dict[str, Any]:
    """Returns the variables of all layers by collection, in their boxes."""
    stacks = {
        name: collection[NAME]
        for name, collection in pipeline.variables.items()
        if NAME in collection
    }
    return {
        name: collection
        for name, collection in unfreeze(stacks).items()
        if not collections.is_sown(name, collection)
    }


def mutable_collections(pipeline: Any) -> Any:
    """Returns the filter of the collections into which a layer may sow."""
    return collections.mutable_in_layer(pipeline.scope.mutable, stacked_variables(pipeline))


def draw_keys(pipeline: Any) -> dict[str, jax.Array] | tuple:
    """Returns [R, S, L] keys by random stream, or () if the module has no random streams."""
    dims = pipeline.settings.dims
    names = pipeline.scope.rngs
    return {name: layer_keys(pipeline.make_rng(name), dims) for name in names} or ()


def run(
    pipeline: Any,
    inputs: Any,
    segment_ids: Any,
    positions: Any,
    names: Any,
    *options: Any,
    microbatched: bool = False,
) -> Any:
    """Runs inputs through all layers and stores the values that the layers sow."""
    ys, sown = run_batch(
        pipeline.layer_function(*options, records=True),
        pipeline.layer_variables(),
        pipeline.get_weight_sharding() if names is None else names,
        inputs,
        to_batch_inputs(segment_ids, positions),
        pipeline.draw_keys,
        pipeline,
        overwritten=collections.OVERWRITTEN,
        options=options,
        microbatched=microbatched,
    )
    for name, collection in sown.items():
        pipeline.put_variable(name, NAME, collection)
    return ys
