"""Layers that return another x than they are given: U-Nets, and blocks that read all before."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from harness.hybrid_models import conv
from harness.hybrid_models import normals as numbers

SIDE, C, LEVELS = 8, 4, 2


def mesh(**sizes: int) -> Any:
    count = int(np.prod(list(sizes.values())))
    return jp.make_mesh(sizes, devices=jax.devices()[:count])


def embed(w: Any, batch: Any) -> Any:
    return {"h": conv(batch["image"], w), "skips": ()}


def down(w: Any, x: Any, batch: Any) -> Any:
    h = x["h"] + jax.nn.gelu(conv(x["h"], w["a"]))
    return {"h": conv(h, w["b"], stride=2), "skips": (*x["skips"], h)}


def middle(w: Any, x: Any, batch: Any) -> Any:
    return x | {"h": x["h"] + jax.nn.gelu(conv(x["h"], w))}


def up(w: Any, x: Any, batch: Any) -> Any:
    *skips, skip = x["skips"]
    h = jnp.repeat(jnp.repeat(x["h"], 2, axis=1), 2, axis=2)
    h = jnp.concatenate([conv(h, w["a"]), skip], axis=-1)
    y = {"h": jax.nn.gelu(conv(h, w["b"])), "skips": tuple(skips)}
    return y, {"loss": 1e-2 * jnp.mean(h**2)}


def error(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean((conv(x["h"], w) - batch["target"]) ** 2), {"size": jnp.mean(x["h"] ** 2)}


LAYERS: dict[str, Any] = {f"down_{i}": down for i in range(LEVELS)}
LAYERS |= {"middle": middle} | {f"up_{i}": up for i in reversed(range(LEVELS))}
UNET = jp.Model(embed, LAYERS, error)


def unet_params() -> Any:
    normal, deepest = numbers(0), C * 2**LEVELS
    layers: dict[str, Any] = {"middle": [normal(3, 3, deepest, deepest) for _ in range(2)]}
    for i in range(LEVELS):
        c = C * 2**i
        layers[f"down_{i}"] = [{"a": normal(3, 3, c, c), "b": normal(3, 3, c, 2 * c)}]
        layers[f"up_{i}"] = [{"a": normal(3, 3, 2 * c, c), "b": normal(3, 3, 2 * c, c)}]
    return {"embed": normal(3, 3, 3, C), "layers": layers, "head": normal(3, 3, C, 3)}


def images(step: int = 0) -> Any:
    keys = jax.random.split(jax.random.key(step))
    return {
        name: jax.random.normal(key, (24, SIDE, SIDE, 3))
        for name, key in zip(("image", "target"), keys, strict=True)
    }


def plain_unet(params: Any, batch: Any) -> Any:
    x = embed(params["embed"], batch)
    layers, balance = params["layers"], 0.0
    for i in range(LEVELS):
        x = down(layers[f"down_{i}"][0], x, batch)
    for w in layers["middle"]:
        x = middle(w, x, batch)
    for i in reversed(range(LEVELS)):
        x, aux = up(layers[f"up_{i}"][0], x, batch)
        balance += aux["loss"]
    value, metrics = error(params["head"], x, batch)
    return value + balance, metrics


ENGINES = {
    "unpipelined": {"schedule": None},
    "circular": {"schedule": "circular"},
    "scheduled": {"schedule": "1f1b"},
    "scheduled, split": {"schedule": "zero_bubble_h1"},
    "mpmd": {"schedule": "1f1b", "engine": "mpmd"},
    "mpmd, split": {"schedule": "zero_bubble_h1", "engine": "mpmd"},
}
SLOW = pytest.mark.slow
QUICK = [
    pytest.param(options, id=name, marks=SLOW if "split" in name else ())
    for name, options in ENGINES.items()
]
MESHES = [
    {"stage": 3},
    {"stage": 2, "fsdp": 2},
    *(pytest.param(x, marks=SLOW) for x in ({"stage": 2}, {"stage": 6}, {"stage": 4, "data": 2})),
]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("options", QUICK)
def test_a_unet_is_that_of_its_plain_program(options: dict[str, Any], sizes: dict[str, int]):
    pipe = jp.pipeline(UNET, mesh=mesh(**sizes), microbatches=12, **options)
    found = pipe.check(unet_params(), images(), plain=plain_unet)
    assert found.largest <= 1e-5
    assert "metrics['size']" in found.errors


def test_a_unet_that_trains_is_that_of_its_plain_program():
    tx = optax.adam(1e-3)
    params = plain_params = unet_params()
    pipe = jp.pipeline(
        UNET, schedule="interleaved_1f1b", mesh=mesh(stage=3), microbatches=6, engine="mpmd"
    )
    stored_tx, stored = pipe.optimizer(tx), pipe.shard(params)
    state, plain_state = stored_tx.init(stored), tx.init(params)

    @pipe.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = pipe.value_and_grad(params, batch)
        updates, state = stored_tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def plain_step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda params: plain_unet(params, batch)[0])(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        for _ in range(5):
            stored, state = step(stored, state, images())
            plain_params, plain_state = plain_step(plain_params, plain_state, images())
    for got, wanted in zip(
        jax.tree.leaves(pipe.unshard(stored)), jax.tree.leaves(plain_params), strict=True
    ):
        assert np.max(np.abs(got - wanted)) <= 1e-5 * np.max(np.abs(wanted))


@pytest.mark.parametrize("options", QUICK)
def test_outputs_of_a_unet(options: dict[str, Any]):
    model = replace(UNET, output=lambda w, x, batch: conv(x["h"], w))
    params, batch = unet_params(), images()
    for one in (model, UNET):
        pipe = jp.pipeline(one, mesh=mesh(stage=2), microbatches=4, **options)
        outputs = pipe.jit(pipe.apply)(pipe.shard(params), batch)
        if one is UNET:  # what leaves the last layer
            assert outputs["skips"] == ()
            outputs = conv(jnp.asarray(np.asarray(outputs["h"])), params["head"])
        squares = np.mean((np.asarray(outputs) - batch["target"]) ** 2)
        wanted = error(params["head"], *last_x(params, batch))[0]
        assert abs(squares - wanted) <= 1e-5 * wanted


def last_x(params: Any, batch: Any) -> Any:
    x = embed(params["embed"], batch)
    for name, function in LAYERS.items():
        for w in params["layers"][name]:
            x = function(w, x, batch)
            x = x[0] if isinstance(x, tuple) else x
    return x, batch


def test_programs_of_ranks_hand_over_what_x_is():
    pipe = jp.pipeline(UNET, schedule="gpipe", mesh=mesh(stage=6), microbatches=4, engine="mpmd")
    program = pipe.jit(pipe.value).lower(pipe.shard(unet_params()), images()).program
    handed = {}
    for instruction in program.instructions:
        if type(instruction).__name__ == "Send" and instruction.to == instruction.rank + 1:
            shapes = {b.value.aval.shape[1:] for b in instruction.buffers if b.value.aval.ndim == 5}
            handed.setdefault(instruction.rank, set()).update(shapes)
    rows, c = 6, C
    level = {i: (rows, SIDE // 2**i, SIDE // 2**i, c * 2**i) for i in range(LEVELS + 1)}
    assert handed[0] == {level[0], level[1]}
    assert handed[1] == handed[2] == handed[3] == {level[0], level[1], level[2]}
    assert handed[4] == {level[0], level[1]}


def normalize(x: Any) -> Any:
    return (x - jnp.mean(x, axis=(0, 1, 2))) * jax.lax.rsqrt(jnp.var(x, axis=(0, 1, 2)) + 0.1)


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "1f1b", "engine": "mpmd"}])
def test_a_unet_with_batch_statistics(options: dict[str, Any]):
    def normalized(w: Any, x: Any, batch: Any) -> Any:
        return x | {"h": x["h"] + conv(normalize(x["h"]), w)}

    model = replace(UNET, layer=LAYERS | {"middle": normalized})
    pipe = jp.pipeline(model, mesh=mesh(stage=2, data=2), microbatches=1, **options)
    found = pipe.rows(unet_params(), images()).functions
    assert [one.name for one in found if not one.is_row_wise] == ["middle"]
    assert pipe.check(unet_params(), images()).largest <= 1e-5


@pytest.mark.parametrize("options", QUICK)
def test_a_unet_with_dropout(options: dict[str, Any]):
    def dropping(w: Any, x: Any, batch: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.7, x["h"].shape)
        return x | {"h": jnp.where(kept, x["h"] + jax.nn.gelu(conv(x["h"], w)), 0.0)}

    model = replace(UNET, layer=LAYERS | {"middle": dropping})
    pipe = jp.pipeline(model, mesh=mesh(stage=2), microbatches=4, **options)
    assert pipe.check(unet_params(), images(), jax.random.key(3)).largest <= 1e-5


def attention_residuals(num_layers: int) -> tuple[jp.Model, Any, Any]:
    """Each block reads a weighted mean of the outputs of all blocks before it."""

    def block(w: Any, x: Any, batch: Any) -> Any:
        scores = jnp.stack([jnp.mean(normalized(h) * w["query"], axis=-1) for h in x])
        mixed = jnp.einsum("lb,lbd->bd", jax.nn.softmax(scores, axis=0), jnp.stack(x))
        return [*x, jnp.tanh(mixed @ w["dense"])]

    def normalized(h: Any) -> Any:
        return h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)

    def loss(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((sum(x) @ w - batch["y"]) ** 2)

    def plain(params: Any, batch: Any) -> Any:
        x = [batch["x"] @ params["embed"]]
        for i in range(num_layers):
            x = block(params["layers"][f"block_{i}"][0], x, batch)
        return loss(params["head"], x, batch)

    kinds = {f"block_{i}": block for i in range(num_layers)}
    normal = numbers(1)
    layers = {name: [{"query": normal(8), "dense": normal(8, 8)}] for name in kinds}
    params = {"embed": normal(8, 8), "layers": layers, "head": normal(8, 8)}
    return jp.Model(lambda w, batch: [batch["x"] @ w], kinds, loss), params, plain


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("options", QUICK)
def test_blocks_that_read_all_blocks_before_them(options: dict[str, Any], ranks: int):
    model, params, plain = attention_residuals(8)
    normal = numbers(2)
    batch = {"x": normal(16, 8), "y": normal(16, 8)}
    pipe = jp.pipeline(model, mesh=mesh(stage=ranks), microbatches=4, **options)
    assert pipe.check(params, batch, plain=plain).largest <= 1e-5


def test_numbers_of_several_dtypes_keep_them():
    def widen(w: Any, x: Any, batch: Any) -> Any:
        h = jnp.tanh(x["h"] @ w)
        return {"h": h, "half": h.astype(jnp.bfloat16), "largest": jnp.argmax(h, axis=-1)}

    def narrow(w: Any, x: Any, batch: Any) -> Any:
        chosen = jax.nn.one_hot(x["largest"], 8) * x["half"].astype(jnp.float32)
        return {"h": x["h"] @ w + chosen}

    def loss(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((x["h"] @ w - batch["y"]) ** 2)

    def plain(params: Any, batch: Any) -> Any:
        x = {"h": batch["x"] @ params["embed"]}
        x = widen(params["layers"]["widen"][0], x, batch)
        x = narrow(params["layers"]["narrow"][0], x, batch)
        return loss(params["head"], x, batch)

    model = jp.Model(
        lambda w, batch: {"h": batch["x"] @ w}, {"widen": widen, "narrow": narrow}, loss
    )
    normal = numbers(3)
    layers = {"widen": [normal(8, 8)], "narrow": [normal(8, 8)]}
    params = {"embed": normal(8, 8), "layers": layers, "head": normal(8, 8)}
    batch = {"x": normal(16, 8), "y": normal(16, 8)}
    for options in ENGINES.values():
        pipe = jp.pipeline(model, mesh=mesh(stage=2), microbatches=4, **options)
        found = pipe.check(params, batch, plain=plain, tolerance=1e-5)
        assert found.largest <= 1e-5, options


def test_what_cannot_change_is_refused_by_name():
    model, params, _ = attention_residuals(2)
    kinds: Any = model.layer
    one_kind = replace(model, layer={"block": kinds["block_0"]})
    layers = [layer for kind in params["layers"].values() for layer in kind]
    batch = {"x": jnp.ones((16, 8)), "y": jnp.ones((16, 8))}
    pipe = jp.pipeline(one_kind, schedule="1f1b", mesh=mesh(stage=2), microbatches=4)
    with pytest.raises(
        ValueError,
        match=r"Layers of the kind 'block' are given different x: layer 0 \[float32\[b, 8\]\], and "
        r"layer 1 \[float32\[b, 8\], float32\[b, 8\]\]\. .*kinds of their own",
    ):
        pipe.check(params | {"layers": {"block": layers}}, batch)

    for shape, remedy in ((3,), r"\*a\.shape\)"), ((1, 3), r"\*a\.shape\[1:\]\)"):

        def counting(w: Any, x: Any, batch: Any, shape: tuple[int, ...] = shape) -> Any:
            return [*x, jnp.ones(shape)]

        counted = replace(model, layer=kinds | {"block_0": counting})
        pipe = jp.pipeline(counted, schedule="1f1b", mesh=mesh(stage=2), microbatches=4)
        is_told = rf"returns, is float32{re.escape(str([*shape]))} in a .* repeat it.*{remedy}"
        with pytest.raises(ValueError, match=is_told):
            pipe.check(params, batch)


def test_rows_are_told_from_what_has_as_many_entries_by_chance():
    def remember(w: Any, x: Any, batch: Any) -> Any:
        return {"h": jnp.tanh(x["h"] @ w["h"]), "slots": w["slots"]}

    def recall(w: Any, x: Any, batch: Any) -> Any:
        return {"h": x["h"] + jnp.sum(x["slots"], axis=0) @ w}

    def loss(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((x["h"] @ w - batch["y"]) ** 2)

    normal = numbers(4)
    layers = {"remember": [{"h": normal(8, 8), "slots": normal(2, 8)}], "recall": [normal(8, 8)]}
    params = {"embed": normal(8, 8), "layers": layers, "head": normal(8, 8)}
    kinds = {"remember": remember, "recall": recall}
    model = jp.Model(lambda w, batch: {"h": batch["x"] @ w}, kinds, loss)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2, data=2), microbatches=4)
    with pytest.raises(ValueError, match=r"returns, is float32\[2, 8\]"):
        pipe.value(pipe.shard(params), {"x": normal(16, 8), "y": normal(16, 8)})


def test_an_x_that_ends_with_an_empty_dict_is_no_auxiliary_output():
    def loss(w: Any, x: Any, batch: Any) -> Any:
        h, skips = x
        assert skips == {}
        return jnp.mean((h @ w - batch["y"]) ** 2)

    normal = numbers(5)
    kinds = {
        "first": lambda w, x, batch: [x @ w, x],
        "second": lambda w, x, batch: (jnp.tanh(x[0] + x[1] @ w), {}),
    }
    model = jp.Model(lambda w, batch: batch["x"] @ w, kinds, loss)
    layers = {"first": [normal(8, 8)], "second": [normal(8, 8)]}
    params = {"embed": normal(8, 8), "layers": layers, "head": normal(8, 8)}
    batch = {"x": normal(16, 8), "y": normal(16, 8)}
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2), microbatches=8)
    assert pipe.check(params, batch).largest <= 1e-5


def check_against(pipe: Any, plain: Callable[[Any], Any], params: Any, batch: Any) -> None:
    """Compares loss and gradients with those of the plain program, a function of parameters."""
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), batch)
    true, true_grads = jax.value_and_grad(plain)(params)
    np.testing.assert_allclose(value, true, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(pipe.unshard(grads)), jax.tree.leaves(true_grads), strict=True):
        assert abs(a - b).max() <= 1e-5 * abs(b).max()


def test_a_leaf_that_later_layers_lack_travels_round_the_ranks():
    """In one program the array of its dtype is then a constant, as no leaf of x is in it."""

    def dense(w: Any, batch: Any) -> Any:
        return {"h": batch["x"] @ w, "seen": batch["x"][:, :1] > 0}

    def first(w: Any, x: Any, batch: Any) -> Any:
        return jnp.where(x["seen"], jnp.tanh(x["h"] @ w), x["h"])

    def second(w: Any, x: Any, batch: Any) -> Any:
        return jnp.tanh(x @ w)

    def third(w: Any, x: Any, batch: Any) -> Any:
        return jnp.tanh(x @ w * 2)

    def squares(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((x @ w) ** 2)

    order = "first", "second", "second", "third", "second", "second", "second", "third"
    functions, normal = {"first": first, "second": second, "third": third}, numbers(1)
    layers = [normal(C, C) for _ in order]
    params, batch = {"embed": normal(C, C), "layers": layers, "head": normal(C, C)}, normal(8, C)

    def plain(params: Any) -> Any:
        x = dense(params["embed"], {"x": batch})
        for name, w in zip(order, params["layers"], strict=True):
            x = functions[name](w, x, {})
        return squares(params["head"], x, {})

    model = jp.Model(dense, functions, squares, order=order)
    pipe = jp.pipeline(model, schedule="circular", mesh=mesh(stage=2), microbatches=4)
    check_against(pipe, plain, params, {"x": batch})


@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_a_layer_may_return_a_constant(schedule: str):
    def dense(w: Any, batch: Any) -> Any:
        return {"h": batch @ w, "share": jnp.ones((batch.shape[0], 1))}

    def layer(w: Any, x: Any, batch: Any) -> Any:
        share = jnp.full((batch.shape[0], 1), 0.5)
        return {"h": jnp.tanh(x["h"] @ w) * x["share"], "share": share}

    def squares(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((x["h"] @ w) ** 2)

    normal = numbers(2)
    layers = [normal(C, C) for _ in range(4)]
    params, batch = {"embed": normal(C, C), "layers": layers, "head": normal(C, C)}, normal(8, C)

    def plain(params: Any) -> Any:
        x = dense(params["embed"], batch)
        for w in params["layers"]:
            x = layer(w, x, batch)
        return squares(params["head"], x, batch)

    model = jp.Model(dense, layer, squares)
    pipe = jp.pipeline(model, schedule=schedule, mesh=mesh(stage=2), microbatches=4)
    check_against(pipe, plain, params, batch)
