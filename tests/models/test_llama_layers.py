"""Layers of the llama family against layers written out, without jaxpipe's code.

They loop over the rows of a batch, heads, tokens and experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.contract import assert_close
from jaxpipe import models, sharding
from jaxpipe.kernels import dot_product_attention, sliced_dot_product_attention
from jaxpipe.models.layers import routed_experts
from small_models import small_gemma, small_gpt_oss, small_llama, small_llama4, small_mixture

ROWS, LENGTH = 2, 4
# Of global layers of Llama 4, whose scores grow from the position 8,191 on.
FIRST = 8189
KINDS: dict[str, Any] = {
    "llama": small_llama(),
    "qwen3": small_llama(use_qk_norm=True, head_dim=6, normalization_layer_epsilon=0.01),
    "gemma3, local": small_gemma(head_dim=6, normalization_layer_epsilon=0.01),
    "gemma3, global": small_gemma(),
    "mixtral": small_mixture(),
    "qwen3_moe": small_mixture(use_qk_norm=True, num_experts_per_tok=3),
    "qwen3_moe, shares as they are": small_mixture(use_qk_norm=True, norm_topk_prob=False),
    "gpt_oss, local": small_gpt_oss(normalization_layer_epsilon=0.01),
    "gpt_oss, global": small_gpt_oss(head_dim=6),
    "llama4, local": small_llama4(head_dim=6, normalization_layer_epsilon=0.01),
    # Frequencies that are powers of 2, as angles at large positions have few digits behind 0.
    "llama4, global": small_llama4(num_experts_per_tok=1, rope_max_timescale=16.0),
    "llama4, experts in every layer, global": small_llama4(
        interleave_moe_layer_step=1, base_mlp_dim=8, use_qk_norm=False, rope_max_timescale=16.0
    ),
}


def norm(x: Any, scale: Any, epsilon: float) -> Any:
    return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon)


def yarn(config: Any) -> np.ndarray:
    """By how much the wavelength of each pair of channels is stretched, after arXiv 2309.00071."""
    half, base = config.head_dim // 2, config.rope_max_timescale
    turns = config.original_max_position_embeddings / (2 * np.pi * base ** (np.arange(half) / half))
    # Between the numbers of turns, the share rises with the index of a pair: with log(turns).
    fast, slow = (np.log(beta) for beta in (config.beta_fast, config.beta_slow))
    log_of_first, per_pair = np.log(turns[0]), np.log(base) / half
    first, last = ((log_of_first - log) / per_pair for log in (fast, slow))
    first, last = max(first, 0), min(last, config.head_dim - 1)
    slowed = np.clip((np.arange(half) - first) / (last - first), 0, 1)
    return 1 / (1 - slowed + slowed / config.rope_factor)


def turned(head: Any, timescale: float, stretch: Any, start: int = 0) -> Any:
    """Rotates the halves of the channels of a head [T, C] by their positions, from `start` on."""
    half = head.shape[-1] // 2
    frequencies = timescale ** -(np.arange(half) / half) / stretch
    angles = np.outer(start + np.arange(len(head)), frequencies).astype(np.float32)
    first, second = head[:, :half], head[:, half:]
    return jnp.concatenate(
        [
            first * jnp.cos(angles) - second * jnp.sin(angles),
            second * jnp.cos(angles) + first * jnp.sin(angles),
        ],
        axis=-1,
    )


def over_heads(config: Any, w: Any, x: Any, sees: Any, prepare: Any, scalar: float) -> Any:
    """[T, D] of one row, head by head, of queries and keys as `prepare` returns them."""
    y, shared_by = jnp.zeros_like(x), config.base_num_query_heads // config.base_num_kv_heads
    has_biases = "out_bias" in w
    for h in range(config.base_num_query_heads):
        query, key, value = (
            x @ w[name][:, i] + (w[f"{name}_bias"][i] if has_biases else 0)
            for name, i in (("query", h), ("key", h // shared_by), ("value", h // shared_by))
        )
        query, key = prepare(query, key)
        scores = query @ key.T / np.sqrt(scalar).astype(np.float32)
        parts = jnp.where(sees, jnp.exp(scores), 0)
        total = jnp.sum(parts, axis=-1, keepdims=True)
        total += jnp.exp(w["sinks"][h]) if has_biases else 0
        y += parts / total @ value @ w["out"][h]
    return y + (w["out_bias"] if has_biases else 0)


def attention(config: Any, w: Any, x: Any, is_local: bool) -> Any:
    """[T, D] of one row; of Gemma 3 and gpt-oss a local layer or a global one."""
    is_gpt_oss = isinstance(config, models.GptOssConfig)
    epsilon = config.normalization_layer_epsilon
    timescale, window, stretch, scalar = config.rope_max_timescale, len(x), 1.0, config.head_dim
    if isinstance(config, models.GemmaConfig):
        scalar, stretch = config.query_pre_attn_scalar, config.rope_linear_scaling_factor
        if is_local:
            timescale, window = config.local_rope_max_timescale, config.sliding_window_size
            stretch = 1.0
    if is_gpt_oss:
        stretch, window = yarn(config), config.sliding_window_size if is_local else window
        scalar /= (0.1 * np.log(config.rope_factor) + 1) ** 4
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    sees = (distance >= 0) & (distance < window)

    def prepare(query: Any, key: Any) -> tuple[Any, Any]:
        if config.use_qk_norm:
            query = norm(query, w["query_norm"], epsilon)
            key = norm(key, w["key_norm"], epsilon)
        return turned(query, timescale, stretch), turned(key, timescale, stretch)

    return over_heads(config, w, x, sees, prepare, scalar)


def swiglu(gate: Any, up: Any, down: Any, x: Any) -> Any:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def clamped(w: Any, e: Any, x: Any) -> Any:
    """The expert `e` of a gpt-oss, of one token."""
    gate = jnp.minimum(x @ w["gate"][e] + w["gate_bias"][e], 7)
    up = jnp.clip(x @ w["up"][e] + w["up_bias"][e], -7, 7)
    return (up + 1) * gate / (1 + jnp.exp(-1.702 * gate)) @ w["down"][e] + w["down_bias"][e]


def gated_mlp(w: Any, x: Any) -> Any:
    return swiglu(w["gate"], w["up"], w["down"], x)


def geglu(gate: Any, up: Any, down: Any, x: Any) -> Any:
    """By the formula of Hendrycks and Gimpel with tanh."""
    z = x @ gate
    root = np.sqrt(2 / np.pi).astype(np.float32)
    return (0.5 * z * (1 + jnp.tanh(root * (z + 0.044715 * z**3))) * (x @ up)) @ down


def experts(config: Any, w: Any, x: Any) -> tuple[Any, Any, np.ndarray]:
    """Of the tokens [T, D] of one row: results, chances, and how often each expert is chosen."""
    is_gpt_oss = isinstance(config, models.GptOssConfig)
    bias = w["router"]["logits_bias"] if is_gpt_oss else 0
    chances = jax.nn.softmax(x @ w["router"]["logits"] + bias)
    results, counts = [], np.zeros(config.num_experts)
    for token, chance in zip(x, chances, strict=True):
        order = np.argsort(-np.asarray(jax.lax.stop_gradient(chance)))
        chosen = order[: config.num_experts_per_tok]
        total = sum(chance[e] for e in chosen) if config.norm_topk_prob else 1.0
        gate, up, down = (w["experts"][name] for name in ("gate", "up", "down"))
        of_experts = [
            clamped(w["experts"], e, token)
            if is_gpt_oss
            else swiglu(gate[e], up[e], down[e], token)
            for e in chosen
        ]
        results.append(sum(chance[e] / total * y for e, y in zip(chosen, of_experts, strict=True)))
        counts[chosen] += 1
    return jnp.stack(results), chances, counts


def gemma(config: Any, w: Any, x: Any, is_local: bool) -> tuple[Any, Any]:
    """Returns what a layer of Gemma 3 returns, whose scales are stored as what they add to 1."""
    epsilon, rows = config.normalization_layer_epsilon, []
    scales = {name: 1 + leaf for name, leaf in w.items() if name.endswith("norm")}
    heads = w["attention"] | {n: 1 + w["attention"][n] for n in ("query_norm", "key_norm")}
    for row in x:
        y = attention(config, heads, norm(row, scales["attention_norm"], epsilon), is_local)
        row = row + norm(y, scales["post_attention_norm"], epsilon)
        h = norm(row, scales["mlp_norm"], epsilon)
        y = geglu(w["mlp"]["gate"], w["mlp"]["up"], w["mlp"]["down"], h)
        rows.append(row + norm(y, scales["post_mlp_norm"], epsilon))
    return jnp.stack(rows), 0.0


def llama4_attention(config: Any, w: Any, x: Any, first: int, is_local: bool) -> Any:
    """[T, D] of one row, whose first token is at a position of its document."""
    positions = first + np.arange(len(x))
    chunk = positions // config.chunk_attn_window_size
    sees = positions[:, None] >= positions
    if is_local:
        sees &= chunk[:, None] == chunk
    tuned = 1 + 0.1 * np.log(np.floor((positions + 1) / 8192) + 1).astype(np.float32)

    def prepare(query: Any, key: Any) -> tuple[Any, Any]:
        if not is_local:
            return query * tuned[:, None], key
        heads = (turned(head, config.rope_max_timescale, 1.0, first) for head in (query, key))
        if config.use_qk_norm:
            heads = (norm(head, 1, config.normalization_layer_epsilon) for head in heads)
        query, key = heads
        return query, key

    return over_heads(config, w, x, sees, prepare, config.head_dim)


def llama4(config: Any, w: Any, x: Any, first: int, is_local: bool) -> tuple[Any, Any]:
    """What a block returns: layers with an MLP, and behind them one with experts."""
    layers = [w[name] for name in sorted(w)] if "layer_0" in w else [w]
    epsilon, rows, chances, counts = config.normalization_layer_epsilon, [], [], 0
    for row in x:
        for i, of_layer in enumerate(layers):
            is_last = i == len(layers) - 1
            h = norm(row, of_layer["attention_norm"], epsilon)
            local = is_local or not is_last
            row = row + llama4_attention(config, of_layer["attention"], h, first, local)
            h = norm(row, of_layer["mlp_norm"], epsilon)
            if not is_last:
                row = row + gated_mlp(of_layer["mlp"], h)
                continue
            moe = of_layer["moe"]
            row = row + gated_mlp(moe["shared"], h)
            scores = 1 / (1 + jnp.exp(-(h @ moe["router"]["logits"])))
            chances.append(scores / jnp.sum(scores, axis=-1, keepdims=True))
            routed = []
            for token, score in zip(h, scores, strict=True):
                order = np.argsort(-np.asarray(jax.lax.stop_gradient(score)))
                chosen = order[: config.num_experts_per_tok]
                results = [
                    gated_mlp({name: m[e] for name, m in moe["experts"].items()}, token * score[e])
                    for e in chosen
                ]
                routed.append(sum(results))
                counts += np.isin(np.arange(config.num_experts), chosen)
            rows.append(row + jnp.stack(routed))
    load = (counts / np.sum(counts)).astype(np.float32)
    balance = config.num_experts * jnp.sum(load * jnp.mean(jnp.concatenate(chances), axis=0))
    return jnp.stack(rows), config.load_balance_loss_weight * balance


def written_out(config: Any, w: Any, x: Any, is_local: bool) -> tuple[Any, Any]:
    """Returns what the layer returns, and its load-balance loss."""
    if isinstance(config, models.GemmaConfig):
        return gemma(config, w, x, is_local)
    if isinstance(config, models.Llama4Config):
        return llama4(config, w, x, 0 if is_local else FIRST, is_local)
    epsilon, rows, chances, counts = config.normalization_layer_epsilon, [], [], 0.0
    for row in x:
        h = norm(row, w["attention_norm"], epsilon)
        row = row + attention(config, w["attention"], h, is_local)
        h = norm(row, w["mlp_norm"], epsilon)
        if "mlp" in w:
            rows.append(row + swiglu(w["mlp"]["gate"], w["mlp"]["up"], w["mlp"]["down"], h))
            continue
        y, of_row, chosen = experts(config, w["moe"], h)
        rows.append(row + y)
        chances.append(of_row)
        counts += chosen
    if not chances:
        return jnp.stack(rows), 0.0
    load = (counts / np.sum(counts)).astype(np.float32)
    balance = config.num_experts * jnp.sum(load * jnp.mean(jnp.concatenate(chances), axis=0))
    return jnp.stack(rows), config.load_balance_loss_weight * balance


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_layer_and_its_gradients_are_those_of_the_layer_written_out(name: str):
    config, is_local = KINDS[name], name.endswith("local")
    first = FIRST if isinstance(config, models.Llama4Config) and not is_local else 0
    several = tuple(
        sliced_dot_product_attention(sharding.DEFAULT_RULES, scores)
        for scores in config.attention_scores
    )
    _, layer, _ = models.llama(
        config,
        attention=several if config.layer_kinds else dot_product_attention,
        experts=routed_experts(sharding.DEFAULT_RULES),
        constrain=sharding.no_constraint,
    )
    # Norms that are not 1, or a test would not notice one that is missing.
    noise = iter(jax.random.split(jax.random.key(1), 30))
    weights = jax.tree.map(
        lambda w: w + 0.2 * jax.random.normal(next(noise), w.shape),
        models.initialize(models.llama_weights(config)["layer"], jax.random.key(0)),
    )
    x = jax.random.normal(jax.random.key(2), (ROWS, LENGTH, config.base_emb_dim))
    batch_inputs = {
        "positions": jnp.broadcast_to(first + jnp.arange(LENGTH), (ROWS, LENGTH)),
        "segment_ids": jnp.ones((ROWS, LENGTH), jnp.int32),
        "target_weights": jnp.full((ROWS, LENGTH), 1 / (ROWS * LENGTH)),
    }

    def ours(w: Any, x: Any) -> tuple[Any, Any]:
        y, aux = layer(w, x, batch_inputs, ((), int(not is_local)) if config.layer_kinds else ())
        return y, aux.get("loss", 0.0)

    def with_gradients(run: Any) -> Any:
        def total(w: Any, x: Any) -> tuple[Any, Any]:
            y, balance = run(w, x)
            return jnp.sum(jnp.sin(y)) + balance, (y, balance)

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(weights, x)

    true = with_gradients(lambda w, x: written_out(config, w, x, is_local))
    leaves = jax.tree_util.tree_leaves_with_path(with_gradients(ours))
    for (path, leaf), expected in zip(leaves, jax.tree.leaves(true), strict=True):
        if np.any(expected):
            assert_close(leaf, expected, jax.tree_util.keystr(path))
        else:
            assert not np.any(leaf), path


def test_experts_must_be_given_and_must_be_as_wide_as_the_mlp_they_replace():
    with pytest.raises(ValueError, match="is a `MixtureConfig`, and `experts` is missing"):
        models.llama(
            small_mixture(), attention=dot_product_attention, constrain=sharding.no_constraint
        )
    with pytest.raises(ValueError, match="`base_mlp_dim` is 16 and `base_moe_mlp_dim` 8, but"):
        small_mixture(base_mlp_dim=16)
    with pytest.raises(ValueError, match="`num_experts_per_tok` is 5, and a token chooses among"):
        small_mixture(num_experts_per_tok=5)


def test_every_kind_of_layers_must_be_given_its_attention():
    with pytest.raises(ValueError, match="`attention` has 1 functions, and layers are of 2 kinds"):
        models.llama(
            small_gemma(), attention=dot_product_attention, constrain=sharding.no_constraint
        )
