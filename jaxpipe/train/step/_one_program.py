"""The programs of a step whose leaves stack all stages: one program for all devices.

R repeats, S ranks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ... import sharding
from ...engines import adding_in_products
from ..optim._router_bias import drop_router_biases
from ..plan._optimizer import make_optimizer
from ..plan._setup import StepPlan
from ._optimizer_state import init_optimizer_state
from ._optimizer_step import make_optimizer_step
from ._state import TrainState, gradient_shardings, init_boundary, init_layers, state_shardings


def init_stacked_state(plan: StepPlan) -> TrainState:
    """Initializes weights, optimizer state and step 0, each on the devices that hold it."""
    weights, seed = plan.state.weights, plan.state.config.init_weights_seed
    layout, optimizer = weights.layout, make_optimizer(plan.state)

    def make() -> TrainState:
        stages = init_layers(weights, seed, layout.dims, layer_ids=layout.layer_ids)
        groups = init_boundary(weights, seed) | {"stages": stages}
        state = init_optimizer_state(plan.state, optimizer, groups)
        return {"weights": groups, "optimizer": state, "step": jnp.int32(0)}

    return jax.jit(make, out_shardings=state_shardings(plan))()


def make_stacked_train_step(
    plan: StepPlan,
) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Array]]]:
    """Builds the train step; it compiles at its first call, and donates the state."""
    shardings = state_shardings(plan)
    weight_shardings, update_shardings = map(
        drop_router_biases, (shardings["weights"], gradient_shardings(plan))
    )
    options = dict(plan.pipeline.compiler_options or ())
    step = make_optimizer_step(
        plan,
        make_value_and_grad(plan),
        shard=lambda weights: sharding.reshard(weights, update_shardings),
        gather_updates=lambda updates: sharding.reshard(updates, weight_shardings),
    )
    return jax.jit(
        adding_in_products(step, plan.pipeline.mesh.devices.flat[0].device_kind, options),
        in_shardings=(shardings, plan.batch.shardings),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=options,
    )


def make_eval(plan: StepPlan) -> Callable[[PyTree, PyTree], dict[str, Array]]:
    """Returns `(weights, batch) -> loss and metrics`, forward only; the caller compiles it."""

    def step(weights: PyTree, batch: PyTree) -> dict[str, Array]:
        loss, metrics = plan.pipe.value(as_stored(plan, weights), batch)
        return {"loss": loss, **metrics}

    return step


def make_value_and_grad(plan: StepPlan) -> Callable[..., Any]:
    """Returns `(weights, batch, step) -> ((loss, metrics), gradients)` of a run's pipeline."""
    config = plan.state.config

    def value_and_grad(weights: PyTree, batch: PyTree, step: Any = 0) -> Any:
        key = None
        if config.active_dropout_rate:
            key = jax.random.fold_in(jax.random.key(config.dropout_seed), step)
        value, grads = plan.pipe.value_and_grad(as_stored(plan, weights), batch, key)
        return value, jax.tree.unflatten(jax.tree.structure(weights), jax.tree.leaves(grads))

    return value_and_grad


def as_stored(plan: StepPlan, weights: PyTree) -> PyTree:
    """Returns weights in the groups of engines as parameters of the run's pipeline."""
    return jax.tree.unflatten(jax.tree.structure(plan.stored), jax.tree.leaves(weights))
