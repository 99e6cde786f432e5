"""The programs of a step whose leaves stack all stages: one program for all devices.

R repeats, S ranks.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ... import sharding
from ...autodiff import StagedModel
from ...autodiff.staged_model import slice_sequences
from ...engines._accumulation import gradient_accumulation
from ...sharding.layout import LayerLayout
from ..optim._router_bias import drop_router_biases
from ..plan._model import build_model
from ..plan._setup import FlaxFrontend, StepPlan, import_flax_decoder
from ..plan._weight_plan import WeightPlan
from ._init import dropout_keys_of_layers, init_boundary, init_layers
from ._optimizer_step import make_optimizer_step
from ._state import TrainState, gradient_shardings, make_optimizer, state_shardings


def init_stacked_state(plan: StepPlan) -> TrainState:
    """Initializes weights, optimizer state and step 0, each on the devices that hold it."""
    optimizer = make_optimizer(plan.state)

    def make() -> TrainState:
        weights = _init_weights(plan.state.weights, plan.state.init_seed)
        moments = optimizer.init(drop_router_biases(weights))
        return {"weights": weights, "optimizer": moments, "step": jnp.int32(0)}

    return jax.jit(make, out_shardings=state_shardings(plan.state))()


def _init_weights(weights: WeightPlan, seed: int) -> PyTree:
    """Initializes weights; every layer starts equal in every layout, also after the pipeline."""
    layout = weights.layout
    stages = init_layers(weights, seed, layout.dims, layer_ids=layout.layer_ids)
    return init_boundary(weights, seed) | {"stages": stages}


def make_stacked_train_step(
    plan: StepPlan,
) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Array]]]:
    """Builds the train step; it compiles at its first call.

    Returns:
        `(state, batch from shard_batch) -> (state, metrics)`. The state that goes in is donated.
    """
    shardings = state_shardings(plan.state)
    grad_shardings = gradient_shardings(plan.state.weights)
    weight_shardings, update_shardings = map(
        drop_router_biases, (shardings["weights"], grad_shardings)
    )
    value_and_grad = gradient_accumulation(
        make_value_and_grad(plan),
        plan.batch.gradient_accumulation_steps,
        reshard=lambda found: (found[0], sharding.reshard(found[1], grad_shardings)),
    )
    step = make_optimizer_step(
        plan.state,
        value_and_grad,
        partial(dropout_keys, plan.dropout_seed, plan.pipeline.layout),
        # With ZeRO-1 every device updates its part of the weights, and gathers the others'.
        shard=lambda tree: sharding.reshard(tree, update_shardings),
        unshard=lambda tree: sharding.reshard(tree, weight_shardings),
    )
    return jax.jit(
        step,
        in_shardings=(shardings, plan.batch.shardings),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=dict(plan.compiler_options),
    )


def make_stacked_eval_step(plan: StepPlan) -> Callable[[PyTree, PyTree], Mapping[str, Array]]:
    """Builds the evaluation of one batch; it compiles at its first call.

    Returns:
        `(weights, batch from shard_batch) -> loss and metrics`.
    """
    value = gradient_accumulation(make_value(plan), plan.batch.gradient_accumulation_steps)

    def step(weights: PyTree, batch: PyTree) -> Mapping[str, Array]:
        loss, metrics = value(weights, batch, with_layer_mask(plan.pipeline.layout, ()))
        return {"loss": loss, **metrics}

    return jax.jit(
        step,
        in_shardings=(plan.state.weights.shardings, plan.batch.shardings),
        compiler_options=dict(plan.compiler_options),
    )


def make_value(plan: StepPlan) -> Callable[..., Any]:
    """Returns the forwards of a run's engine, or of the Flax front end whose modules run in it.

    Returns:
        `(weights, batch_inputs, keys) -> (loss, metrics)`.
    """
    model = build_model(plan.model, plan.state.weights, plan.gather)
    if plan.frontend is None:
        return of_slices(plan.num_slices, partial(plan.engine.value, plan.pipeline, model))
    flax_decoder = import_flax_decoder()
    value = flax_decoder.nnx_value if plan.frontend.is_nnx else flax_decoder.linen_value
    return value(_decoder(plan, plan.frontend, model))


def make_value_and_grad(plan: StepPlan) -> Callable[..., Any]:
    """Returns the engine of a run, or the Flax front end whose modules run in it.

    Returns:
        `(weights, batch_inputs, keys) -> ((loss, metrics), gradients)`.
    """
    model = build_model(plan.model, plan.state.weights, plan.gather)
    if plan.frontend is None:
        run = partial(plan.engine.value_and_grad, plan.pipeline, model)
        return of_slices(plan.num_slices, run)
    decoder, flax_decoder = _decoder(plan, plan.frontend, model), import_flax_decoder()
    if plan.frontend.is_nnx:
        return flax_decoder.nnx_value_and_grad(decoder)
    return flax_decoder.linen_value_and_grad(decoder)


def _decoder(plan: StepPlan, frontend: FlaxFrontend, model: StagedModel) -> Any:
    weights = plan.state.weights
    make = import_flax_decoder().make_flax_decoder
    return make(frontend.fields, model, weights, plan.gather)


def of_slices(num_slices: int, run: Callable) -> Callable:
    """Returns an engine's function of whole sequences, which cuts them into slices.

    Args:
        run: `(weights, batch_inputs [M * s, b, T / s], keys) -> ...`.

    Returns:
        `(weights, batch_inputs [M, b, T], keys) -> ...`.
    """

    def run_slices(weights: PyTree, batch_inputs: PyTree, keys: PyTree) -> Any:
        return run(weights, slice_sequences(batch_inputs, num_slices, 2), keys)

    return run_slices


def dropout_keys(seed: int | None, layout: LayerLayout, step: Int[Array, ""]) -> PyTree:
    """Folds the [R, S, layers per stage] dropout keys of a step."""
    keys = dropout_keys_of_layers(seed, step, layout.layer_ids)
    return with_layer_mask(layout, jax.tree.map(lambda x: x.reshape(layout.dims), keys))


def with_layer_mask(layout: LayerLayout, keys: PyTree) -> PyTree:
    """Adds the layer mask to the `keys` of stages, if not all stages have as many layers."""
    if not layout.counts:
        return keys
    layer_mask = jnp.asarray(layout.layer_ids) >= 0
    return {"dropout": keys, "layer_mask": layer_mask.reshape(layout.dims)}
