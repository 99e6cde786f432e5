"""Runs a Linen stage as a pure function, and initializes and calls a pipeline module with it.

Weights (`params`, and the scales of FP8) are stacked, and so are all other collections that the
stage's `init` creates. A stage may read all of them. Values that a stage sows are returned once per
stage and microbatch. A stage must not update a collection for its next call: that would be the call
for the next microbatch, and microbatches are in different stages at the same time.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax.core import scope as flax_scope
from flax.core import unfreeze
from flax.errors import ModifyScopeVariableError
from flax.linen import fp8_ops

from ...._input import clause
from ....spmd.ranks import at_init
from .._frontend import Arrays, run_batch, split_batch
from .._settings import REPEATS, AxisRules
from .._stages import Stage, outputs_of, stage_keys
from .._weight_sharding import reshard_weight
from . import _stacked as stacked
from ._nnx_stage import check_call

NAME = "layers"
"""Name of the variables of all stages in each collection of the pipeline."""

OVERWRITTEN = (fp8_ops.OVERWRITE_WITH_GRADIENT,)
WEIGHTS = ("params", *OVERWRITTEN)
SOWN = ("intermediates", "metrics")

NOT_CARRIED = (
    "A stage's call would leave values in it for its next call. In a pipeline that would be the "
    "next microbatch, which other stages already work on. Let the stage only read it (running "
    "statistics: `nn.BatchNorm(use_running_average=True)`), and leave its collection out of "
    "`mutable`; if it holds what stages report, sow it with the default `reduce_fn`, or into "
    "'intermediates' or 'metrics'."
)


def stage_function(stage: nn.Module, rules: AxisRules | None, mutable: Any, *options: Any) -> Stage:
    """Returns `stage` as a function `(variables, x, batch_inputs, rngs) -> (y, sown)`.

    Its call is `(inputs, segment_ids, positions, deterministic, model_mode)`, and it runs under
    `rules`, or those in context. Writing a collection that it may not is a `ValueError`.
    """
    stage = stage.clone(parent=None, name=None)

    def apply(variables, x, batch_inputs, rngs):
        with nullcontext() if rules is None else nn.logical_axis_rules(rules):
            try:
                y, sown = stage.apply(
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
                raise ValueError(f"{what}. {NOT_CARRIED}") from error
        sown = {
            name: collection
            for name, collection in unfreeze(sown).items()
            if jax.tree.leaves(collection)
        }
        for name, collection in sown.items():
            if not _is_sown(name, collection):  # the call created it by other means than `sow`
                raise ValueError(_cannot_flow(name))
        return outputs_of(y, x), sown

    return apply


def init_of(stage: nn.Module, rules: AxisRules | None) -> Callable:
    """Returns the stage's `init` of keys and a call's arguments, without sown collections."""
    stage = stage.clone(parent=None, name=None)

    def init(keys, *arguments):
        with nullcontext() if rules is None else nn.logical_axis_rules(rules):
            return _stored(unfreeze(stage.init(keys, *arguments)))

    return at_init(init)


def init_all(pipeline: Any) -> Callable:
    """Returns the stage's `init` for all stages of the pipeline, from keys by random stream."""
    dims, init_all = pipeline.settings.stacked, pipeline.get_vmap_func_for_init()
    if REPEATS in dims:
        init_all = stacked.map_keys(init_all)

    def init(keys: dict[str, jax.Array], *arguments: Any) -> dict[str, Any]:
        by_stage = {name: stage_keys(key, [*dims.values()]) for name, key in keys.items()}
        return stacked.with_names(init_all(by_stage, *arguments), [*dims])

    return init


def initialize(pipeline: Any, arrays: Arrays, options: Any, microbatched: bool) -> Any:
    """Creates the variables of all stages and returns the inputs unchanged."""
    keys = {name: pipeline.make_rng(name) for name in pipeline.scope.rngs}
    variables = init_batch(pipeline, keys, arrays, options, microbatched)
    reshard = partial(reshard_weight, rules=pipeline.axis_rules, mesh=pipeline.mesh)
    for name, collection in stacked.reshard_variables(
        variables, [*pipeline.settings.stacked], reshard
    ).items():
        pipeline.put_variable(name, NAME, collection)
    return arrays[0]


def init_batch(
    pipeline: Any, keys: dict, arrays: Arrays, options: Any, microbatched: bool
) -> dict[str, Any]:
    """Returns the variables of all stages, from keys by random stream and a call's arguments."""
    first = _first_arrays(pipeline, microbatched, *arrays)
    return init_all(pipeline)(keys, *first, *options)


def _first_arrays(pipeline: Any, microbatched: bool, *arrays: Any) -> Arrays:
    """Returns the arrays of microbatch 0, by which stages are initialized."""
    split = split_batch(pipeline.settings, arrays, microbatched)
    x, batch_inputs = jax.tree.map(lambda leaf: leaf[0], split)
    return x, batch_inputs["segment_ids"], batch_inputs["positions"]


def shapes_of_init(pipeline: Any, *arguments: Any) -> Any:
    """Returns shapes of the variables that a call with these arguments would create."""
    filled = (*arguments, *(None, None, False, "train")[len(arguments) - 1 :])
    arrays, options = filled[:3], filled[3:]

    def init(*arrays):
        return init_batch(pipeline, {"params": jax.random.key(0)}, arrays, options, False)

    return jax.eval_shape(init, *arrays)


def stacked_variables(pipeline: Any) -> dict[str, Any]:
    """Returns the variables of all stages by collection, in their boxes."""
    stacks = {
        name: collection[NAME]
        for name, collection in pipeline.variables.items()
        if NAME in collection
    }
    return _stored(unfreeze(stacks))


def mutable_in_stage(pipeline: Any) -> Any:
    """Returns the filter of the collections into which a stage may sow: no weights."""
    mutable = pipeline.scope.mutable
    for name in stacked_variables(pipeline):
        if name not in WEIGHTS and flax_scope.in_filter(mutable, name):
            raise ValueError(_cannot_flow(name))
    return flax_scope.subtract_filters(mutable, list(WEIGHTS))


def run(pipeline: Any, arrays: Arrays, names: Any, options: Any, microbatched: bool) -> Any:
    """Runs inputs through all stages and stores the values that they sow."""
    if not isinstance(pipeline.layers, nn.Module):
        shapes = jax.eval_shape(partial(_first_arrays, pipeline, microbatched), *arrays)
        check_call(pipeline.layers, [*pipeline.scope.rngs], shapes, *options)
    ys, sown = run_batch(pipeline, arrays, options, names, OVERWRITTEN, microbatched)
    for name, collection in sown.items():
        pipeline.put_variable(name, NAME, collection)
    return ys


def _is_sown(name: str, collection: Any) -> bool:
    """Returns whether a stage has only sown into a collection: `SOWN`, or tuples alone."""
    return name in SOWN or not jax.tree.leaves(_without_tuples(collection))


def _without_tuples(collection: Any) -> Any:
    return jax.tree.map(
        lambda x: None if isinstance(x, tuple) else x,
        collection,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _stored(variables: dict[str, Any]) -> dict[str, Any]:
    """Returns the variables that `init` created, without collections that the stage sows."""
    return {
        name: collection for name, collection in variables.items() if not _is_sown(name, collection)
    }


def _cannot_flow(name: str) -> str:
    return f"The collection {name!r} is mutable. {NOT_CARRIED}"
