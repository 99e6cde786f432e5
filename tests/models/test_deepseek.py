import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.contract import assert_close
from jaxpipe import models, sharding
from jaxpipe.kernels import dot_product_attention
from jaxpipe.models.layers import routed_experts
from jaxpipe.models.weights import weight_shapes
from small_models import small_deepseek, small_llama, stack

pytestmark = pytest.mark.ci

SMALL = small_deepseek(base_num_decoder_layers=5, first_num_dense_layers=2, base_mlp_dim=24)


def functions_of(config: models.DeepseekConfig = SMALL, **options: Any):
    return models.deepseek(
        config,
        attention=dot_product_attention,
        experts=routed_experts(sharding.DEFAULT_RULES),
        constrain=sharding.no_constraint,
        **options,
    )


def weights_of(config: models.DeepseekConfig = SMALL) -> dict[str, Any]:
    tree, key = models.deepseek_weights(config), jax.random.key(0)
    num_layers = config.base_num_decoder_layers - config.first_num_dense_layers
    stages = models.initialize_layers(tree.pop("layer"), key, (num_layers,))
    return models.initialize(tree, key) | {"stages": stages}


def make_side(rows: int = 2, length: int = 12) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, 32, (rows, length + 1))
    batch_inputs = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(length), (rows, length)),
        "segment_ids": np.ones((rows, length)),
    }
    batch_inputs = {name: jnp.asarray(x, jnp.int32) for name, x in batch_inputs.items()}
    return batch_inputs | {"target_weights": jnp.full((rows, length), 1 / (rows * length))}


def run(functions, weights, batch_inputs):
    """(loss with that of the stages, metrics of both), what enters the stages, what leaves them."""
    embed, layer, loss = functions
    stage = stack(layer)
    x = embed(weights["embed"], batch_inputs)
    y, aux = stage(weights["stages"], x, batch_inputs, ())
    value, metrics = loss({"head": weights["head"]}, y, batch_inputs)
    return (value + aux["loss"], metrics | aux), x, y


def assert_all_close(tree, true):
    leaves = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(true), strict=True)
    for (path, leaf), expected in leaves:
        assert_close(leaf, expected, jax.tree_util.keystr(path))


def test_a_deepseek_starts_near_the_loss_of_a_uniform_guess_with_evenly_loaded_experts():
    (loss, metrics), x, y = run(functions_of(), weights_of(), make_side())
    assert x.shape == y.shape == (2, 12, 16)
    assert metrics.keys() == {"accuracy", "loss", "load_balance_loss"}
    balance = float(metrics["load_balance_loss"])
    assert abs(float(loss) - balance - np.log(32)) < 1.0
    # Three layers, a weight of 0.1, and 1 for experts that are all equal.
    assert 0.3 * 0.9 < balance < 0.3 * 1.3


def test_layers_after_the_pipeline_are_the_last_layers_of_the_same_model():
    weights, batch_inputs = weights_of(), make_side()
    first, last = (jax.tree.map(lambda w, s=s: w[s], weights["stages"]) for s in np.s_[:2, 2:])
    split = weights | {"head": weights["head"] | {"layers": last}, "stages": first}
    expected = weight_shapes(models.deepseek_weights(SMALL, layers_after=1)["head"])
    assert jax.tree.map(jnp.shape, split["head"]) == jax.tree.map(lambda s: s.shape, expected)

    def value_and_gradients(weights):
        return jax.jit(
            jax.value_and_grad(lambda w: run(functions_of(), w, batch_inputs)[0], has_aux=True)
        )(weights)

    (loss, metrics), gradients = value_and_gradients(split)
    (true_loss, true_metrics), true = value_and_gradients(weights)
    parts = metrics["load_balance_loss"], metrics["load_balance_loss_after"]
    assert_close(loss, true_loss, "loss")
    assert_close(sum(parts), true_metrics["load_balance_loss"], "load-balance loss")
    head = {name: g for name, g in gradients["head"].items() if name != "layers"}
    stages = jax.tree.map(
        lambda *halves: jnp.concatenate(halves), gradients["stages"], gradients["head"]["layers"]
    )
    assert_all_close(gradients | {"head": head, "stages": stages}, true)


def test_layers_of_a_llama_after_the_pipeline_are_the_last_of_the_same_model():
    config = small_llama(base_num_decoder_layers=3)
    embed, layer, loss = models.llama(
        config, attention=dot_product_attention, constrain=sharding.no_constraint
    )
    stage = stack(layer)
    tree, key, batch_inputs = (
        models.llama_weights(config, layers_after=1),
        jax.random.key(0),
        make_side(),
    )
    weights = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    first = models.initialize_layers(tree["layer"], key, (2,))
    last = weights["head"]["layers"]
    x = embed(weights["embed"], batch_inputs)
    in_head, _ = loss({"head": weights["head"]}, stage(first, x, batch_inputs, ())[0], batch_inputs)
    every = jax.tree.map(lambda *parts: jnp.concatenate(parts), first, last)
    head = {name: w for name, w in weights["head"].items() if name != "layers"}
    in_stages, _ = loss({"head": head}, stage(every, x, batch_inputs, ())[0], batch_inputs)
    assert_close(in_head, in_stages, "loss")


def test_a_deepseek_without_dense_layers_has_none():
    config = dataclasses.replace(SMALL, first_num_dense_layers=0)
    assert models.deepseek_weights(config)["embed"].keys() == {"table"}
    assert run(functions_of(config), weights_of(config), make_side())[1].shape == (2, 12, 16)


def test_a_deepseek_does_not_see_the_future():
    weights, batch_inputs = weights_of(), make_side()
    later = batch_inputs | {"tokens": batch_inputs["tokens"].at[:, 8:].set(3)}
    y, other = (run(functions_of(), weights, s)[2] for s in (batch_inputs, later))
    np.testing.assert_allclose(y[:, :8], other[:, :8], rtol=1e-5, atol=1e-6)
    assert not np.allclose(y[:, 8:], other[:, 8:])


def test_remat_of_layers_with_and_without_experts_changes_nothing():
    weights, batch_inputs = weights_of(), make_side()

    def gradients(functions):
        return jax.jit(jax.grad(lambda w: run(functions, w, batch_inputs)[0][0]))(weights)

    embed, layer, loss = functions_of(outside_remat=jax.checkpoint)
    again = embed, jax.checkpoint(layer), loss
    assert_all_close(gradients(again), gradients(functions_of()))


def test_bfloat16_layers_keep_a_bfloat16_stream_and_a_float32_loss():
    weights, batch_inputs = weights_of(), make_side()
    functions = functions_of(dtype=jnp.bfloat16)
    # `jax.nn.dot_product_attention` mixes bfloat16 and float32 itself.
    with jax.numpy_dtype_promotion("standard"):
        (loss, metrics), x, y = run(functions, weights, batch_inputs)
        gradients = jax.jit(jax.grad(lambda w: run(functions, w, batch_inputs)[0][0]))(weights)
    assert x.dtype == y.dtype == jnp.bfloat16
    assert {m.dtype for m in metrics.values()} | {loss.dtype} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(loss, run(functions_of(), weights, batch_inputs)[0][0], rtol=0.02)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}


def test_flops_are_those_of_a_hand_count():
    # Multiply-adds of a token in one layer's attention: queries, keys and values, out, scores.
    queries = 16 * 8 + 8 * 2 * 12
    heads = 16 * (8 + 4) + 8 * 2 * (8 + 8)
    attention = queries + heads + 2 * 8 * 16 + 2 * (12 + 8) * 5
    moe = 16 * 4 + (2 + 1) * 3 * 16 * 8
    forward = 5 * attention + 2 * 3 * 16 * 24 + 3 * moe + 16 * 32
    assert models.matmul_flops_per_token(SMALL, models.deepseek_weights(SMALL), 10) == 6 * forward


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_score_func": "tanh"}, r"`routed_score_func` is 'tanh'\. Give 'softmax' or"),
        ({"rope_type": "llama3.1"}, r"`rope_type` is 'llama3\.1'\. Give 'default' or 'yarn'\."),
        ({"first_num_dense_layers": 5}, r"is 5 of `base_num_decoder_layers` = 5\. Give 0 or more"),
        (
            {"n_routing_groups": 3},
            r"`num_experts` is 4, `n_routing_groups` 3 .* Groups must be equal",
        ),
        ({"topk_routing_group": 2}, r"`topk_routing_group` 2\. .* from 1 to all of them"),
        ({"n_routing_groups": 4}, r"`n_routing_groups` is 4 for 4 experts\. .* by their 2 best"),
        ({"num_experts_per_tok": 5}, r"is 5, and a token chooses among 4 experts\. Give 1 to 4"),
        ({"qk_rope_head_dim": 3}, r"`qk_rope_head_dim` is 3\. Rotary positions need an even"),
        ({"v_head_dim": 13}, r"`v_head_dim` is 13, more than the 12 of `qk_nope_head_dim` \+"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
