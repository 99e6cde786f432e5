"""Own models whose sequences are divided over `context`, against the plain program."""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from harness.contract import assert_close
from jaxpipe.kernels import trace_to_read

H, K, C, D, T, V, B, L = 4, 2, 8, 32, 32, 50, 8, 4


def rms(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def written_out(q, k, v, *, segment_ids, window=None) -> jax.Array:
    """Attention as a user would write it, who has one device."""
    length = q.shape[1]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bthc,bshc->bhts", q, k) * q.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshc->bthc", weights, v)


def layer_with(attend: Callable, window: int | None = None) -> Callable:
    def layer(w, x, batch):
        # Positions of whole sequences, on every mesh.
        turn = jnp.cos(jnp.arange(x.shape[1]) / 10)[:, None, None]
        q, k, v = (jnp.einsum("btd,dhc->bthc", rms(x), w[name]) for name in "qkv")
        out = attend(q * turn, k * turn, v, segment_ids=batch["documents"], window=window)
        x = x + jnp.einsum("bthc,hcd->btd", out, w["out"])
        return x + jnp.tanh(rms(x) @ w["up"]) @ w["down"]

    return layer


def embed(w, batch):
    return w[batch["tokens"]]


def loss(w, x, batch):
    log_probs = jax.nn.log_softmax(rms(x) @ w)
    return -jnp.mean(jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1))


def model_with(attend: Callable, window: int | None = None) -> jp.Model:
    return jp.Model(embed, layer_with(attend, window), loss, sequence_dim=1)


def drawn(seed: int = 0) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    keys = iter(jax.random.split(jax.random.key(seed), 99))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[0])

    params = {
        "embed": matrix(V, D) * 5,
        "layers": [
            {
                "q": matrix(D, H, C),
                "k": matrix(D, K, C),
                "v": matrix(D, K, C),
                "out": matrix(H, C, D),
                "up": matrix(D, 64),
                "down": matrix(64, D),
            }
            for _ in range(L)
        ],
        "head": matrix(D, V),
    }
    tokens = jax.random.randint(next(keys), (B, T + 1), 0, V)
    starts = jax.random.bernoulli(next(keys), 0.1, (B, T))
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "documents": jnp.cumsum(starts, axis=1, dtype=jnp.int32),
    }
    return params, batch


def plain_loss(params, batch, window=None):
    layer, x = layer_with(written_out, window), embed(params["embed"], batch)
    for w in params["layers"]:
        x = layer(w, x, batch)
    return loss(params["head"], x, batch)


def check(pipe: jp.PipelinedModel, window: int | None = None) -> None:
    params, batch = drawn()
    true, true_grads = jax.jit(jax.value_and_grad(plain_loss), static_argnums=2)(
        params, batch, window
    )
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), batch)
    assert_close(float(value), true, "loss")
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(pipe.unshard(grads)),
        jax.tree.leaves(true_grads),
        strict=True,
    ):
        assert_close(x, y, jax.tree_util.keystr(path))


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jp.make_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])


ENGINES = {
    "unpipelined": (None, {}),
    "circular": ("circular", {"chunks": 2}),
    "scheduled": ("1f1b", {}),
    "mpmd": ("1f1b", {"engine": "mpmd"}),
}
SPLIT = {"scheduled": ("zero_bubble_h1", {}), "mpmd": ("zbv", {"engine": "mpmd"})}


@pytest.mark.parametrize(
    "axes",
    [
        {"context": 2},
        pytest.param({"context": 4}, marks=pytest.mark.slow),
        {"fsdp": 2, "context": 2},
        pytest.param({"data": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "context": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines(engine: str, axes: dict[str, int]):
    schedule, options = ENGINES[engine]
    mesh = mesh_of(stage=2, **axes)
    check(
        jp.pipeline(
            model_with(jp.attention), schedule=schedule, mesh=mesh, microbatches=2, **options
        )
    )


@pytest.mark.parametrize(
    "engine",
    [pytest.param(n, marks=pytest.mark.slow if n == "scheduled" else ()) for n in ENGINES],
)
def test_windows(engine: str):
    schedule, options = ENGINES[engine]
    model, mesh = model_with(jp.attention, 5), mesh_of(stage=2, context=4)
    check(jp.pipeline(model, schedule=schedule, mesh=mesh, microbatches=2, **options), 5)


@pytest.mark.parametrize(
    "engine",
    [pytest.param(n, marks=pytest.mark.slow if n == "scheduled" else ()) for n in SPLIT],
)
def test_backwards_in_two_parts(engine: str):
    schedule, options = SPLIT[engine]
    model, mesh = model_with(jp.attention), mesh_of(stage=2, context=2)
    check(jp.pipeline(model, schedule=schedule, mesh=mesh, microbatches=4, **options))


@pytest.mark.parametrize("gather", [pytest.param("once", marks=pytest.mark.slow), "layer"])
def test_gathered_weights(gather: Any):
    mesh = mesh_of(stage=2, fsdp=2, context=2)
    check(
        jp.pipeline(
            model_with(jp.attention), schedule="1f1b", mesh=mesh, microbatches=2, gather=gather
        )
    )


def test_shards_of_heads_and_of_what_a_function_names():
    def specs(path: str, leaf: Any) -> jax.P | None:
        name = path.rsplit("'", 2)[-2]
        return {"q": jax.P(None, "tensor"), "out": jax.P("tensor")}.get(name)

    mesh = mesh_of(stage=2, tensor=2, context=2)
    model = model_with(jp.attention)
    check(jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=2, param_specs=specs))


def test_a_loss_that_mixes_rows_gets_whole_microbatches():
    def scaled(w, x, batch):
        return loss(w, x / jnp.sqrt(jnp.mean(x * x)), batch)

    params, batch = drawn()
    model = jp.Model(embed, layer_with(jp.attention), scaled, sequence_dim=1)
    mesh = mesh_of(stage=2, fsdp=2, context=2)
    pipe = jp.pipeline(model, schedule="circular", mesh=mesh, microbatches=2)
    value, _ = pipe.jit(pipe.value)(pipe.shard(params), batch)

    def of_rows(rows):
        x = embed(params["embed"], rows)
        for w in params["layers"]:
            x = layer_with(written_out)(w, x, rows)
        return scaled(params["head"], x, rows)

    halves = [jax.tree.map(lambda x, i=i: x[i : i + B // 2], batch) for i in (0, B // 2)]
    assert_close(float(value), sum(map(of_rows, halves)) / 2, "loss")


def test_each_device_has_its_share_of_the_sequences():
    params, batch = drawn()
    batch, sizes = jax.tree.map(lambda x: jnp.tile(x, (8, 4)), batch), {}
    for context in (1, 4):
        mesh = mesh_of(stage=2, context=context)
        pipe = jp.pipeline(
            model_with(jp.attention), schedule="circular", mesh=mesh, microbatches=2, remat="none"
        )
        compiled = jax.jit(pipe.value_and_grad).lower(pipe.shard(params), batch).compile()
        memory: Any = compiled.memory_analysis()
        sizes[context] = memory.temp_size_in_bytes
    assert sizes[4] < 0.3 * sizes[1]


def with_positions(w, batch):
    positions = jnp.cos(jnp.arange(batch["tokens"].shape[1])[:, None] / (1 + jnp.arange(D)))
    return w["table"][batch["tokens"]] + w["bias"] + positions


def without_positions(w, batch):
    return w["table"][batch["tokens"]] * 2 + w["bias"]


@pytest.mark.parametrize(
    ("function", "frozen"),
    [
        (without_positions, None),
        pytest.param(without_positions, lambda path, leaf: "bias" in path, marks=pytest.mark.slow),
        pytest.param(with_positions, None, marks=pytest.mark.slow),
    ],
    ids=["all", "table", "positions"],
)
def test_embeddings_that_the_loss_reads_too(function: Callable, frozen: Any):
    params, batch = drawn()
    params["embed"] = {"table": params["embed"], "bias": params["embed"][0]}
    params["head"] = jnp.ones(D)

    def tied_loss(w, x, batch):
        return loss((w["embed"]["table"] * w["head"]).T, x, batch)

    def plain(params):
        layer, x = layer_with(written_out), function(params["embed"], batch)
        for w in params["layers"]:
            x = layer(w, x, batch)
        return tied_loss(params, x, batch)

    model = jp.Model(function, layer_with(jp.attention), tied_loss, tied=True, sequence_dim=1)
    mesh = mesh_of(stage=2, context=4)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=2, frozen=frozen)
    true, true_grads = jax.jit(jax.value_and_grad(plain))(params)
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), batch)
    assert_close(float(value), true, "loss")
    grads = pipe.unshard(grads)
    assert_close(grads["embed"]["table"], true_grads["embed"]["table"], "table")
    assert_close(grads["head"], true_grads["head"], "head")
    if frozen is None:
        assert_close(grads["embed"]["bias"], true_grads["embed"]["bias"], "bias")


def test_gradients_of_an_embedding_are_added_where_the_tokens_are():
    params, batch = drawn()
    mesh = mesh_of(stage=2, context=4)
    pipe = jp.pipeline(model_with(jp.attention), schedule="1f1b", mesh=mesh, microbatches=2)
    lowered = jax.jit(pipe.value_and_grad).lower(pipe.shard(params), batch)
    text = lowered.compile().as_text() or ""
    # Cotangents [pieces, rows, tokens, D] of a microbatch, gathered for the scatter.
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert gathered and not [dims for dims in gathered if dims.endswith(f"{T},{D}")]


def test_rows_are_proven_whatever_the_kernel():
    params, batch = drawn()
    mesh = mesh_of(stage=2, fsdp=2, context=2)
    pipe = jp.pipeline(model_with(jp.attention), schedule="1f1b", mesh=mesh, microbatches=2)
    assert all(function.is_row_wise for function in pipe.rows(params, batch).functions)


def test_a_jitted_layer_is_traced_again_to_run():
    """What is traced to be read stores scores; a jitted function must not be taken from there."""
    traced = []

    @jax.jit
    def attend(q):
        traced.append(1)
        return jp.attention(q, q, q)

    q = jnp.ones((1, 8, 2, 4))
    with trace_to_read():
        attend(q)
    attend(q)
    assert len(traced) == 2


REFUSED = {
    "nothing is divided over": (replace(model_with(jp.attention), sequence_dim=None), {}),
    "that the 2 devices of the axis 'context' divide": (
        replace(model_with(jp.attention), sequence_dim=3),
        {},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str):
    model, options = REFUSED[message]
    params, batch = drawn()
    with pytest.raises(ValueError, match=message):
        pipe = jp.pipeline(
            model, schedule="1f1b", mesh=mesh_of(stage=2, context=2), microbatches=2, **options
        )
        pipe.value(pipe.shard(params), batch)


def test_slices_and_context_together_are_refused():
    def layer(w, x, batch, past):
        return x, past.append(x)[1]

    model = jp.Model(embed, layer, loss, sequence_dim=1)
    with pytest.raises(ValueError, match="cuts sequences into 2 slices, and the axis 'context'"):
        jp.pipeline(model, schedule="seq1f1b", mesh=mesh_of(stage=2, context=2), microbatches=2)


WRONG = {
    "this is self-attention": {"k": jnp.ones((1, 9, 2, 4))},
    "`q` has 4 heads of 4 channels": {"k": jnp.ones((1, 8, 3, 4))},
    r"`segment_ids` has shape \(8,\)": {"segment_ids": jnp.ones(8, jnp.int32)},
    r"`sinks` has shape \(2,\)": {"sinks": jnp.ones(2)},
    "`window` is 0": {"window": 0},
    "`kernel` is 'splash', but the devices are cpus": {"kernel": "splash"},
    "`kernel` is 'flash'. Give 'auto' or one of splash,": {"kernel": "flash"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_of_attention(message: str):
    q, k = jnp.ones((1, 8, 4, 4)), jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=message):
        jp.attention(**({"q": q, "k": k, "v": k} | WRONG[message]))


def test_lengths_that_do_not_divide_are_refused():
    x = jnp.ones((1, 9, 2, 4))
    with (
        jax.set_mesh(mesh_of(context=2)),
        pytest.raises(ValueError, match="9 tokens, which the 2 devices of the axis 'context'"),
    ):
        jp.attention(x, x, x)


def test_scores_are_not_stored_without_being_asked_for():
    x = jax.ShapeDtypeStruct((1, 65536, 2, 128), jnp.float32)
    with pytest.raises(ValueError, match=r"would store 34\.4 GB of scores .* cpus have no kernel"):
        jax.eval_shape(lambda x: jp.attention(x, x, x), x)
    asked = jax.eval_shape(lambda x: jp.attention(x, x, x, kernel="dot_product"), x)
    assert asked.shape == x.shape


def test_the_log_says_which_kernel_runs(caplog: pytest.LogCaptureFixture):
    x = jnp.ones((1, 24, 2, 4))
    with caplog.at_level(logging.INFO, logger="jaxpipe"):
        jp.attention(x, x, x)
    assert "attention stores its scores (dot_product): cpus have no kernel" in caplog.text


def shifted(x):
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def scanned(x):
    def step(state, token):
        state = 0.9 * state + token
        return state, state

    return jax.lax.scan(step, x[:, 0] * 0, x.swapaxes(0, 1))[1].swapaxes(0, 1)


def convolved(x):
    kernel = jnp.full((4, 1, D), 0.1)
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=D
    )


MIXING = {
    r"`pad`": shifted,
    r"a loop carries something from token to token": scanned,
    r"a convolution goes over tokens": convolved,
    r"`cumsum` goes along tokens": lambda x: jnp.cumsum(x, axis=1),
    r"a sum over tokens meets tokens": lambda x: x - jnp.mean(x, axis=1, keepdims=True),
}


def mixing_layer(mix: Callable, attend: Callable) -> Callable:
    layer = layer_with(attend)
    return lambda w, x, batch: layer(w, x, batch) + 0.1 * mix(x)


@pytest.mark.parametrize("message", MIXING)
def test_layers_that_mix_tokens_are_refused_in_branches(message: str):
    """XLA may divide them by a permute, for which devices of all ranks would wait for ever."""
    model = jp.Model(embed, mixing_layer(MIXING[message], jp.attention), loss)
    params, batch = drawn()
    pipe = jp.pipeline(
        model, schedule="1f1b", mesh=mesh_of(stage=2, context=2), microbatches=2, sequence_dim=1
    )
    with pytest.raises(ValueError, match=rf"layer moves values .*{message}.*engine='mpmd'"):
        pipe.value(pipe.shard(params), batch)


def test_an_x_that_is_cut_out_of_undivided_tokens_is_refused_in_branches():
    """Of 33 tokens, which two devices do not divide, 32 are embedded, which they divide."""

    def embed_all_but_the_last(w, batch):
        return embed(w, batch | {"tokens": batch["tokens"][:, :-1]})

    params, batch = drawn()
    batch |= {"tokens": jnp.concatenate([batch["tokens"], batch["tokens"][:, :1]], axis=1)}
    model = jp.Model(embed_all_but_the_last, layer_with(jp.attention), loss, sequence_dim=1)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh_of(stage=2, context=2), microbatches=2)
    with pytest.raises(ValueError, match=r"embed returns .* batch has \[\(4, 33\)\], which do not"):
        pipe.value(pipe.shard(params), batch)


def test_a_loss_that_shifts_tokens_is_refused_in_branches():
    def next_token_loss(w, x, batch):
        return loss(w, x[:, :-1], {"targets": batch["tokens"][:, 1:]})

    params, batch = drawn()
    model = jp.Model(embed, layer_with(jp.attention), next_token_loss, sequence_dim=1)
    mesh = mesh_of(stage=2, context=2)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=2)
    with pytest.raises(ValueError, match="loss moves values between tokens"):
        pipe.value(pipe.shard(params), batch)


@pytest.mark.parametrize(
    "message",
    [next(iter(MIXING)), *(pytest.param(m, marks=pytest.mark.slow) for m in list(MIXING)[1:])],
)
@pytest.mark.parametrize("engine", ["circular", "mpmd"])
def test_layers_that_mix_tokens_are_exact_without_branches(engine: str, message: str):
    schedule, options = ENGINES[engine]
    params, batch = drawn()
    mix = MIXING[message]
    model = jp.Model(embed, mixing_layer(mix, jp.attention), loss, sequence_dim=1)
    mesh = mesh_of(stage=2, context=2)
    pipe = jp.pipeline(model, schedule=schedule, mesh=mesh, microbatches=2, **options)

    def plain(params):
        x = embed(params["embed"], batch)
        for w in params["layers"]:
            x = mixing_layer(mix, written_out)(w, x, batch)
        return loss(params["head"], x, batch)

    true, true_grads = jax.jit(jax.value_and_grad(plain))(params)
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), batch)
    assert_close(float(value), true, "loss")
    jax.tree.map(lambda x, y: assert_close(x, y, "gradients"), pipe.unshard(grads), true_grads)


def test_a_module_takes_the_dim_of_tokens_from_the_pipeline():
    nnx = pytest.importorskip("flax.nnx")

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], H, C)

    class Block(nnx.Module):
        def __init__(self, rngs: Any):
            self.q, self.k, self.v, self.out = (nnx.Linear(D, D, rngs=rngs) for _ in range(4))

        def __call__(self, x: jax.Array, documents: jax.Array) -> jax.Array:
            q, k, v = (heads(make(rms(x))) for make in (self.q, self.k, self.v))
            out = jp.attention(q, k, v, segment_ids=documents)
            return x + self.out(out.reshape(x.shape))

    class Decoder(nnx.Module):
        def __init__(self, rngs: Any):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(L)])
            self.head = nnx.Linear(D, V, rngs=rngs)

        def __call__(self, batch: Any) -> jax.Array:
            x = self.embed(batch["tokens"])
            for block in self.blocks:
                x = block(x, batch["documents"])
            return self.head(x)

    def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1))

    _, batch = drawn()
    module = Decoder(nnx.Rngs(0))
    model, params = jp.nnx.model(module, layers="blocks", loss=cross_entropy)
    mesh = mesh_of(stage=2, context=2)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=2, sequence_dim=1)
    value, _ = pipe.jit(pipe.value)(pipe.shard(params), batch)
    assert_close(float(value), cross_entropy(module(batch), batch), "loss")
