"""The loss in chunks is the loss, and the logits of a microbatch never exist."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.contract import Row, assert_close, circular, make_case
from jaxpipe import models
from small_models import small_llama_loss

pytestmark = pytest.mark.ci

b, T, D, V = 2, 12, 16, 32


def batch() -> tuple[dict[str, Any], jax.Array, dict[str, jax.Array]]:
    boundary = {
        "head": {"norm": jnp.ones(D), "logits": jax.random.normal(jax.random.key(0), (D, V))},
    }
    x = jax.random.normal(jax.random.key(1), (b, T, D))
    # Half of the targets are what the model predicts, so that accuracy is no zero.
    likeliest = jnp.argmax(x @ boundary["head"]["logits"], axis=-1)
    targets = jnp.where(jnp.arange(T) % 2 == 0, likeliest, 3).astype(jnp.int32)
    shares = jax.random.uniform(jax.random.key(2), (b, T)) / T
    return boundary, x, {"targets": targets, "target_weights": shares}


def loss_of(num_chunks: int) -> Any:
    return small_llama_loss(num_vocab_tiling=num_chunks)


def gradients(num_chunks: int, boundary: Any, x: Any, batch_inputs: Any) -> Any:
    def loss(boundary, x, shares):
        value, metrics = loss_of(num_chunks)(boundary, x, batch_inputs | {"target_weights": shares})
        return 3 * value, (value, metrics)

    of_all = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    return jax.jit(of_all)(boundary, x, batch_inputs["target_weights"])


@pytest.mark.parametrize("num_chunks", [2, 3, 12])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_accuracy_and_gradients_are_those_of_all_tokens_at_once(num_chunks: int, tied: bool):
    boundary, x, batch_inputs = batch()
    if tied:
        boundary = {
            "head": {"norm": boundary["head"]["norm"]},
            "embed": {"table": boundary["head"]["logits"].T},
        }
    chunked, whole = (
        gradients(num_chunks, boundary, x, batch_inputs),
        gradients(1, boundary, x, batch_inputs),
    )
    pairs = zip(jax.tree_util.tree_leaves_with_path(chunked), jax.tree.leaves(whole), strict=True)
    for (path, leaf), true in pairs:
        assert_close(leaf, true, jax.tree_util.keystr(path))


def test_gradients_of_the_head_add_up_in_float32():
    """In bfloat16 a sum of many small gradients would stop growing."""
    boundary, x, batch_inputs = batch()
    boundary, x = jax.tree.map(lambda w: w.astype(jnp.bfloat16), (boundary, x))
    program = jax.make_jaxpr(partial(gradients, 12))(boundary, x, batch_inputs)
    assert f"f32[{D},{V}]" in str(program)
    ((_, _), (dends, _, _)) = gradients(12, boundary, x, batch_inputs)
    ((_, _), (true, _, _)) = gradients(1, boundary, x, batch_inputs)
    error = dends["head"]["logits"].astype(jnp.float32) - true["head"]["logits"].astype(jnp.float32)
    assert float(jnp.max(jnp.abs(error))) <= 2**-7 * float(jnp.max(jnp.abs(true["head"]["logits"])))


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_no_array_has_the_logits_of_a_whole_microbatch(num_chunks: int):
    arguments = batch()
    step = jax.jit(partial(gradients, num_chunks)).lower(*arguments)
    for text in (str(jax.make_jaxpr(partial(gradients, num_chunks))(*arguments)), step.as_text()):
        text = text.replace("x", ",")  # StableHLO writes 2x12x32
        assert (f"{b},{T},{V}" in text) == (num_chunks == 1)
    assert (f"f32[{b},{T},{V}]" in (step.compile().as_text() or "")) == (num_chunks == 1)


def test_chunks_that_do_not_divide_the_tokens_are_refused():
    with pytest.raises(ValueError, match="`num_vocab_tiling` is 5, which does not divide the 12"):
        loss_of(5)(*batch())


@pytest.mark.parametrize(
    "row",
    [
        Row("circular", "llama", 2, 1, 4, axes=(("fsdp", 2), ("tensor", 2)), packed=True,
            tied=True, batch_axes=("data", "fsdp")),
        pytest.param(
            Row("circular", "llama", 2, 1, 4, axes=(("context", 2), ("tensor", 2)), packed=True),
            marks=pytest.mark.slow,
        ),
        Row("circular", "llama", 3, 1, 3, axes=None, tied=True),
    ],
    ids=str,
)  # fmt: skip
def test_a_pipeline_whose_loss_is_in_chunks_equals_one_whose_is_not(row: Row, monkeypatch):
    whole = circular(row, make_case(row))
    monkeypatch.setattr(models, "llama", partial(models.llama, num_vocab_tiling=4))
    (loss, metrics), grads = circular(row, make_case(row))
    (true_loss, true_metrics), true_grads = whole
    np.testing.assert_allclose(loss, true_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], true_metrics["accuracy"], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), grads, true_grads)
