"""Attention of sequences that are split over devices, against a softmax written out on one device.

CPUs run splash attention in Pallas's interpreter, and cuDNN's in XLA's form of the same call.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask,
    splash_attention_mask_info,
)

from harness.attention import written_out
from harness.contract import assert_close
from jaxpipe.kernels import (
    Scores,
    cudnn_attention,
    sliced_dot_product_attention,
    splash_attention,
)
from jaxpipe.kernels._context import balanced
from jaxpipe.kernels._on_mesh import GRANULARITY, attention_on_mesh, by_rules
from jaxpipe.kernels._scores import Placement
from jaxpipe.kernels._splash import _mask_infos, _Runs, splash_kernel
from jaxpipe.models import initialize
from jaxpipe.models.layers import latent_attention, latent_attention_weights
from jaxpipe.sharding import DEFAULT_RULES, Constrain, make_mesh, no_constraint
from small_models import small_deepseek_v2

KERNELS = {
    "dot_product": sliced_dot_product_attention,
    "cudnn": partial(cudnn_attention, packed=True, implementation="xla"),
    "splash": partial(splash_attention, interpret=True),
}


def check(
    attend, scores: Scores, axes: dict[str, int], length: int, *, sinks=None, rows=1, packed=True
):
    def heads(seed: int, count: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (rows, length, count, 32))

    inputs = heads(0, 4), heads(1, 2), heads(2, 2), sinks
    ends = jnp.arange(rows)[:, None] * 100 + np.array([[length // 3, length // 2 + 5]])
    place = jnp.arange(length)
    documents = jnp.sum(place[None, None] >= ends[..., None], axis=1).astype(jnp.int32)
    documents = documents if packed else jnp.zeros_like(documents)

    def results(attend):
        def loss(inputs):
            out = attend(*inputs)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)

    (_, true), true_gradients = results(
        lambda q, k, v, sinks: written_out(q, k, v, documents, scores, sinks)
    )
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    with jax.set_mesh(make_mesh(axes, devices=devices)):
        (_, out), gradients = results(lambda q, k, v, sinks: attend(q, k, v, documents, sinks))
    assert_close(out, true, "output")
    for name, gradient, expected in zip(
        ("q", "k", "v", "sinks"), gradients, true_gradients, strict=True
    ):
        if expected is not None:
            assert_close(gradient, expected, f"gradient of {name}")


CAUSAL = Scores()
SCORES = {
    "causal": CAUSAL,
    "everything": Scores(causal=False),
    "a window of a neighbour's end": Scores(window=60),
    "a window of several slices": Scores(window=1100),
    "a window both ways": Scores(causal=False, window=70),
    "a scale": Scores(scale=0.3),
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(
    "size", [2, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 8))]
)
def test_stored_scores_on_slices(scores: Scores, size: int):
    check(sliced_dot_product_attention(DEFAULT_RULES, scores), scores, {"context": size}, 96 * size)


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_cudnn_on_slices(scores: Scores, size: int):
    attend = cudnn_attention(DEFAULT_RULES, scores, packed=True, implementation="xla")
    check(attend, scores, {"context": size}, 256 * size)


@pytest.mark.parametrize(
    "scores", [CAUSAL, Scores(causal=False), Scores(window=200), Scores(window=700)], ids=str
)
def test_cudnn_on_slices_of_one_document(scores: Scores):
    attend = cudnn_attention(DEFAULT_RULES, scores, packed=False, implementation="xla")
    check(attend, scores, {"context": 2}, 1024, packed=False)


def test_cudnn_has_masks_of_parts_of_the_queries_alone():
    attend = cudnn_attention(DEFAULT_RULES, packed=False, implementation="xla")
    x, documents = jnp.ones((1, 2048, 2, 32)), jnp.ones((1, 2048), jnp.int32)
    with jax.set_mesh(make_mesh({"context": 4}, devices=jax.devices()[:4])):
        text = str(jax.make_jaxpr(attend)(x, x, x, documents))
    masks = {tuple(map(int, shape)) for shape in re.findall(r"bool\[1,1,(\d+),(\d+)\]", text)}
    assert {shape for shape in masks if shape[0] > 1} == {
        (128, 768),
        (128, 1024),
        (128, 1792),
        (128, 2048),
    }


@pytest.mark.parametrize("size", [2, 4, 16])
def test_parts_of_queries_reach_the_same_number_of_keys_on_every_device(size: int):
    where = balanced(2048, size, 0)
    reach = np.sum([part.keys_seen(CAUSAL.visible)[1] for part in where.parts(512)], axis=0)
    assert reach.min() == reach.max()
    # Of half of the sequence, and of half of a part above the diagonal.
    assert 512 * reach.max() <= (1 + 1 / (4 * size)) * where.most_pairs(CAUSAL.visible)


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_splash_on_slices(scores: Scores):
    attend = splash_attention(DEFAULT_RULES, scores, interpret=True)
    check(attend, scores, {"context": 2}, 1024)


@pytest.mark.parametrize(
    "size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 8))]
)
def test_splash_on_more_slices(size: int):
    check(KERNELS["splash"](DEFAULT_RULES), CAUSAL, {"context": size}, 512 * size)


@pytest.mark.parametrize("kernel", KERNELS)
def test_slices_of_shards_of_rows_and_heads(kernel: str):
    axes = {"fsdp": 2, "tensor": 2, "context": 2}
    check(KERNELS[kernel](DEFAULT_RULES), CAUSAL, axes, 1024, rows=2)


@pytest.mark.parametrize("kernel", ["dot_product", "splash"])
@pytest.mark.parametrize("size", [1, 2])
def test_soft_caps_and_sinks(kernel: str, size: int):
    scores = Scores(soft_cap=3.0, window=200)
    of_kernel = KERNELS[kernel](DEFAULT_RULES, scores)
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    check(of_kernel, scores, {"context": size, "fsdp": 2}, 512, sinks=sinks, rows=2)


def in_ranks(attend):
    """Attention in the ranks of a pipeline, whose axis is manual."""

    def rank(q, k, v, segments, sinks=None):
        return attend(q, k, v, segments)

    spec = jax.P("stage")
    return lambda q, k, v, segments, sinks: jax.shard_map(
        rank, axis_names={"stage"}, in_specs=(spec,) * 4, out_specs=spec
    )(q, k, v, segments)


@pytest.mark.parametrize("kernel", KERNELS)
def test_slices_in_the_ranks_of_a_pipeline(kernel: str):
    axes = {"stage": 2, "context": 2, "tensor": 2}
    check(in_ranks(KERNELS[kernel](DEFAULT_RULES)), CAUSAL, axes, 1024, rows=2)


def pairs_of_blocks(which: np.ndarray, states: np.ndarray) -> set[tuple[int, int, int]]:
    """(row, block, whether it is seen in part or everywhere) of all blocks that a kernel runs."""
    seen = np.argwhere(states > 0)
    return {(int(i), int(which[i, j]), int(states[i, j])) for i, j in seen}


PLACEMENTS = {
    "balanced": balanced(512, 4, 0),
    "whole": Placement(np.zeros((1, 1), np.int32), 1024, 1024),
    "behind a tail": Placement(np.array([[256]]), 512, 768),
}


@pytest.mark.parametrize("where", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize(
    "scores", [CAUSAL, Scores(window=200), Scores(causal=False, window=200)], ids=str
)
def test_blocks_that_run_are_those_of_jax(where: Placement, scores: Scores):
    """JAX looks at the mask of every token; here blocks are compared."""
    forward, backward = _mask_infos(scores.visible, _Runs.of(where), 128, 128)
    for device in range(len(where.starts)):
        rows = np.concatenate([start + np.arange(where.run) for start in where.starts[device]])
        distance = rows[:, None] - np.arange(where.num_keys)[None]
        mask = np.ones_like(distance, bool)
        if scores.causal:
            mask &= distance >= 0
        if scores.window is not None:
            mask &= np.abs(distance) < scores.window
        theirs = splash_attention_mask.MultiHeadMask([splash_attention_mask.NumpyMask(mask)])
        info, _ = splash_attention_mask_info.process_mask(theirs, (128, 128))
        expected = pairs_of_blocks(np.asarray(info.data_next)[0], np.asarray(info.block_mask)[0])
        assert pairs_of_blocks(forward[0][device], forward[1][device]) == expected
        info, _ = splash_attention_mask_info.process_mask_dkv(theirs, (128, 128))
        expected = pairs_of_blocks(
            np.asarray(info.data_next)[0].T, np.asarray(info.block_mask)[0].T
        )
        ours = pairs_of_blocks(backward[0][device].T, backward[1][device].T)
        assert ours == expected


@pytest.mark.parametrize("size", [2, 4, 16])
def test_devices_have_the_same_number_of_blocks_of_a_causal_step(size: int):
    where = balanced(2048, size, 0)
    (_, states), _ = _mask_infos(CAUSAL.visible, _Runs.of(where), 512, 512)
    counts = np.count_nonzero(states, axis=(1, 2))
    assert counts.min() == counts.max()
    in_order = Placement(2048 * np.arange(size)[:, None], 2048, 2048 * size)
    (_, states), _ = _mask_infos(CAUSAL.visible, _Runs.of(in_order), 512, 512)
    unbalanced = np.count_nonzero(states, axis=(1, 2))
    assert unbalanced.max() > 1.4 * counts.max()


def test_a_program_has_no_permute():
    """In a branch that some ranks take, all devices would wait for it."""
    attend = attention_on_mesh(
        partial(splash_kernel, interpret=True),
        Scores(window=100),
        GRANULARITY["splash"],
        by_rules(DEFAULT_RULES, "splash"),
    )
    x, documents = jnp.ones((1, 1024, 2, 32)), jnp.ones((1, 1024), jnp.int32)
    for function in (attend, splash_attention(DEFAULT_RULES, interpret=True)):
        with jax.set_mesh(make_mesh({"context": 4}, devices=jax.devices()[:4])):
            loss = lambda q, f=function: jnp.sum(f(q, x, x, documents))  # noqa: E731
            text = str(jax.make_jaxpr(jax.grad(loss))(x))
        assert "all_gather" in text
        assert "ppermute" not in text


@pytest.mark.parametrize("where", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_pairs_are_counted(where: Placement, scores: Scores):
    queries = jnp.asarray(where.starts[:, :, None, None] + np.arange(where.run)[:, None])
    seen = np.asarray(scores.visible(queries, jnp.arange(where.num_keys)))
    assert where.most_pairs(scores.visible) == seen.sum(axis=(1, 2, 3)).max()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("saved", "forwards"), [((), 2), (("context",), 1)])
def test_a_policy_that_saves_context_does_not_run_the_kernel_again(size, saved, forwards):
    attend = KERNELS["splash"](DEFAULT_RULES)
    x, documents = jnp.ones((1, 1024, 2, 32)), jnp.ones((1, 1024), jnp.int32)
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @partial(jax.checkpoint, policy=policy)
    def layer(w):
        return jnp.sin(attend(x @ w, jnp.cos(x @ w), jnp.sin(x @ w), documents)) @ w

    with jax.set_mesh(make_mesh({"context": size}, devices=jax.devices()[:size])):
        text = str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(layer(w))))(jnp.ones((32, 32))))
    assert text.count("name=splash_mha_fwd") == forwards


@pytest.mark.parametrize("kernel", ["cudnn", "splash"])
def test_latent_attention_on_slices(kernel: str):
    """Its keys are computed from narrow vectors, and its values are narrower than keys."""
    config = small_deepseek_v2(
        base_num_query_heads=2, q_lora_rank=12, qk_nope_head_dim=48, qk_rope_head_dim=16,
        v_head_dim=32,
    )  # fmt: skip
    tree = latent_attention_weights(config.attention, branches=2, dtype=jnp.float32)
    w, place = initialize(tree, jax.random.key(0)), jnp.arange(1024, dtype=jnp.int32)[None]
    x = jax.random.normal(jax.random.key(1), (1, 1024, config.base_emb_dim))
    batch_inputs = {"positions": place % 600, "segment_ids": place // 600}

    def gradients(attention, constrain=no_constraint):
        attend = latent_attention(config.attention, attention=attention, constrain=constrain)

        def loss(w, x):
            y = attend(w, x, batch_inputs)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(w, x)

    true = gradients(partial(written_out, scores=CAUSAL))
    with jax.set_mesh(make_mesh({"context": 2}, devices=jax.devices()[:2])):
        on_slices = gradients(KERNELS[kernel](DEFAULT_RULES), Constrain())
    for (path, leaf), expected in zip(
        jax.tree_util.tree_leaves_with_path(on_slices), jax.tree.leaves(true), strict=True
    ):
        assert_close(leaf, expected, jax.tree_util.keystr(path))
