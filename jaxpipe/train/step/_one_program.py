"""The programs of a step whose leaves stack all stages: one program for all devices.

R repeats, S ranks.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ... import sharding
from ...autodiff.staged_model import slice_sequences
from ...engines import gradient_accumulation
from ..optim._router_bias import drop_router_biases
from ..plan._setup import FlaxFrontend, StepPlan, import_flax_decoder
from ..plan._weight_plan import WeightPlan
from ._init import init_boundary, init_layers, layer_keys
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
    step = make_optimizer_step(
        plan.state,
        make_value_and_grad(plan),
        partial(layer_keys, plan, plan.dropout_seed),
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
    value = make_value(plan)

    def step(weights: PyTree, batch: PyTree) -> Mapping[str, Array]:
        loss, metrics = value(weights, batch, layer_keys(plan, None))
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
    if plan.frontend is None:
        run = partial(plan.engine.value, plan.pipeline, plan.build_model())
        return of_slices(plan.num_slices, run)
    return gradient_accumulation(_flax_value(plan, plan.frontend), plan.pipeline.num_calls)


def make_value_and_grad(plan: StepPlan) -> Callable[..., Any]:
    """Returns the engine of a run, or the Flax front end whose modules run in it.

    Returns:
        `(weights, batch_inputs, keys) -> ((loss, metrics), gradients)`.
    """
    if plan.frontend is not None:
        run = jax.value_and_grad(_flax_value(plan, plan.frontend), has_aux=True)
        return gradient_accumulation(run, plan.pipeline.num_calls)
    run = partial(plan.engine.value_and_grad, plan.pipeline, plan.build_model())
    return of_slices(plan.num_slices, run)


def _flax_value(plan: StepPlan, frontend: FlaxFrontend) -> Callable[..., Any]:
    flax_decoder = import_flax_decoder()
    value = flax_decoder.nnx_value if frontend.is_nnx else flax_decoder.linen_value
    arguments = frontend.fields, plan.model, plan.state.weights, plan.engine, plan.pipeline
    return value(flax_decoder.make_flax_decoder(*arguments))


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
