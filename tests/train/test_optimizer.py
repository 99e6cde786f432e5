import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.train.optim import (
    build_optimizer,
    clip_by_norm,
    gradient_norm,
    learning_rate_schedule,
)


def rates(num_steps: int, warmup_fraction: float, upto: int) -> np.ndarray:
    schedule = learning_rate_schedule(
        2.0, num_steps=num_steps, warmup_fraction=warmup_fraction, final_fraction=0.1
    )
    return np.asarray([schedule(jnp.int32(step)) for step in range(upto)])


def test_the_learning_rate_rises_straight_falls_a_cosine_and_stays():
    warmup = 2.0 * np.arange(1, 6) / 6
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(16) / 15)) / 2
    expected = np.concatenate([warmup, 2.0 * cosine, [0.2, 0.2]])
    np.testing.assert_allclose(rates(20, 0.25, 23), expected, rtol=1e-5)


def test_a_warmup_shorter_than_a_step_is_none():
    assert rates(5, 0.1, 1) == [2.0]
    assert rates(1, 0.9, 1) == [2.0]


def of_shape(shape: str, upto: int = 101) -> np.ndarray:
    """With a peak of 2, 10 steps of warmup and 100 in all."""
    schedule = learning_rate_schedule(
        2.0, num_steps=100, warmup_fraction=0.1, final_fraction=0.25, shape=shape
    )
    return np.asarray([schedule(jnp.int32(step)) for step in range(upto)])


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "inverse_sqrt", "wsd"])
def test_every_shape_rises_to_the_peak_and_never_again(shape):
    rates = of_shape(shape)
    assert np.all(np.diff(rates[:10]) > 0) and np.all(np.diff(rates[10:]) <= 0)
    np.testing.assert_allclose(rates[10], 2.0, rtol=1e-6)


def test_shapes_fall_as_their_names_say():
    np.testing.assert_allclose(of_shape("constant")[10:], 2.0)
    np.testing.assert_allclose(of_shape("linear")[[55, 100]], [2 * (1 + 0.25) / 2, 0.5], rtol=1e-6)
    # The last fifth of what follows the warmup: 18 of 90 steps.
    np.testing.assert_allclose(of_shape("wsd")[[82, 91, 100]], [2, 1.25, 0.5], rtol=1e-5)
    # Four times the steps of the peak's, counted from 1, have half of its rate.
    np.testing.assert_allclose(of_shape("inverse_sqrt")[43], 1.0, rtol=1e-6)


def test_a_shape_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"`shape` is 'step'. Give one of cosine, linear, const"):
        of_shape("step", 1)


def test_a_schedule_of_no_steps_or_of_warmup_alone_is_refused():
    with pytest.raises(ValueError, match=r"`num_steps` is 0\. Give at least 1"):
        rates(0, 0.1, 1)
    with pytest.raises(ValueError, match=r"`warmup_fraction` is 1\.0\. Give 0 or more and less"):
        rates(5, 1.0, 1)


def test_a_step_is_the_formula_of_adamw():
    weights = {"kernel": jnp.full((2, 2), 0.5), "scale": jnp.full(2, 0.5)}
    gradients = {"kernel": jnp.full((2, 2), 0.3), "scale": jnp.full(2, -0.3)}
    optimizer = build_optimizer(
        "adamw",
        {},
        lambda peak: lambda count: 0.1,
        adam={"b1": 0.9, "b2": 0.95, "eps": 1e-8},
        weight_decay=0.2,
        decays={"kernel": True, "scale": False},
        dimensions={"kernel": False, "scale": False},
    )
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(weights), weights)
    new = optax.apply_updates(weights, updates)
    # The first step of Adam is the sign of the gradient.
    np.testing.assert_allclose(new["kernel"], 0.5 - 0.1 * (1 + 0.2 * 0.5), rtol=1e-5)  # pyright: ignore
    np.testing.assert_allclose(new["scale"], 0.5 + 0.1, rtol=1e-5)  # pyright: ignore


def test_the_norm_is_taken_over_all_leaves_in_float32():
    gradients = {"a": jnp.full(1000, 3.0, jnp.bfloat16), "b": jnp.full((10, 100), 4.0)}
    norm = gradient_norm(gradients)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 5 * np.sqrt(1000), rtol=1e-6)


@pytest.mark.parametrize("threshold", [0.5, 1000.0, 0.0])
def test_clipping_is_that_of_optax(threshold: float):
    gradients = {"a": jnp.arange(4.0), "b": -jnp.ones((2, 2))}
    clipped = clip_by_norm(gradients, gradient_norm(gradients), threshold=threshold)
    optimizer = optax.clip_by_global_norm(threshold) if threshold else optax.identity()
    expected, _ = optimizer.update(gradients, optimizer.init(gradients))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), clipped, expected)


def test_clipping_keeps_types_and_gradients_of_zero():
    gradients = {"a": jnp.zeros(4, jnp.bfloat16)}
    clipped = clip_by_norm(gradients, gradient_norm(gradients), threshold=1.0)
    assert clipped["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(clipped["a"].astype(jnp.float32), np.zeros(4))
