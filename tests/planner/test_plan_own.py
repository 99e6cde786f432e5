"""Models of the user's own in the planner: what is traced, against XLA and hand arithmetic."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpipe as jp
from jaxpipe.linen import model as linen_model
from jaxpipe.nnx import model as nnx_model
from jaxpipe.planner import Tensor
from jaxpipe.schedules import FAMILIES

D, F, V, T, H, L = 512, 2048, 4096, 128, 4, 4
EXAMPLE = {"tokens": jax.ShapeDtypeStruct((4, T), jnp.int32)}
WEIGHTS = 3 * D * D + D * D + 2 * D * F
"""Of the products of a layer: queries, keys and values, the output of attention, and the MLP."""


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def loss(logits, batch):
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, batch["tokens"][..., None], -1))


def attend(qkv):
    q, k, v = (x.reshape(*x.shape[:2], H, D // H) for x in jnp.split(qkv, 3, axis=-1))
    shares = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", q, k), axis=-1)
    return jnp.einsum("bhts,bshc->bthc", shares, v).reshape(*qkv.shape[:2], D)


def plain(dtype: Any) -> tuple[jp.Model, Any]:
    def layer(w, x, batch):
        del batch
        x = x + attend(x @ w["qkv"].astype(x.dtype)) @ w["out"].astype(x.dtype)
        return x + jax.nn.gelu(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)

    model = jp.Model(
        embed=lambda w, batch: w[batch["tokens"]].astype(jnp.bfloat16),
        layer=layer,
        loss=lambda w, x, batch: loss(x @ w.astype(x.dtype), batch),
    )
    sizes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, F), "down": (F, D)}
    one = {name: shape(*dims, dtype=dtype) for name, dims in sizes.items()}
    head = shape(D, V, dtype=dtype)
    params = {"embed": shape(V, D, dtype=dtype), "layers": [one] * L, "head": head}
    return model, params


class Block(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        given: Any = {"dtype": jnp.bfloat16, "param_dtype": dtype, "use_bias": False, "rngs": rngs}
        self.qkv, self.out = nnx.Linear(D, 3 * D, **given), nnx.Linear(D, D, **given)
        self.up, self.down = nnx.Linear(D, F, **given), nnx.Linear(F, D, **given)

    def __call__(self, x):
        x = x + self.out(attend(self.qkv(x)))
        return x + self.down(jax.nn.gelu(self.up(x)))


class GPT(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        given: Any = {"dtype": jnp.bfloat16, "param_dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(V, D, **given)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(L)])
        self.head = nnx.Linear(D, V, use_bias=False, **given)

    def __call__(self, batch):
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_nnx(dtype: Any) -> tuple[jp.Model, Any]:
    gpt = nnx.eval_shape(lambda: GPT(dtype, nnx.Rngs(0)))
    model, params = nnx_model(gpt, layers="blocks", loss=loss, batch=EXAMPLE)
    return model, params


class LinenBlock(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        def dense(features: int):
            return nn.Dense(features, False, dtype=jnp.bfloat16, param_dtype=self.dtype)

        x = x + dense(D)(attend(dense(3 * D)(x)))
        return x + dense(D)(jax.nn.gelu(dense(F)(x)))


class LinenGPT(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, batch):
        x = nn.Embed(V, D, dtype=jnp.bfloat16, param_dtype=self.dtype)(batch["tokens"])
        for index in range(L):
            x = LinenBlock(self.dtype, name=f"block_{index}")(x)
        return nn.Dense(V, False, dtype=jnp.bfloat16, param_dtype=self.dtype)(x)


def of_linen(dtype: Any) -> tuple[jp.Model, Any]:
    gpt = LinenGPT(dtype)
    variables = jax.eval_shape(gpt.init, jax.random.key(0), EXAMPLE)
    model, params = linen_model(gpt, variables, loss=loss, batch=EXAMPLE)
    return model, params


@pytest.mark.parametrize("make", [plain, of_nnx, of_linen])
def test_the_products_of_a_layer_are_those_that_xla_counts(make: Callable):
    model, params = make(jnp.float32)
    plans = jp.plan(model, "v5p-8", 64, params=params, example=EXAMPLE, num_plans=1)
    work = plans.request.work
    assert work.parameters == L * WEIGHTS + 2 * V * D
    assert (work.hidden, work.vocab, plans.request.sequence) == (D, V, T)
    # Without a kernel all scores are computed, also those that the mask removes.
    counted = T * sum(2 * p.k * p.n * p.copies for p in work.layers[0].products)
    assert counted == 2 * T * WEIGHTS + 2 * 2 * T * T * D
    layers = model.to_groups(params)["layers"]
    row = {"tokens": shape(1, T, dtype=jnp.int32)}
    x, key = shape(1, T, D, dtype=jnp.bfloat16), jax.eval_shape(lambda: jax.random.key(0))
    layer: Any = model.layer
    xla = jax.jit(layer).lower(layers[0], x, row, key).cost_analysis() or {}
    assert counted == pytest.approx(xla["flops"], rel=0.02)  # which counts softmax and gelu too


@pytest.mark.parametrize("make", [plain, of_nnx, of_linen])
def test_weights_count_in_their_own_dtypes(make: Callable):
    found = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        model, params = make(dtype)
        given = {"params": params, "example": EXAMPLE, "num_plans": 1, "max_stages": 1}
        plans = jp.plan(model, "v5p-8", 64, **given)
        found[dtype] = plans.best, plans.request
    (wide, request), (narrow, halved) = found[jnp.float32], found[jnp.bfloat16]
    shards = wide.candidate.num_shards if wide.candidate.gathers else 1
    assert wide.memory.weights == 4 * (L * WEIGHTS + 2 * V * D) / shards
    assert wide.memory.optimizer == 2 * wide.memory.weights
    assert narrow.candidate == wide.candidate
    assert narrow.memory.weights == wide.memory.weights / 2
    assert narrow.memory.optimizer == wide.memory.optimizer / 2
    # Sums of gradients are in float32 for both, and activations in bfloat16.
    assert request.model.of_layers.gradient == halved.model.of_layers.gradient == 4
    assert request.model.activation_bytes == halved.model.activation_bytes == 2
    each = [one.work.layers[0] for one in (request, halved)]
    # Layers read a cast of either, and gather that.
    assert [layer.weight_bytes for layer in each] == [2, 2]
    assert [layer.boundary_bytes for layer in each] == [2 * D, 2 * D]


def small(num_layers: int = 4) -> tuple[jp.Model, Any]:
    model = jp.Model(
        embed=lambda w, batch: batch["x"] @ w,
        layer=lambda w, x, batch: x + jnp.tanh(x @ w),
        loss=lambda w, x, batch: jnp.mean(x @ w),
    )
    one, two, three = jax.random.split(jax.random.key(1), 3)
    params = {
        "embed": jax.random.normal(one, (16, 16)) / 4,
        "layers": jax.random.normal(two, (num_layers, 16, 16)) / 4,
        "head": jax.random.normal(three, (16,)) / 4,
    }
    return model, params


def test_a_small_model_is_shown_in_megabytes():
    model, params = small()
    shown = str(jp.plan(model, "v5p-8", params=params, example={"x": jnp.ones((8, 16))}))
    assert shown.startswith("own model, 1,296 parameters, on v5p-8")
    assert "\nMB  weights" in shown


def test_the_schedule_of_a_given_mesh_is_planned():
    model, params = plain(jnp.float32)
    given = {"params": params, "example": EXAMPLE}
    fixed = {"mesh": {"stage": 2, "fsdp": 4}, "microbatches": 8}
    plans = jp.plan(model, "v5p-16", 64, **given, **fixed)
    for plan in plans.plans:
        assert plan.settings["mesh"] == fixed["mesh"] and plan.settings["microbatches"] == 8
    assert len({plan.settings["schedule"] for plan in plans.plans}) > 1
    with pytest.raises(ValueError, match=r"microbatches=8\)\.pipeline\(\)` is the fastest"):
        jp.pipeline(model, schedule="auto", mesh=jp.make_mesh(fixed["mesh"]), microbatches=8)
    with pytest.raises(ValueError, match=r"knows the axes data, .* tensor, expert: .* context"):
        jp.plan(model, "v5p-16", 64, **given, mesh={"stage": 4, "context": 2})


@pytest.mark.parametrize("devices", ["here", "h100:4"])
def test_the_pipeline_of_a_plan_computes_what_the_plain_program_does(devices: str):
    model, params = small()
    batch = {"x": jax.random.normal(jax.random.key(0), (16, 16))}
    given = {"params": params, "example": batch, "microbatches": 4}
    size = jax.device_count() if devices == "here" else 4
    plans = jp.plan(model, devices, mesh={"stage": 2, "fsdp": size // 2}, **given)
    pipe = plans.pipeline()
    assert (pipe.mesh.shape["stage"], pipe.mesh.shape["fsdp"]) == (2, size // 2)
    pipe.check(params, batch)


def test_a_plan_for_more_devices_than_are_here_refuses_to_make_a_pipeline():
    model, params = small()
    batch = {"x": jnp.zeros((16, 16))}
    with pytest.raises(ValueError, match=r"for v5p-64, 32 devices, and 8 are here"):
        jp.plan(model, "v5p-64", 32, params=params, example=batch).pipeline()


def test_a_plan_of_a_preset_refuses_to_make_a_pipeline():
    with pytest.raises(ValueError, match=r"llama-tiny, which `jaxpipe train` runs"):
        jp.plan("llama-tiny", "v5p-8", 8, 64).pipeline()


def test_what_a_layer_stores_is_that_of_rows_and_not_of_weights():
    """A token has x, tanh and its derivative; casts of weights are not of tokens."""

    def layer(w, x, batch):
        del batch
        return x + jnp.tanh(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)

    model = jp.Model(
        embed=lambda w, batch: w[batch["tokens"]].astype(jnp.bfloat16),
        layer=layer,
        loss=lambda w, x, batch: loss(x @ w.astype(x.dtype), batch),
    )
    params = {
        "embed": shape(V, D),
        "layers": [{"up": shape(D, F), "down": shape(F, D)}] * L,
        "head": shape(D, V),
    }
    given = {"params": params, "example": EXAMPLE, "num_plans": 1}
    plans = jp.plan(model, "v5p-8", 64, **given, mesh={"fsdp": 4}, microbatches=1)
    (stored,) = plans.request.model.saved("none")
    assert stored.channels == D + 2 * F


@pytest.mark.parametrize("schedule", [n for n, f in FAMILIES.items() if "slices" not in f.takes])
def test_every_family_can_be_planned(schedule: str):
    """Also those that have two stages on each rank and take no `chunks`."""
    model, params = small(num_layers=8)
    given: dict[str, Any] = {"params": params, "example": {"x": shape(16, 16)}, "num_plans": 1}
    plans = jp.plan(model, "here", 32, **given, mesh={"stage": 4, "data": 2}, schedule=schedule)
    assert plans.best.settings["schedule"] == schedule
    assert plans.pipeline().mesh.shape["stage"] == 4


def test_options_of_engines_are_kept():
    model, params = small(num_layers=8)
    given: dict[str, Any] = {"params": params, "example": {"x": shape(16, 16)}, "num_plans": 1}
    given |= {"mesh": {"stage": 4, "data": 2}, "chunks": 2, "microbatches": 8}
    plain = jp.plan(model, "here", 32, **given, schedule="circular").best
    plans = jp.plan(model, "here", 32, **given, forwarding_delay=True, reduce_dtype="bfloat16")
    assert plans.best.settings["schedule"] == "circular"
    assert plans.best.settings["reduce_dtype"] == "bfloat16"
    assert plans.best.time.parts["bubble"] != plain.time.parts["bubble"]
    pipe, rows = plans.pipeline(), jax.random.normal(jax.random.key(2), (32, 16))
    value, _ = pipe.jit(pipe.value)(pipe.shard(params), {"x": rows})
    x = rows @ params["embed"]
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    assert value == pytest.approx(float(jnp.mean(x @ params["head"])), rel=1e-5)


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"schedule": "1f1b"},
        {"engine": "mpmd"},
        {"engine": "scheduled", "schedule": "circular"},
        {"gather": "once"},
        {"remat": "full"},
        {"layer_remat": "full", "accumulate": 2},
        {"remat": "none", "layer_remat": "none", "scan_layers": 1},
    ],
)
def test_settings_of_a_plan_keep_what_is_given_and_give_the_plan_back(choice: dict[str, Any]):
    model, params = small(num_layers=10)
    given: dict[str, Any] = {"params": params, "example": {"x": shape(16, 16)}, "num_plans": 12}
    plans = jp.plan(model, "here", 64, **given, **choice)
    engines = {plan.settings.get("engine") for plan in plans.plans}
    assert "engine" in choice or choice == {"gather": "once"} or "mpmd" in engines
    for plan in plans.plans:
        assert choice.items() <= plan.settings.items()
        again = jp.plan(model, "here", 64, **given, **plan.settings).best
        assert again.candidate == plan.candidate and again.time == plan.time


def test_choices_that_contradict_or_are_unknown_are_named():
    model, params = small()
    given: dict[str, Any] = {"params": params, "example": {"x": shape(16, 16)}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"engine": "spmd"}, "`engine` is 'spmd'. Give 'auto' or one of unpipelined, circular"),
        ({"engine": "circular", "schedule": "zbv"}, "`engine` is 'circular', which does not run"),
        ({"gather": "never"}, "`gather` is 'never'. Give one of 'tick', 'repeat'"),
        ({"gather": "once", "engine": "mpmd"}, "`gather` is not read by 'unpipelined', 'mpmd'"),
        ({"remat": "save_out_proj"}, "`remat` is 'save_out_proj'. Of a model of your own"),
        ({"accumulate": 0}, "`accumulate` is 0. Give a number above 0"),
        ({"dcn": {"stage": 2}}, "`dcn` has 2 along 'stage', and `num_slices` is 1"),
        ({"mesh": 8}, "`mesh` is 8. Give the sizes of its axes by name"),
        ({"memory_gb": 0}, "`memory_gb` is 0. Give a number above 0"),
        ({"num_plans": 0}, "`num_plans` is 0. Give a number above 0"),
        ({"max_stages": 0}, "`max_stages` is 0. Give a number above 0"),
        ({"schedule": "zbv", "chunks": 3}, "There are layouts without schedule zbv or chunks 3:"),
    ]
    for choice, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            jp.plan(model, "here", 32, **given, **choice)


def test_defaults_and_a_mesh_of_devices_may_be_given():
    model, params = small()
    given: dict[str, Any] = {"params": params, "example": {"x": shape(16, 16)}, "num_plans": 1}
    off: dict[str, Any] = {"zero1": False, "vocab_parallel": False, "forwarding_delay": False}
    mesh = jp.make_mesh({"stage": 2, "data": 4})
    plan = jp.plan(model, "here", 32, **given, mesh=mesh, engine="mpmd", **off).best
    assert plan.settings["engine"] == "mpmd" and plan.settings["mesh"] == {"stage": 2, "data": 4}


def test_a_loss_that_ranks_can_share_is_planned_on_all_of_them():
    """For a model without such a loss the engine refuses it, and no plan has it."""
    model, params = plain(jnp.bfloat16)
    given: dict[str, Any] = {"params": params, "example": EXAMPLE, "num_plans": 20}
    given |= {"mesh": {"stage": 4}, "microbatches": 8}

    def shares(model: jp.Model) -> set[bool]:
        plans = jp.plan(model, "v5p-8", 64, **given).plans
        return {plan.settings.get("vocab_parallel", False) for plan in plans}

    def on_ranks(w, x, batch, axis):
        return jp.vocab_parallel_cross_entropy(x, w, batch["tokens"], axis).mean()

    assert shares(model) == {False}
    assert shares(replace(model, vocab_parallel_loss=on_ranks)) == {False, True}


def test_zero1_may_be_given_where_nothing_divides_over_data():
    model, params = small()
    given: dict[str, Any] = {"params": params, "example": {"x": shape(16, 16)}, "num_plans": 1}
    plans = jp.plan(model, "here", 32, **given, zero1=True, mesh={"stage": 4, "fsdp": 2})
    assert plans.best.settings["zero1"] and plans.pipeline().mesh.shape["data"] == 1


def test_an_unknown_schedule_is_named():
    model, params = small()
    given: dict[str, Any] = {"params": params, "example": {"x": shape(16, 16)}}
    with pytest.raises(ValueError, match=r"^There is no schedule 'zbw'\. Did you mean 'zbv'"):
        jp.plan(model, "here", 32, **given, schedule="zbw")


def test_a_plan_is_verified_with_its_optimizer():
    """The arguments of the step that is compiled are weights, two moments of each, and rows."""
    model, params = plain(jnp.float32)
    example = {"tokens": shape(1, T, dtype=jnp.int32)}
    fixed = {"mesh": {"stage": 4, "fsdp": 2}, "microbatches": 4, "schedule": "1f1b"}
    plans = jp.plan(model, "here", 8, params=params, example=example, num_plans=1, **fixed)
    found = plans.verify()
    memory = plans.best.memory
    assert found.peak_bytes > memory.weights + memory.optimizer
    assert found.step_seconds is None
    assert "compiled" in repr(found)


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_zero1_divides_the_state_as_the_pipeline_of_the_plan_does(schedule: str | None):
    """The bytes of two moments on the first device, of arrays that the optimizer has made."""
    model, params = small()
    example = {"x": shape(16, 16)}
    mesh = {"stage": 2 if schedule else 1, "data": 4 if schedule else 8}
    given: dict[str, Any] = {"params": params, "example": example, "microbatches": 2, "mesh": mesh}
    given["engine"] = "scheduled" if schedule else "unpipelined"
    plan = jp.plan(model, "here", **given, schedule=schedule).best
    assert plan.settings["zero1"]
    pipe = jp.plan(model, "here", **given, schedule=schedule).pipeline()
    values = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), params)
    state = pipe.optimizer(optax.adam(1e-3)).init(pipe.shard(values))
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(state) if x.ndim]
    assert sum(x.nbytes for x in shards) == plan.memory.optimizer
    whole = jp.plan(model, "here", **given, schedule=schedule, zero1=False).best
    assert whole.memory.optimizer == mesh["data"] * plan.memory.optimizer


def test_what_slices_carry_counts():
    """Keys and values of a token, of each layer of a stage and each microbatch in flight."""

    def layer(w, x, batch, past):
        del batch
        (keys, values), past = past.append((x @ w["k"], x @ w["v"]))
        scores = jnp.where(past.causal_mask(x.shape[1]), x @ keys.mT, -1e9)
        return x + jax.nn.softmax(scores) @ values, past

    one = {"k": shape(D, D), "v": shape(D, D)}
    model = jp.Model(
        lambda w, batch: w[batch["tokens"]], layer, lambda w, x, batch: loss(x @ w, batch)
    )
    params = {"embed": shape(V, D), "layers": [one] * L, "head": shape(D, V)}
    given: dict[str, Any] = {"params": params, "example": EXAMPLE, "mesh": {"stage": 4}}
    plans = jp.plan(model, "v5p-8", 8, **given, microbatches=8, schedule="seq1f1b", slices=2)
    assert plans.best.settings["schedule"] == "seq1f1b"
    assert plans.best.settings["slices"] == 2
    assert plans.request.model.past == Tensor(2 * D)
    model, given["params"] = plain(jnp.float32)
    with pytest.raises(ValueError, match="no parameter `past`"):
        jp.plan(model, "v5p-8", 8, **given, schedule="seq1f1b")
