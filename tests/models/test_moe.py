"""Mixtures of experts against a loop over tokens and experts, on one device and on meshes."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from harness.contract import assert_close
from jaxpipe import _compat, sharding
from jaxpipe.autodiff import remat_by_name
from jaxpipe.models import DeepseekConfig, initialize, logical_axes
from jaxpipe.models.layers import (
    RouterSettings,
    _router,
    megablox,
    moe,
    moe_weights,
    num_chunks,
    pallas_gpu_grouped_matmul,
    ragged_dot,
    route,
    routed_experts,
    sort_and_multiply,
)
from small_models import small_deepseek_v2

ROWS, LENGTH = 4, 6
V2 = small_deepseek_v2(
    num_experts=8,
    num_experts_per_tok=3,
    shared_experts=2,
    routed_scaling_factor=1.5,
    load_balance_loss_weight=0.3,
)
V3 = dataclasses.replace(
    V2,
    routed_score_func="sigmoid",
    routed_bias=True,
    norm_topk_prob=True,
    n_routing_groups=4,
    topk_routing_group=2,
)
V2_IN_GROUPS = dataclasses.replace(
    V2, n_routing_groups=4, topk_routing_group=2, group_score_experts=1
)


def weights_of(config: DeepseekConfig) -> Any:
    tree = moe_weights(config.moe, branches=1, dtype=jnp.float32)
    weights = initialize(tree, jax.random.key(0))
    if config.routed_bias:
        bias = 0.1 * jax.random.normal(jax.random.key(5), (config.num_experts,))
        weights["router"]["bias"] = bias
    return weights


def inputs() -> tuple[jax.Array, dict[str, jax.Array]]:
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, 16))
    segments = jnp.ones((ROWS, LENGTH), jnp.int32).at[1, 4:].set(0).at[3].set(0)
    target_weights = jnp.where(segments > 0, 0.02, 0.0)
    return x, {"segment_ids": segments, "target_weights": target_weights}


def swiglu(w, x):
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def at(index, tree):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def scores_of(config: DeepseekConfig, w, token) -> jax.Array:
    logits = token @ w["router"]["logits"]
    return (
        jax.nn.softmax(logits) if config.routed_score_func == "softmax" else jax.nn.sigmoid(logits)
    )


def choices(config: DeepseekConfig, w, x) -> dict[tuple[int, int], list[int]]:
    """The experts of every token, by sorting."""
    size = config.num_experts // config.n_routing_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.n_routing_groups)]
    chosen, best_of = {}, config.group_score_experts
    for b, t in np.ndindex(ROWS, LENGTH):
        ranked = np.asarray(scores_of(config, w, x[b, t]) + w["router"].get("bias", 0.0))
        best = sorted(groups, key=lambda group: -sum(sorted(ranked[list(group)])[-best_of:]))
        kept = [e for group in best[: config.topk_routing_group] for e in group]
        chosen[b, t] = sorted(kept, key=lambda e: -ranked[e])[: config.num_experts_per_tok]
    return chosen


def loads(config: DeepseekConfig, chosen, batch_inputs) -> np.ndarray:
    """[E] the share of each expert in all choices that are not of padding."""
    counts, segments = np.zeros(config.num_experts), np.asarray(batch_inputs["segment_ids"])
    for place, experts in chosen.items():
        counts[experts] += segments[place] > 0
    return (counts / counts.sum()).astype(np.float32)


def obvious(config: DeepseekConfig, w, x, batch_inputs, chosen) -> tuple[jax.Array, jax.Array]:
    """(y, load-balance loss), token by token and expert by expert."""
    rows, chances, segments = [], [], np.asarray(batch_inputs["segment_ids"])
    for place, experts in chosen.items():
        token, scores = x[place], scores_of(config, w, x[place])
        total = sum(scores[e] for e in experts) if config.norm_topk_prob else 1.0
        y = swiglu(w["shared"], token)
        for e in experts:
            share = config.routed_scaling_factor * scores[e] / total
            y += share * swiglu(at(e, w["experts"]), token)
        rows.append(y)
        if segments[place]:
            chances.append(scores / jnp.sum(scores))
    means = jnp.mean(jnp.stack(chances), axis=0)
    balance = config.num_experts * jnp.sum(loads(config, chosen, batch_inputs) * means)
    share = jnp.sum(batch_inputs["target_weights"])
    return jnp.stack(rows).reshape(x.shape), config.load_balance_loss_weight * share * balance


def values_and_gradients(f, w, x):
    """Of the outputs and the loss that `f(w, x)` returns."""

    def loss(w, x):
        y, balance = f(w, x)
        return jnp.sum(jnp.sin(y)) + balance, (y, balance)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, x)


def computed(config: DeepseekConfig, w, x, batch_inputs, *, constrain, experts):
    def f(w, x):
        y, aux = moe(config.moe, experts=experts, constrain=constrain)(w, x, batch_inputs)
        return y, aux["loss"]

    return jax.jit(lambda w, x: values_and_gradients(f, w, x))(w, x)


def plain(config: DeepseekConfig, w, x, batch_inputs, grouped_matmul=ragged_dot):
    experts = routed_experts(sharding.DEFAULT_RULES, grouped_matmul)
    constrain = sharding.no_constraint
    return computed(config, w, x, batch_inputs, constrain=constrain, experts=experts)


def assert_all_close(tree, true):
    leaves = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(true), strict=True)
    for (path, leaf), expected in leaves:
        assert_close(leaf, expected, jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    "config",
    [*(pytest.param(c, marks=pytest.mark.slow) for c in (V2, V2_IN_GROUPS)), V3],
    ids=["V2", "V2 in groups", "V3"],
)
def test_a_mixture_and_its_gradients_are_those_of_a_loop_over_tokens_and_experts(config):
    w, (x, batch_inputs) = weights_of(config), inputs()
    chosen = choices(config, w, x)
    result = plain(config, w, x, batch_inputs)
    true = jax.jit(
        lambda w, x: values_and_gradients(
            lambda w, x: obvious(config, w, x, batch_inputs, chosen), w, x
        )
    )(w, x)
    if config.routed_bias:
        surplus = np.sum(batch_inputs["target_weights"]) * (
            loads(config, chosen, batch_inputs) - 1 / 8
        )
        assert not true[1][0]["router"]["bias"].any(), "the loss does not depend on the bias"
        true[1][0]["router"]["bias"] = surplus
    assert_all_close(result, true)


@pytest.mark.parametrize(
    "axes",
    [
        {"expert": 2},
        {"expert": 4, "tensor": 2},
        {"data": 2, "expert": 2, "tensor": 2},
        {"fsdp": 4, "tensor": 2},
        {"fsdp": 2, "expert": 2},
        {"context": 2, "expert": 2, "tensor": 2},
    ],
    ids=str,
)
def test_a_mixture_on_a_mesh_is_that_of_one_device(axes: dict[str, int]):
    w, (x, batch_inputs) = weights_of(V3), inputs()
    on_mesh = {"constrain": sharding.Constrain(), "rules": sharding.DEFAULT_RULES}
    assert_all_close(meshed(axes, w, x, batch_inputs, **on_mesh), plain(V3, w, x, batch_inputs))


def test_a_mixture_whose_rules_split_nothing_but_experts_is_that_of_one_device():
    w, (x, batch_inputs) = weights_of(V3), inputs()
    rules = sharding.override_rules((("activation_batch", ()), ("mlp", ()), ("activation_mlp", ())))
    on_mesh = {"constrain": sharding.Constrain(rules), "rules": rules}
    axes = {"data": 2, "expert": 2, "tensor": 2}
    assert_all_close(meshed(axes, w, x, batch_inputs, **on_mesh), plain(V3, w, x, batch_inputs))


@pytest.mark.parametrize("axes", [{}, {"expert": 2, "tensor": 2}], ids=str)
def test_a_mixture_that_runs_chunks_of_tokens_is_that_of_all_at_a_time(axes: dict[str, int]):
    w, (x, batch_inputs) = weights_of(V3), inputs()
    on_mesh = {"constrain": sharding.Constrain(), "rules": sharding.DEFAULT_RULES}
    result = meshed(axes, w, x, batch_inputs, **on_mesh, chunk_rows=2)
    assert_all_close(result, plain(V3, w, x, batch_inputs))


def test_chunks_are_equal_and_no_more_than_are_wanted():
    assert [num_chunks(64, most) for most in (0, 1, 3, 4, 100)] == [1, 1, 2, 4, 64]
    assert [num_chunks(tokens, 100) for tokens in (1, 6, 12, 24)] == [1, 2, 4, 8]


def meshed(axes, w, x, batch_inputs, *, constrain, rules, chunk_rows=None):
    mesh = sharding.make_mesh(axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    logical = moe_weights(V3.moe, branches=1, dtype=jnp.float32)
    w = jax.device_put(w, sharding.named_shardings(w, logical_axes(logical), mesh, rules))
    with jax.set_mesh(mesh):
        experts = routed_experts(rules, chunk_rows=chunk_rows)
        return computed(V3, w, x, batch_inputs, constrain=constrain, experts=experts)


@pytest.mark.parametrize("remat", [False, True])
def test_a_mixture_inside_a_pipeline_is_that_of_one_device(remat: bool):
    """Two ranks, each with its own mixture; the batch's loss is the sum of theirs."""
    (x, batch_inputs), weights = inputs(), [weights_of(V3), jax.tree.map(jnp.sin, weights_of(V3))]
    mesh = sharding.make_mesh({"stage": 2, "expert": 2, "tensor": 2})
    experts = routed_experts(sharding.DEFAULT_RULES)
    mix = moe(V3.moe, experts=experts, constrain=sharding.Constrain())

    def rank(w, x):
        x = jax.lax.pcast(x, "stage", to="varying")
        w = jax.tree.map(lambda leaf: leaf[0], w)
        y, aux = (jax.checkpoint(mix) if remat else mix)(w, x, batch_inputs)
        assert jax.typeof(y) == jax.typeof(x), "it must vary over the ranks as x does"
        return y[None], jax.lax.psum(aux["loss"], "stage")

    in_pipeline = jax.shard_map(
        rank, axis_names={"stage"}, in_specs=(P("stage"), P()), out_specs=(P("stage"), P())
    )
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    with jax.set_mesh(mesh):
        result = jax.jit(lambda w, x: values_and_gradients(in_pipeline, w, x))(stacked, x)
    (loss, (y, _)), (of_weights, of_x) = result
    true = [plain(V3, w, x, batch_inputs) for w in weights]
    assert_close(loss, sum(t[0][0] for t in true), "loss")
    assert_close(y, jnp.stack([t[0][1][0] for t in true]), "outputs")
    assert_close(of_x, sum(t[1][1] for t in true), "gradient of x")
    for rank_index, t in enumerate(true):
        assert_all_close(at(rank_index, of_weights), t[1][0])


# JAX's kernel mixes booleans and integers in its backward, hence the standard promotion below.
KERNELS = {
    "xla": ragged_dot,
    "megablox": megablox(interpret=True),
    "gpu": pallas_gpu_grouped_matmul(interpret=True),
}
SIZES = [[7, 0, 5, 3], [0, 0, 0, 0], [0, 30, 0, 0], [8, 8, 8, 6]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_a_grouped_matmul_and_its_gradients_are_those_of_a_loop_over_groups(kernel, sizes):
    rows = jax.random.normal(jax.random.key(0), (30, 16))
    weights = jax.random.normal(jax.random.key(1), (4, 16, 24))
    cuts = np.cumsum([0, *sizes])
    end = cuts[-1]
    # What rows without a group hold, and the gradients of their results, must change nothing else.
    rows = rows.at[end:].set(jnp.nan)

    def loop(rows, weights):
        parts = [rows[cuts[g] : cuts[g + 1]] @ weights[g] for g in range(4)]
        return jnp.concatenate([*parts, jnp.zeros((30 - end, 24))])

    @partial(jax.jit, static_argnums=0)
    def run(f, rows, weights):
        out, pull_back = jax.vjp(f, rows, weights)
        of_rows, of_weights = pull_back((jnp.cos(out) + 1).at[end:].set(jnp.nan))
        return out[:end], of_rows[:end], of_weights

    def grouped(rows, weights):
        return kernel(rows, weights, jnp.array(sizes, jnp.int32))

    with jax.numpy_dtype_promotion("standard"):
        result = run(grouped, rows, weights)
    for leaf, true in zip(result, run(loop, rows, weights), strict=True):
        np.testing.assert_allclose(leaf, true, rtol=1e-5, atol=1e-5 * np.abs(true).max(initial=0))


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, 0), (2, 1, None)], ids=str)
def test_a_ragged_dot_can_be_vmapped_over_any_of_its_arguments(mapped):
    shapes = (30, 16), (4, 16, 24)
    keys = jax.random.split(jax.random.key(0))
    rows, weights = (
        jax.random.normal(key, shape if dim is None else (*shape[:dim], 3, *shape[dim:]))
        for key, shape, dim in zip(keys, shapes, mapped, strict=False)
    )
    sizes = jnp.array([[7, 0, 5, 3], [0, 30, 0, 0], [8, 8, 8, 6]], jnp.int32)
    sizes = sizes if mapped[2] == 0 else sizes[0]

    def gradients(rows, weights, sizes):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(ragged_dot(x[0], x[1], sizes))), (0, 1))(
            rows, weights
        )

    result = jax.jit(jax.vmap(gradients, in_axes=mapped))(rows, weights, sizes)
    for i in range(3):
        one = (
            x if dim is None else jnp.take(x, i, axis=dim)
            for x, dim in zip((rows, weights, sizes), mapped, strict=True)
        )
        assert_all_close(at(i, result), gradients(*one))


KERNELS = {
    "ragged_dot": ragged_dot,
    "megablox": megablox(interpret=True),
    "gpu": pallas_gpu_grouped_matmul(interpret=True),
}


@pytest.mark.parametrize("chunk_rows", [None, 2], ids=["all at a time", "chunks"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_add_gradients_of_chunks_as_a_loop_over_experts_does(kernel, chunk_rows):
    shapes = {"gate": (4, 16, 24), "up": (4, 16, 24), "down": (4, 24, 16)}
    shapes |= {"gate_bias": (4, 24), "up_bias": (4, 24), "shares": (ROWS, LENGTH, 2)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    w = {
        name: jax.random.normal(key, shape) / 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    shares, (x, _) = jax.nn.softmax(w.pop("shares")), inputs()
    chosen = jax.random.randint(jax.random.key(1), shares.shape, 0, 3)  # nobody chooses the last
    experts = routed_experts(sharding.DEFAULT_RULES, KERNELS[kernel], chunk_rows=chunk_rows)

    def loop(w, x, shares):
        total = jnp.zeros_like(x)
        for e in range(4):
            gate, up = (x @ w[name][e] + w[f"{name}_bias"][e] for name in ("gate", "up"))
            share = jnp.sum(jnp.where(chosen == e, shares, 0), axis=-1, keepdims=True)
            total += share * (jax.nn.silu(gate) * up @ w["down"][e])
        return total

    def gradients(f):
        loss = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2))
        return jax.jit(loss)(w, x, shares)

    with jax.numpy_dtype_promotion("standard"):
        result = gradients(lambda w, x, shares: experts(w, x, chosen, shares))
    assert_all_close(result, gradients(loop))


def test_megablox_works_on_shards_inside_a_pipeline():
    w, (x, batch_inputs) = weights_of(V3), inputs()
    mesh = sharding.make_mesh({"stage": 2, "expert": 2}, devices=jax.devices()[:4])
    experts = routed_experts(sharding.DEFAULT_RULES, megablox(interpret=True))
    mix = moe(V3.moe, experts=experts, constrain=sharding.Constrain())

    def rank(w, x):
        w, x = jax.lax.pcast((w, x), "stage", to="varying")
        y, aux = mix(w, x, batch_inputs)
        return jax.lax.pmean(y, "stage"), jax.lax.pmean(aux["loss"], "stage")

    in_pipeline = jax.shard_map(rank, axis_names={"stage"}, in_specs=P(), out_specs=P())
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        result = jax.jit(lambda w, x: values_and_gradients(in_pipeline, w, x))(w, x)
    assert_all_close(result, plain(V3, w, x, batch_inputs))


def test_devices_exchange_one_vector_per_layer_and_nothing_outside_of_the_loop_over_layers():
    """XLA:CPU runs a collective that needs no result of a loop at the same time as those in it."""
    w, (x, batch_inputs) = weights_of(V3), inputs()
    mix = moe(
        V3.moe, experts=routed_experts(sharding.DEFAULT_RULES), constrain=sharding.no_constraint
    )
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)

    def rank(w, x, batch_inputs):
        def loss(w, x):
            y, aux = jax.lax.scan(jax.checkpoint(lambda x, w: mix(w, x, batch_inputs)), x, w)
            return jnp.sum(y) + jnp.sum(aux["loss"])

        w = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "fsdp", to="varying"), w)
        return jax.tree.map(lambda g: g[None], jax.grad(loss, argnums=(0, 1))(w, x))

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("fsdp",), auto, devices=jax.devices()[:2])
    rows = P("fsdp")
    run = jax.shard_map(
        rank, mesh=mesh, axis_names={"fsdp"}, in_specs=(P(), rows, rows), out_specs=rows
    )
    assert collectives(jax.make_jaxpr(run)(stacked, x, batch_inputs).jaxpr) == ["scan"] * 2


def collectives(jaxpr: Any, inside: str = "") -> list[str]:
    """Returns for every sum over devices the innermost loop that it is in."""
    found = []
    for eqn in jaxpr.eqns:
        found += [inside] * eqn.primitive.name.startswith("psum")
        loop = eqn.primitive.name if eqn.primitive.name in ("scan", "while") else inside
        for inner in jaxprs_in_params(eqn.params):
            found += collectives(inner, loop)
    return found


def test_no_token_is_dropped_when_all_choose_one_expert():
    w, (x, _) = weights_of(V2)["experts"], inputs()
    rows = x.reshape(-1, 16)
    chosen, shares = jnp.full((24, 1), 5), jnp.ones((24, 1))
    expected = swiglu(at(5, w), rows)
    assert_close(sort_and_multiply(ragged_dot, w, rows, chosen, shares), expected, "rows")


def routed(logits, bias=None, real=None, **changes):
    options = {"score_func": "sigmoid", "num_chosen": 2, "normalized": True}
    real = jnp.ones(logits.shape[:2], bool) if real is None else real
    return route(logits, bias, real, jnp.float32(1), RouterSettings(**(options | changes)))


def test_balance_is_1_for_equal_experts_and_their_number_if_one_has_all():
    even = jnp.where(jnp.eye(4)[None] > 0, 20.0, -20.0)
    one = jnp.where(jnp.arange(4) == 2, 20.0, -20.0) * jnp.ones((1, 4, 1))
    softmax = {"score_func": "softmax", "num_chosen": 1}
    np.testing.assert_allclose(routed(even, **softmax).balance, 1.0, rtol=1e-5)
    np.testing.assert_allclose(routed(one, **softmax).balance, 4.0, rtol=1e-5)
    np.testing.assert_allclose(routed(one, **softmax).load, [0, 0, 1, 0])


def test_the_bias_changes_the_choice_but_not_the_scores():
    logits = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
    free = routed(logits, normalized=False)
    steered = routed(logits, jnp.array([-9.0, 0.0, 0.0, 9.0]), normalized=False)
    assert free.chosen.tolist() == [[[0, 1]]]
    assert steered.chosen.tolist() == [[[3, 1]]]
    np.testing.assert_allclose(steered.shares[0, 0], jax.nn.sigmoid(jnp.array([-1.0, 1.0])))


def test_a_microbatch_of_padding_alone_has_no_load_and_no_balance():
    routing = routed(jnp.ones((1, 3, 4)), real=jnp.zeros((1, 3), bool))
    assert routing.balance == 0
    assert not routing.load.any()


def test_a_sort_finds_the_best_experts_as_top_k_does(monkeypatch):
    """Ties included: the first of equal scores is better."""
    scores = jax.random.normal(jax.random.key(0), (3, 16, 4, 8)).round(1) + 0.0
    found = _router._best(scores, 3)
    monkeypatch.setattr(_compat, "platform", lambda: "gpu")
    for one, other in zip(found, _router._best(scores, 3), strict=True):
        np.testing.assert_array_equal(one, other)


def test_bfloat16_mixtures_route_in_float32():
    w, (x, batch_inputs) = weights_of(V3), inputs()
    mix = moe(
        V3.moe, experts=routed_experts(sharding.DEFAULT_RULES), constrain=sharding.no_constraint
    )
    half = x.astype(jnp.bfloat16)
    y, aux = jax.jit(mix)(w, half, batch_inputs)
    true, true_aux = jax.jit(mix)(w, half.astype(jnp.float32), batch_inputs)
    assert y.dtype == jnp.bfloat16
    assert aux["loss"].dtype == jnp.float32
    np.testing.assert_array_equal(aux["loss"], true_aux["loss"])
    assert jnp.max(jnp.abs(y.astype(jnp.float32) - true)) < 0.02 * jnp.max(jnp.abs(true))


def expert_flops(axes: dict[str, int], count: int) -> float:
    """Of one device's program for the routed experts, by XLA's count."""
    mesh = sharding.make_mesh(axes, devices=jax.devices()[:count])
    w, (x, _) = weights_of(V2)["experts"], inputs()
    experts = routed_experts(sharding.DEFAULT_RULES)
    chosen = jnp.zeros((ROWS, LENGTH, 3), jnp.int32)
    with jax.set_mesh(mesh):
        run = jax.jit(experts).lower(w, x, chosen, chosen.astype(jnp.float32))
        analysis = run.compile().cost_analysis()
    assert analysis is not None
    return analysis["flops"]


@pytest.mark.parametrize("axis", ["expert", "tensor", "fsdp"])
def test_every_device_does_its_share_of_the_experts_work(axis: str):
    share = expert_flops({axis: 4}, 4) / expert_flops({}, 1)
    assert 0.2 < share < 0.4, share


@pytest.mark.parametrize("policy", ["full", "save_out_proj", "minimal_offloaded"])
def test_a_backward_does_not_sum_over_devices_what_the_forward_has_summed(policy: str):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("fsdp",), auto, devices=jax.devices()[:2])

    def on_device(logits):
        def balance(logits):
            return routed(logits).balance

        loss, pull = jax.vjp(remat_by_name(policy)(balance), logits)
        return loss[None], pull(jnp.ones_like(loss))[0]

    both = jax.shard_map(on_device, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    program = jax.jit(both).lower(jnp.ones((4, 8, 8))).as_text()
    assert program.count("all_reduce") == 1
