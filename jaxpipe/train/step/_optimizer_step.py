"""A train step around any engine's gradients: clipping, the optimizer, and metrics."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..optim._optimizer import clip_by_norm, gradient_norm
from ..optim._router_bias import drop_router_biases, update_router_biases
from ..plan._optimizer import learning_rate
from ..plan._setup import StepPlan
from ._run_optimizer import make_update
from ._state import TrainState

Reshard = Callable[[PyTree], PyTree]


def make_optimizer_step(
    plan: StepPlan,
    value_and_grad: Callable,
    *,
    shard: Reshard = lambda weights: weights,
    gather_updates: Reshard = lambda updates: updates,
) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Array]]]:
    """Builds `(state, batch) -> (state, metrics)` from gradients; the caller compiles it."""
    config = plan.state.config
    update, schedule = make_update(plan), learning_rate(config)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
        weights = state["weights"]
        (loss, metrics), grads = value_and_grad(weights, batch, state["step"])
        trained, trained_grads = drop_router_biases(weights), drop_router_biases(grads)
        norm = gradient_norm(trained_grads)
        threshold = config.gradient_clipping_threshold
        trained_grads = clip_by_norm(trained_grads, norm, threshold=threshold)
        with jax.named_scope("optimizer"):
            updates, optimizer_state = update(trained_grads, state["optimizer"], shard(trained))
        # XLA would add ZeRO-1's updates to a part of the weights and gather the sums, for which it
        # copies all weights: 7.0 of 32.2 GB of llama2-7b on v5p:2x2x2 with libtpu 0.0.48.1.
        trained = optax.apply_updates(trained, gather_updates(updates))
        bias_rate = config.routed_bias_update_rate
        new = {
            "weights": update_router_biases(trained, weights, grads, rate=bias_rate),
            "optimizer": optimizer_state,
        }
        skips = config.bad_step_policy == "skip"
        rate = jnp.asarray(schedule(_num_updates(state) if skips else state["step"]))
        all_metrics = {"loss": loss, **metrics, "gradient_norm": norm, "learning_rate": rate}
        if skips:
            is_usable = _is_usable(loss, norm, config.max_gradient_norm)
            new = _select(is_usable, new, {name: state[name] for name in new})
            all_metrics["skipped"] = 1 - is_usable.astype(jnp.float32)
        return new | {"step": state["step"] + 1}, all_metrics

    return step


def _num_updates(state: TrainState) -> Int[Array, ""]:
    """Returns the steps that were not skipped, by which the optimizer finds its rate."""
    counts = optax.tree_utils.tree_get_all_with_path(state["optimizer"], "count")
    return counts[0][1] if counts else state["step"]


def _is_usable(loss: Float[Array, ""], norm: Float[Array, ""], limit: float) -> Bool[Array, ""]:
    """Returns whether loss and norm are finite, and the norm at most `limit` unless that is 0."""
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    return finite & (norm <= limit) if limit else finite


def _select(first: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    # An array that the optimizer returns unchanged, such as prodigy's first weights, stays the same
    # object: programs of ranks then need not read it.
    return jax.tree.map(lambda x, y: y if x is y else jnp.where(first, x, y), new, old)
