"""Latent attention against a loop over heads and queries, and YaRN against a loop over pairs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.contract import assert_close
from jaxpipe import sharding
from jaxpipe.kernels import dot_product_attention, splash_attention
from jaxpipe.models import DeepseekConfig, initialize
from jaxpipe.models.layers import (
    Yarn,
    latent_attention,
    latent_attention_weights,
    rms_norm,
    rope,
    rope_frequencies,
    yarn_frequencies,
    yarn_score_scale,
)
from small_models import small_deepseek_v2, small_gpt_oss

SMALL = small_deepseek_v2(
    base_num_query_heads=3, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, v_head_dim=5
)
LENGTH = 9


def inputs(config: DeepseekConfig = SMALL):
    tree = latent_attention_weights(config.attention, branches=2, dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, config.base_emb_dim))
    batch_inputs = {
        "positions": jnp.array([[*range(5), *range(4)], [*range(9)]], jnp.int32),
        "segment_ids": jnp.array([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2], jnp.int32),
    }
    return initialize(tree, jax.random.key(0)), x, batch_inputs


def obvious(config: DeepseekConfig, w, x, batch_inputs):
    """Every head of every query for itself."""
    epsilon, split = config.normalization_layer_epsilon, config.qk_nope_head_dim
    channels = split + config.qk_rope_head_dim
    frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_max_timescale)

    def turn(row):
        return rope(row[None, :, None], positions[None], frequencies)[0, :, 0]

    rows = []
    for row in range(x.shape[0]):
        positions, segments = batch_inputs["positions"][row], batch_inputs["segment_ids"][row]
        queries = x[row]
        if config.q_lora_rank:
            queries = rms_norm(x[row] @ w["query_down"], w["query_norm"], epsilon)
        latent = rms_norm(x[row] @ w["kv_down"], w["kv_norm"], epsilon)
        shared, out = turn(x[row] @ w["rope_key"]), jnp.zeros_like(x[row])
        for h in range(config.base_num_query_heads):
            q = queries @ w["query_up" if config.q_lora_rank else "query"][:, h]
            plain = q[:, :split] @ (latent @ w["key_up"][:, h]).T
            scores = (plain + turn(q[:, split:]) @ shared.T) / math.sqrt(channels)
            visible = jnp.tril(segments[:, None] == segments[None, :])
            chances = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
            out += chances @ (latent @ w["value_up"][:, h]) @ w["out"][h]
        rows.append(out)
    return jnp.stack(rows)


@pytest.mark.parametrize("q_lora_rank", [0, 12])
def test_latent_attention_and_its_gradients_are_those_of_a_loop_over_heads(q_lora_rank: int):
    config = dataclasses.replace(SMALL, q_lora_rank=q_lora_rank)
    w, x, batch_inputs = inputs(config)
    attend = latent_attention(
        config.attention, attention=dot_product_attention, constrain=sharding.no_constraint
    )

    def run(f):
        def loss(w, x):
            y = f(w, x)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(w, x)

    result = run(lambda w, x: attend(w, x, batch_inputs))
    true = run(lambda w, x: obvious(config, w, x, batch_inputs))
    for (path, leaf), expected in zip(
        jax.tree_util.tree_leaves_with_path(result), jax.tree.leaves(true), strict=True
    ):
        assert_close(leaf, expected, jax.tree_util.keystr(path))


def test_splash_takes_values_narrower_than_keys():
    config = dataclasses.replace(
        SMALL, base_num_query_heads=2, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
    )
    w, _, _ = inputs(config)
    x = jax.random.normal(jax.random.key(1), (1, 128, config.base_emb_dim))
    batch_inputs = {
        "positions": jnp.arange(128, dtype=jnp.int32)[None],
        "segment_ids": (jnp.arange(128, dtype=jnp.int32) // 50 + 1)[None],
    }

    def gradients(attention):
        constrain = sharding.no_constraint
        attend = latent_attention(config.attention, attention=attention, constrain=constrain)
        return jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(attend(w, x, batch_inputs)))))(w)

    splash = gradients(splash_attention(sharding.DEFAULT_RULES, interpret=True))
    for (path, leaf), expected in zip(
        jax.tree_util.tree_leaves_with_path(splash),
        jax.tree.leaves(gradients(dot_product_attention)),
        strict=True,
    ):
        assert_close(leaf, expected, jax.tree_util.keystr(path))


def test_attention_is_sharper_with_yarn_by_the_published_factor():
    # DeepSeek-V2-Lite: factor 40, mscale 0.707.
    assert yarn_score_scale(40.0, 0.707) == pytest.approx(1.2608**2, rel=1e-4)
    assert yarn_score_scale(1.0, 0.707) == 1.0


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_ramps_between():
    # DeepSeek-V2's: 64 channels, 40 times 4,096 tokens.
    frequencies = yarn_frequencies(64, 10_000.0, Yarn(40.0, 4096, 32.0, 1.0, mscale=1.0))
    plain = [10_000.0 ** (-pair / 32) for pair in range(32)]
    turns = [4096 * frequency / (2 * math.pi) for frequency in plain]
    # The ramp begins at the last pair that turns 32 times, and ends at the first below once.
    first = max(pair for pair in range(32) if turns[pair] >= 32)
    last = min(pair for pair in range(32) if turns[pair] <= 1)
    assert (first, last) == (10, 23)
    for pair in range(32):
        slowed = min(max((pair - first) / (last - first), 0), 1)
        expected = plain[pair] * (1 - slowed) + plain[pair] / 40 * slowed
        np.testing.assert_allclose(frequencies[pair], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_factor": 0.5}, "`rope_factor` is 0.5. YaRN makes sequences longer"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, "`beta_fast` is 1 and `beta_slow` 2"),
    ],
)
def test_keys_of_yarn_that_make_no_sequence_longer_are_refused(keys, message):
    dataclasses.replace(SMALL, **keys)  # whose angles are as trained
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, rope_type="yarn", **keys)
    with pytest.raises(ValueError, match=message):
        small_gpt_oss(**keys)


def test_yarn_changes_what_attention_computes():
    w, x, batch_inputs = inputs()
    yarn = dataclasses.replace(SMALL, rope_type="yarn", original_max_position_embeddings=16)

    def run(config: DeepseekConfig):
        attend = latent_attention(
            config.attention, attention=dot_product_attention, constrain=sharding.no_constraint
        )
        return attend(w, x, batch_inputs)

    assert not np.allclose(run(SMALL), run(yarn), atol=1e-3)
