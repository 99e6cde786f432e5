"""The loss by all ranks together is the loss of one."""

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.models import vocab_parallel_next_token_loss
from small_models import small_llama_loss

b, T, D, V, EPSILON = 2, 5, 8, 12, 1e-5


def boundary_of(*, tied: bool) -> dict:
    keys = jax.random.split(jax.random.key(0), 2)
    head = {"norm": 1 + jax.random.normal(keys[0], (D,)) / 4}
    if tied:
        return {"head": head, "embed": {"table": jax.random.normal(keys[1], (V, D))}}
    return {"head": head | {"logits": jax.random.normal(keys[1], (D, V))}}


def batch() -> tuple[jax.Array, dict]:
    keys = jax.random.split(jax.random.key(1), 3)
    batch_inputs = {
        "targets": jax.random.randint(keys[1], (b, T), 0, V),
        "target_weights": jax.random.uniform(keys[2], (b, T)),
    }
    return jax.random.normal(keys[0], (b, T, D)), batch_inputs


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_shares_add_up_to_the_loss_and_its_gradients(num_ranks, tied, z_loss):
    x, batch_inputs = batch()

    def loss(boundary, x):
        return small_llama_loss(z_loss_multiplier=z_loss)(boundary, x, batch_inputs)

    true, gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        boundary_of(tied=tied), x
    )
    shared = vocab_parallel_next_token_loss(EPSILON, z_loss)

    def of_rank(_):
        return shared(boundary_of(tied=tied), x, batch_inputs, "stage")

    shares, (boundary_grads, dx) = jax.vmap(of_rank, axis_name="stage")(jnp.arange(num_ranks))
    added = jax.tree.map(lambda s: jnp.sum(s, axis=0), (shares, boundary_grads))
    assert_close(added, (true, gradients[0]))
    for of_one in dx:
        assert_close(of_one, gradients[1])


def assert_close(got, true):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True):
        assert jnp.max(jnp.abs(x - y)) <= 1e-5 * jnp.max(jnp.abs(y))


def test_of_equal_logits_the_first_is_the_likeliest():
    x, batch_inputs = batch()
    alike = {"head": {"norm": jnp.ones(D), "logits": jnp.zeros((D, V))}}
    batch_inputs = batch_inputs | {"targets": jnp.zeros((b, T), int)}
    shared = vocab_parallel_next_token_loss(EPSILON)
    (_, metrics), _ = jax.vmap(lambda _: shared(alike, x, batch_inputs, "s"), axis_name="s")(
        jnp.arange(3)
    )
    hits = jnp.sum(metrics["accuracy"])
    assert hits == pytest.approx(float(jnp.sum(batch_inputs["target_weights"])), rel=1e-6)


def test_a_vocabulary_that_does_not_divide_is_refused():
    x, batch_inputs = batch()
    shared = vocab_parallel_next_token_loss(EPSILON)
    with pytest.raises(ValueError, match="`vocab_size` is 12, which 5 ranks cannot share"):
        jax.vmap(lambda _: shared(boundary_of(tied=False), x, batch_inputs, "s"), axis_name="s")(
            jnp.arange(5)
        )
