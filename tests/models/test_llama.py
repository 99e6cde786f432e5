import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.contract import assert_close
from jaxpipe import models, sharding
from jaxpipe.kernels import dot_product_attention
from jaxpipe.train import Config
from small_models import small_llama, stack

SMALL = small_llama(base_mlp_dim=24)


def functions_of(config: models.LlamaConfig = SMALL, **options: Any):
    return models.llama(
        config,
        attention=dot_product_attention,
        constrain=sharding.no_constraint,
        **options,
    )


def small_weights(config: models.LlamaConfig = SMALL) -> dict[str, Any]:
    tree, key = models.llama_weights(config), jax.random.key(0)
    stages = models.initialize_layers(tree["layer"], key, (config.base_num_decoder_layers,))
    boundary = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    return boundary | {"stages": stages}


def make_side(rows: int = 2, length: int = 12) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, 32, (rows, length + 1))
    positions = np.broadcast_to(np.arange(length), (rows, length))
    batch_inputs = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": positions,
        "segment_ids": np.ones((rows, length)),
    }
    batch_inputs = {name: jnp.asarray(x, jnp.int32) for name, x in batch_inputs.items()}
    return batch_inputs | {"target_weights": jnp.full((rows, length), 1 / (rows * length))}


def run(functions, weights, batch_inputs, tied: bool = False):
    embed, layer, loss = functions
    stage = stack(layer)
    x = embed(weights["embed"], batch_inputs)
    y, _ = stage(weights["stages"], x, batch_inputs, ())
    names = ("head", "embed") if tied else ("head",)
    return loss({name: weights[name] for name in names}, y, batch_inputs), x, y


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope_type", ["default", "llama3.1"])
def test_a_llama_runs_and_starts_near_the_loss_of_a_uniform_guess(tied: bool, rope_type: str):
    config = dataclasses.replace(SMALL, rope_type=rope_type, logits_via_embedding=tied)
    weights = small_weights(config)
    (loss, metrics), x, y = run(functions_of(config), weights, make_side(), tied)
    assert x.shape == y.shape == (2, 12, 16)
    assert abs(float(loss) - np.log(32)) < 1.0
    assert 0 <= metrics["accuracy"] <= 1
    assert ("logits" in weights["head"]) is not tied


def test_a_packed_row_of_a_llama_is_its_documents_run_separately():
    weights, functions, batch_inputs = small_weights(), functions_of(), make_side(rows=1)
    cut = 5
    parts = [
        {n: x[:, :cut] for n, x in batch_inputs.items()},
        {n: x[:, cut:] for n, x in batch_inputs.items()},
    ]
    parts[1]["positions"] = parts[1]["positions"] - cut
    packed = batch_inputs | {
        "segment_ids": jnp.array([[1] * cut + [2] * (12 - cut)], jnp.int32),
        "positions": jnp.concatenate([part["positions"] for part in parts], axis=1),
    }

    def packed_loss(weights):
        return run(functions, weights, packed)[0][0]

    def separate_loss(weights):
        return sum(run(functions, weights, part)[0][0] for part in parts)

    (loss, gradients), (expected, true) = (
        jax.jit(jax.value_and_grad(f))(weights) for f in (packed_loss, separate_loss)
    )
    assert_close(loss, expected, "loss")
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(true), strict=True
    ):
        assert_close(x, y, jax.tree_util.keystr(path))


def test_a_llama_does_not_see_the_future():
    weights, functions, batch_inputs = small_weights(), functions_of(), make_side()
    later = batch_inputs | {"tokens": batch_inputs["tokens"].at[:, 8:].set(3)}
    y, other = (run(functions, weights, s)[2] for s in (batch_inputs, later))
    np.testing.assert_allclose(y[:, :8], other[:, :8], rtol=1e-5, atol=1e-6)
    assert not np.allclose(y[:, 8:], other[:, 8:])


def test_bfloat16_layers_keep_a_bfloat16_stream_and_a_float32_loss():
    weights, batch_inputs = small_weights(), make_side()
    functions = functions_of(dtype=jnp.bfloat16)
    # `jax.nn.dot_product_attention` mixes bfloat16 and float32 itself.
    with jax.numpy_dtype_promotion("standard"):
        (loss, metrics), x, y = run(functions, weights, batch_inputs)
        gradients = jax.jit(jax.grad(lambda w: run(functions, w, batch_inputs)[0][0]))(weights)
    assert x.dtype == y.dtype == jnp.bfloat16
    assert loss.dtype == metrics["accuracy"].dtype == jnp.float32
    (true, _), _, _ = run(functions_of(), weights, batch_inputs)
    np.testing.assert_allclose(loss, true, rtol=0.02)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}


def test_the_smallest_preset_is_the_default_of_a_run():
    config = Config()
    assert config.model_name == "llama-tiny"
    for key, value in models.PRESETS["llama-tiny"].items():
        assert getattr(config, key) == value, key


@pytest.mark.parametrize("name", [n for n in models.PRESETS if not n.startswith("deepseek")])
def test_presets_give_every_size(name: str):
    preset = models.PRESETS[name]
    kind = models.MixtureConfig if "num_experts" in preset else models.LlamaConfig
    own = {
        "gemma3": models.GemmaConfig,
        "gpt_oss": models.GptOssConfig,
        "llama4": models.Llama4Config,
    }
    kind = own.get(preset.get("decoder_block", "llama"), kind)
    fields = {field.name for field in dataclasses.fields(kind)}
    assert preset.keys() - {"decoder_block"} == fields


def test_flops_are_those_of_a_hand_count():
    # Forward multiply-adds of a token in one layer: q, k, v, out, three of the MLP.
    layer = 16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24
    # Scores and their sum of values: each 4 heads x 8 channels x half of 10 tokens.
    attention = 2 * 4 * 8 * 5
    forward = 2 * (2 * (layer + attention) + 16 * 32)
    assert models.matmul_flops_per_token(SMALL, models.llama_weights(SMALL), 10) == 3 * forward


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"base_num_kv_heads": 3},
            r"`base_num_query_heads` is 4, not a multiple of `base_num_kv_heads` = 3\. Every group",
        ),
        ({"head_dim": 7}, r"`head_dim` is 7\. Rotary positions need an even number\."),
        ({"rope_type": "yarn"}, r"`rope_type` is 'yarn'\. Give 'default' or 'llama3\.1'\."),
    ],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
