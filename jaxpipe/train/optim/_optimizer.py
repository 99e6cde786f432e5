"""The learning rate of every step, and clipping by the global norm, as pure functions.

The norm of the gradients is a metric too, so it is computed once and handed to the clipping:

    norm = gradient_norm(gradients)
    gradients = clip_by_norm(gradients, norm, threshold=1.0)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, weights)
"""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

WSD_FRACTION = 0.2
"""Share of a `wsd` schedule in which the rate falls (Hu et al., 2024, arXiv 2404.06395: 10-20%)."""


def _cosine(progress: Array, final: float) -> Array:
    return final + (1 - final) * (1 + jnp.cos(jnp.pi * progress)) / 2


def _linear(progress: Array, final: float) -> Array:
    return 1 - (1 - final) * progress


def _wsd(progress: Array, final: float) -> Array:
    return _linear(jnp.clip((progress - 1) / WSD_FRACTION + 1, 0, 1), final)


DECAY_SHAPES = {"cosine": _cosine, "linear": _linear, "wsd": _wsd}
"""Shapes that end at a fraction of the peak."""

LEARNING_RATE_SHAPES = ("cosine", "linear", "constant", "inverse_sqrt", "wsd")
"""Names of learning rate schedules; `wsd` is warmup, stable, decay."""


def learning_rate_schedule(
    peak: float,
    *,
    num_steps: int,
    warmup_fraction: float,
    final_fraction: float,
    shape: str = "cosine",
) -> optax.Schedule:
    """Builds a schedule that rises linearly to `peak` and then falls as its shape says.

    Args:
        warmup_fraction: Share of the steps that warm up, below 1. If that is less than one step, no
            step warms up.
        final_fraction: Share of the peak that is left after `num_steps` and from then on, if the
            shape has an end: `constant` stays at the peak, `inverse_sqrt` falls for ever, with the
            root of the step.

    Returns:
        `step -> learning rate`, a float32 scalar; the first step is 0.

    Example:
        >>> rate = learning_rate_schedule(
        ...     1.0, num_steps=10, warmup_fraction=0.2, final_fraction=0.1, shape="linear"
        ... )
        >>> [round(float(rate(step)), 2) for step in (0, 1, 2, 6, 10)]
        [0.33, 0.67, 1.0, 0.55, 0.1]
    """
    if num_steps < 1:
        raise ValueError(f"`num_steps` is {num_steps}. Give at least 1.")
    if not 0 <= warmup_fraction < 1:
        raise ValueError(f"`warmup_fraction` is {warmup_fraction}. Give 0 or more and less than 1.")
    if shape not in LEARNING_RATE_SHAPES:
        raise ValueError(f"`shape` is {shape!r}. Give one of {', '.join(LEARNING_RATE_SHAPES)}.")
    warmup_steps = int(num_steps * warmup_fraction)

    def schedule(step: ArrayLike) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        # The first step moves already: by 1 / (warmup_steps + 1) of the peak, not by 0.
        rising = (step + 1) / (warmup_steps + 1)
        progress = jnp.clip((step - warmup_steps) / (num_steps - warmup_steps), 0, 1)
        if shape == "inverse_sqrt":
            falling = jnp.sqrt((warmup_steps + 1) / jnp.maximum(step + 1, warmup_steps + 1))
        elif shape == "constant":
            falling = jnp.ones_like(step)
        else:
            falling = DECAY_SHAPES[shape](progress, final_fraction)
        return peak * jnp.where(step < warmup_steps, rising, falling)

    return schedule


def gradient_norm(gradients: PyTree[Float[Array, "..."]]) -> Float[Array, ""]:
    """Computes the Euclidean norm over all leaves, in float32 whatever their dtype.

    Returns:
        [] the norm.

    Example:
        >>> import jax.numpy as jnp
        >>> float(gradient_norm({"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}))
        5.0
    """
    return optax.tree.norm(optax.tree.cast(gradients, jnp.float32))


def clip_by_norm(
    gradients: PyTree[Float[Array, "..."]], norm: Float[Array, ""], *, threshold: float
) -> PyTree[Float[Array, "..."]]:
    """Scales gradients so that their norm is at most `threshold`."""
    if threshold == 0:
        return gradients
    # Not norm / threshold: a norm of 0 is common in tests. A NaN norm gives NaN gradients.
    scale = threshold / jnp.maximum(norm, threshold)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
