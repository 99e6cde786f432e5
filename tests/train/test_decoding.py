"""Tokens that are decoded with a cache, against whole sequences without one, and draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpipe import models, sharding
from jaxpipe.hugging_face import from_hugging_face
from jaxpipe.kernels import dot_product_attention
from jaxpipe.models import initialize
from jaxpipe.models.layers import routed_experts
from jaxpipe.models.weights import stack_weights
from jaxpipe.train.sampling import Decoder, decode, decoding_plan, generate, prefill
from jaxpipe.train.sampling._generate import draw, likeliest, nucleus
from small_models import small_deepseek, small_deepseek_v2, small_llama

from .converted import GOLDEN, loaded

SIZES: dict[str, Any] = {
    "llama": small_llama(),
    "llama, tied": small_llama(logits_via_embedding=True, base_num_decoder_layers=1),
    "deepseek v3": small_deepseek(),
    "deepseek v2": small_deepseek_v2(first_num_dense_layers=2),
    "deepseek, no dense layer": small_deepseek(first_num_dense_layers=0),
}
VOCAB, PROMPTS, NEW = 32, (3, 7, 1), 8


def marked(first: str) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name != first)) for name in SIZES]


def functions(sizes: Any) -> tuple[Any, Any, Any]:
    """The plain functions of a model, and its weights, which are larger than those of a run."""
    options: dict[str, Any] = {
        "attention": dot_product_attention,
        "constrain": sharding.no_constraint,
    }
    if isinstance(sizes, models.LlamaConfig):
        embed, layer, _ = models.llama(sizes, **options)
        tree, count = models.llama_weights(sizes), sizes.base_num_decoder_layers
    else:
        experts = routed_experts(sharding.DEFAULT_RULES)
        embed, layer, _ = models.deepseek(sizes, experts=experts, **options)
        tree = models.deepseek_weights(sizes)
        count = sizes.base_num_decoder_layers - sizes.first_num_dense_layers
    tree["stages"] = stack_weights(tree.pop("layer"), (count,), ("layers",))
    weights = initialize(tree, jax.random.key(3))
    return embed, layer, jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, weights)


def decoder(sizes: Any) -> Decoder:
    embed, layer, _ = functions(sizes)
    epsilon, tied = sizes.normalization_layer_epsilon, getattr(sizes, "logits_via_embedding", False)

    def logits(boundary: Any, x: jax.Array) -> jax.Array:
        constrain = sharding.no_constraint
        return models.next_token_logits(boundary, x, epsilon=epsilon, constrain=constrain)

    return Decoder(embed, layer, logits, tied)


LENGTH = 16  # of whole sequences, so that they compile once


def whole_logits(sizes: Any, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """[T, V] of each sequence: embedding, layers, norm and product, without a cache."""
    embed, layer, weights = functions(sizes)
    padded = np.array([[*row, *[0] * (LENGTH - len(row))] for row in rows], np.int32)
    inputs = {
        "tokens": jnp.asarray(padded),
        "positions": jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), padded.shape),
        "segment_ids": jnp.ones(padded.shape, jnp.int32),
        "target_weights": jnp.ones(padded.shape),
    }

    @jax.jit
    def run(weights: Any) -> jax.Array:
        x = embed(weights["embed"], inputs)
        for i in range(len(jax.tree.leaves(weights["stages"])[0])):
            x, _ = layer(jax.tree.map(lambda w, i=i: w[i], weights["stages"]), x, inputs, ())
        return x

    h = np.asarray(run(weights), np.float64)
    h /= np.sqrt((h**2).mean(-1, keepdims=True) + sizes.normalization_layer_epsilon)
    h *= np.asarray(weights["head"]["norm"])
    tied = "logits" not in weights["head"]
    matrix = np.asarray(weights["embed"]["table"].T if tied else weights["head"]["logits"])
    return [(x @ matrix)[: len(row)] for x, row in zip(h, rows, strict=True)]


def rows_of(lengths: Sequence[int]) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Prompts, and the same with padding in front, with where they are."""
    random = np.random.default_rng(5)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in lengths]
    most = max(lengths)
    tokens = np.array([[9] * (most - len(row)) + row for row in prompts], np.int32)
    there = np.array([[0] * (most - len(row)) + [1] * len(row) for row in prompts], np.int32)
    return prompts, tokens, there


def greedy(sizes: Any, tokens: np.ndarray, there: np.ndarray, end: int = -1, **changes) -> Any:
    options = {"max_tokens": NEW, "choose": likeliest, "is_token": np.ones(VOCAB, bool)} | changes

    @jax.jit
    def run(weights: Any) -> jax.Array:
        key = jax.random.key(0)
        rows = jnp.asarray(tokens), jnp.asarray(there)
        return generate(decoder(sizes), weights, *rows, key, end=end, **options)

    return np.asarray(run(functions(sizes)[2]))


@pytest.mark.parametrize("name", marked("llama"))
def test_tokens_are_the_likeliest_by_the_logits_of_whole_sequences(name: str):
    sizes = SIZES[name]
    prompts, tokens, there = rows_of(PROMPTS)
    found = greedy(sizes, tokens, there).tolist()
    rows = [prompt + new for prompt, new in zip(prompts, found, strict=True)]
    for prompt, new, logits in zip(prompts, found, whole_logits(sizes, rows), strict=True):
        expected = logits[len(prompt) - 1 : -1]
        assert new == expected.argmax(-1).tolist()
        ordered = np.sort(expected, -1)  # no two that rounding could exchange
        assert (ordered[:, -1] - ordered[:, -2]).min() > 1e-4
    assert len({*map(tuple, found)}) == len(PROMPTS)


@pytest.mark.parametrize("name", marked("deepseek v3"))
def test_logits_with_a_cache_are_those_of_whole_sequences(name: str):
    sizes = SIZES[name]
    prompts, tokens, there = rows_of((4, 2))
    model, (_, _, weights), length = decoder(sizes), functions(sizes), 8
    padding = jnp.asarray((there == 0).sum(1), jnp.int32)
    following = [[1, 2, 3, 4], [4, 5, 6, 7]]

    @jax.jit
    def one(new: jax.Array, carried: Any, index: jax.Array) -> Any:
        return decode(model, weights, new, padding, carried, index=index, length=length)

    rows = jnp.asarray(tokens), jnp.asarray(there)
    logits, carried = jax.jit(lambda *rows: prefill(model, weights, *rows, length=length))(*rows)
    steps = [logits]
    for i in range(4):
        new = jnp.asarray([row[i] for row in following], jnp.int32)
        logits, carried = one(new, carried, jnp.int32(4 + i))
        steps.append(logits)
    whole = whole_logits(sizes, [a + b for a, b in zip(prompts, following, strict=True)])
    for row, (prompt, logits) in enumerate(zip(prompts, whole, strict=True)):
        expected = logits[len(prompt) - 1 :]
        found = np.stack([step[row] for step in steps])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("llama2", "llama3", "gemma3", "gpt_oss", "llama4"),
        *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3"),
    ],
)
def test_logits_of_published_architectures_are_those_that_transformers_computed(
    name: str, tmp_path: Path
):
    from_hugging_face(GOLDEN / name, tmp_path / "ours", dtype="float32")
    with np.load(GOLDEN / name / "expected.npz") as saved:
        tokens, expected = saved["tokens"], saved["logits"]
    setup, weights = loaded(tmp_path / "ours")
    weights["stages"] = jax.tree.map(lambda w: w[0, 0], weights["stages"])
    model, length = decoding_plan(setup.config, setup.mesh).decoder, tokens.shape[1]
    first, padding = jnp.asarray(tokens[:, :5]), jnp.zeros(len(tokens), jnp.int32)

    @jax.jit
    def one(new: jax.Array, carried: Any, index: jax.Array) -> Any:
        return decode(model, weights, new, padding, carried, index=index, length=length)

    with jax.set_mesh(setup.mesh):
        logits, carried = prefill(model, weights, first, jnp.ones_like(first), length=length)
        steps = [logits]
        for i in range(5, length):
            logits, carried = one(jnp.asarray(tokens[:, i]), carried, jnp.int32(i))
            steps.append(logits)
    np.testing.assert_allclose(np.stack(steps, 1), expected[:, 4:], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_row_ends_at_the_end_and_the_others_go_on_and_padding_is_never_chosen():
    sizes = SIZES["llama"]
    _, tokens, there = rows_of(PROMPTS)
    whole = greedy(sizes, tokens, there)
    end = int(whole[0, 3])
    cut = greedy(sizes, tokens, there, end=end)
    for before, after in zip(whole.tolist(), cut.tolist(), strict=True):
        count = before.index(end) if end in before else NEW
        assert after == before[:count] + [end] * (NEW - count)
    assert {before.tolist().count(end) > 0 for before in whole} == {True, False}
    is_token = np.arange(VOCAB) != end
    assert end not in greedy(sizes, tokens, there, is_token=is_token)
    np.testing.assert_array_equal(greedy(sizes, tokens, there, max_tokens=1), whole[:, :1])
    # A prompt alone, without the padding that the others make, goes on in the same way.
    np.testing.assert_array_equal(greedy(sizes, tokens[2:, -1:], there[2:, -1:]), whole[2:])


LOGITS = np.log([0.3, 0.05, 0.2, 0.02, 0.25, 0.08, 0.1])


def probabilities(temperature: float, top_p: float) -> np.ndarray:
    """By the definition: the fewest of the likeliest that have the share, and those again."""
    scaled = np.exp(LOGITS / temperature)
    scaled /= scaled.sum()
    kept, total = [], 0.0
    for i in sorted(range(len(scaled)), key=lambda i: -scaled[i]):
        kept.append(i)
        total += scaled[i]
        if total >= top_p:
            break
    only = np.where(np.isin(np.arange(len(scaled)), kept), scaled, 0.0)
    return only / only.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p", "size"), [(1.0, 1.0, 7), (0.7, 1.0, 7), (1.5, 0.8, 5), (1.0, 0.6, 3)]
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(temperature, top_p, size):
    count = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (count, len(LOGITS)))
    keys = jax.random.split(jax.random.key(7), count)
    drawn = jax.jit(draw, static_argnames=("temperature", "top_p"))(
        logits, keys, temperature=temperature, top_p=top_p
    )
    expected = probabilities(temperature, top_p)
    seen = np.bincount(np.asarray(drawn), minlength=len(LOGITS))
    assert (expected > 0).sum() == size
    np.testing.assert_array_equal(seen > 0, expected > 0)
    there = expected > 0
    assert stats.chisquare(seen[there], count * expected[there]).pvalue > 0.01


def test_the_nucleus_is_exact_also_where_a_sum_is_the_share():
    shares = np.log(np.array([[0.25, 0.5, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5]], np.float32))
    for top_p, kept in ((0.5, 1), (0.75, 2), (0.76, 3), (1e-9, 1)):
        found = np.isfinite(np.asarray(nucleus(jnp.asarray(shares), top_p)))
        order = np.argsort(-shares, axis=1, kind="stable")[:, :kept]
        for row, chosen in zip(found, order, strict=True):
            assert {*np.flatnonzero(row)} == {*chosen.tolist()}
