"""A train step around any engine's gradients: clipping, AdamW, and metrics."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..optim._optimizer import clip, gradient_norm
from ..optim._router_bias import with_router_biases, without_router_biases
from ..plan._setup import Setup
from ._state import State, make_optimizer, make_schedule

Place = Callable[[PyTree], PyTree]


def make_step(
    setup: Setup,
    value_and_grad: Callable,
    keys_of: Callable[[Int[Array, ""]], PyTree],
    *,
    divide: Place = lambda tree: tree,
    undivide: Place = lambda tree: tree,
) -> Callable[[State, PyTree], tuple[State, dict[str, Array]]]:
    """`(state, batch) -> (state, metrics)`, to be compiled.

    Args:
        setup: The run.
        value_and_grad: `(weights, batch, keys) -> ((loss, metrics), gradients)`.
        keys_of: From the number of a step to its dropout keys.
        divide: Lays weights and gradients out for the optimizer.
        undivide: Lays new weights out as they are stored.
    """
    optimizer, schedule = make_optimizer(setup), make_schedule(setup)
    threshold = setup.config.gradient_clipping_threshold
    bias_rate = setup.config.routed_bias_update_rate

    def step(state: State, batch: PyTree) -> tuple[State, dict[str, Array]]:
        weights = state["weights"]
        (loss, metrics), grads = value_and_grad(weights, batch, keys_of(state["step"]))
        trained, of_trained = without_router_biases(weights), without_router_biases(grads)
        norm = gradient_norm(of_trained)
        of_trained = clip(of_trained, norm, threshold=threshold)
        part, of_part = divide(trained), divide(of_trained)
        updates, moments = optimizer.update(of_part, state["optimizer"], part)
        trained = undivide(optax.apply_updates(part, updates))
        new = {
            "weights": with_router_biases(trained, weights, grads, rate=bias_rate),
            "optimizer": moments,
        }
        rate = jnp.asarray(schedule(state["step"]))
        found = {"loss": loss, **metrics, "gradient_norm": norm, "learning_rate": rate}
        if setup.config.bad_step_policy == "skip":
            is_good = _is_good(loss, norm, setup.config.max_gradient_norm)
            new = _chosen(is_good, new, {name: state[name] for name in new})
            found["skipped"] = 1 - is_good.astype(jnp.float32)
        return new | {"step": state["step"] + 1}, found

    return step


def _is_good(loss: Float[Array, ""], norm: Float[Array, ""], limit: float) -> Bool[Array, ""]:
    """Whether the gradients can be used."""
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    return finite & (norm <= limit) if limit else finite


def _chosen(first: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(first, x, y), new, old)
