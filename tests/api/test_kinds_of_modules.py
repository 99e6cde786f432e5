"""Modules whose layers differ, as their authors wrote them, in a pipeline."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_modules import D, T, V, next_token_loss, random_tokens

import jaxpipe as jp
from jaxpipe import equinox as jp_equinox
from jaxpipe import linen as jp_linen
from jaxpipe import nnx as jp_nnx

B = 8
tokens, loss = partial(random_tokens, B), next_token_loss


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = jnp.where(mask, q @ k.mT / D**0.5, -1e9)
    return jax.nn.softmax(scores) @ v


def window_mask(window: int | None) -> Any:
    rows, columns = jnp.arange(T)[:, None], jnp.arange(T)[None]
    mask = columns <= rows
    return mask if window is None else mask & (columns > rows - window)


class GemmaBlock(nn.Module):
    """Local or global attention, with a rope base of its own."""

    window: int | None
    base: float

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.RMSNorm()(x)
        q, k, v = (nn.Dense(D, use_bias=False, name=name)(h) for name in "qkv")
        turned = jnp.cos(jnp.arange(T, dtype=jnp.float32)[:, None] / self.base)
        x = x + nn.Dense(D, name="out")(attend(q * turned, k * turned, v, window_mask(self.window)))
        h = nn.RMSNorm()(x)
        return x + nn.Dense(D, name="down")(nn.gelu(nn.Dense(2 * D, name="up")(h)))


class Gemma(nn.Module):
    """Five local layers and a global one, tied and soft-capped, as Gemma 3."""

    num_layers: int = 8

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(V, D)
        x = table(tokens) * D**0.5
        for i in range(self.num_layers):
            is_global = i % 6 == 5
            window, base = (None, 1e3) if is_global else (2, 10.0)
            x = GemmaBlock(window, base, name=f"layer_{i}")(x)
        logits = table.attend(nn.RMSNorm()(x))
        return 30 * jnp.tanh(logits / 30)


def gemma_linen() -> Any:
    module = Gemma()
    variables = module.init(jax.random.key(0), tokens())

    def plain(params: Any, batch: Any) -> Any:
        return loss(module.apply(params, batch), batch)

    model, params = jp_linen.model(module, variables, layers="layer", loss=loss, batch=tokens())
    return model, params, plain


class Attention(nnx.Module):
    def __init__(self, window: int | None, rngs: nnx.Rngs):
        self.window = window
        self.qkv = nnx.Linear(D, 3 * D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        return attend(q, k, v, window_mask(self.window))


class Mamba(nnx.Module):
    """A gated linear recurrence over the sequence."""

    def __init__(self, rngs: nnx.Rngs):
        self.gates, self.out = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        decay, inputs = jnp.split(self.gates(x), 2, axis=-1)

        def step(h: Any, now: Any) -> Any:
            a, u = now
            h = jax.nn.sigmoid(a) * h + u
            return h, h

        steps = jnp.moveaxis(decay, 1, 0), jnp.moveaxis(inputs, 1, 0)
        _, hidden = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), steps)
        return self.out(jnp.moveaxis(hidden, 0, 1))


class Dense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.gelu(self.up(x))), 0.0


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(D, 3, rngs=rngs)
        shape = 3, D, D
        self.weights = nnx.Param(jax.random.normal(rngs.params(), shape) / D**0.5)

    def __call__(self, x: Any) -> Any:
        shares = jax.nn.softmax(self.router(x))
        outputs = jnp.einsum("btd,edf->btef", x, self.weights[...])
        return jnp.einsum("bte,btef->btf", shares, outputs), jnp.mean(shares**2)


class Block(nnx.Module):
    def __init__(self, mixer: Any, mlp: Any, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(2)])
        self.mixer, self.mlp = mixer, mlp

    def __call__(self, x: Any) -> Any:
        x = x + self.mixer(self.norms[0](x))
        y, aux = self.mlp(self.norms[1](x))
        return x + y, aux


class Stack(nnx.Module):
    """Mixers (m Mamba, a attention, w a window) and MLPs (e experts, d dense) in any pattern."""

    def __init__(self, pattern: str, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        mixers: dict[str, Callable] = {
            "m": Mamba,
            "a": lambda rngs: Attention(None, rngs),
            "w": lambda rngs: Attention(2, rngs),
        }
        mlps: dict[str, Callable] = {"e": Experts, "d": Dense}
        self.blocks = nnx.List(
            [Block(mixers[mixer](rngs), mlps[mlp](rngs), rngs) for mixer, mlp in pattern.split()]
        )
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x, total = self.embed(tokens), 0.0
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return self.head(x), total


def with_balance(output: Any, batch: Any) -> Any:
    logits, balance = output
    return loss(logits, batch) + 0.1 * balance


def stack_nnx(pattern: str) -> Any:
    module = Stack(pattern, nnx.Rngs(0))
    graph, _, rest = nnx.split(module, nnx.Param, ...)

    def plain(params: Any, batch: Any) -> Any:
        return with_balance(nnx.merge(graph, params, rest)(batch), batch)

    model, params = jp_nnx.model(module, loss=with_balance, batch=tokens())
    return model, params, plain


class EquinoxBlock(eqx.Module):
    linear: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __call__(self, x: Any, mask: Any) -> Any:
        return x + getattr(jax.nn, self.activation)(jax.vmap(self.linear)(mask @ x))


class EquinoxStack(eqx.Module):
    """Layers that are given masks of their own."""

    embed: eqx.nn.Embedding
    blocks: list
    head: eqx.nn.Linear

    def __call__(self, row: Any) -> Any:
        x = jax.vmap(self.embed)(row)
        near = (window_mask(2) & (row > 0)).astype(jnp.float32)
        far = window_mask(None).astype(jnp.float32) / T
        for i, block in enumerate(self.blocks):
            x = block(x, far if i % 3 == 2 else near)
        return jax.vmap(self.head)(x)


def stack_equinox() -> Any:
    keys = jax.random.split(jax.random.key(0), 8)
    names = ("relu", "gelu", "gelu", "relu", "gelu", "gelu")
    module = EquinoxStack(
        eqx.nn.Embedding(V, D, key=keys[0]),
        [
            EquinoxBlock(eqx.nn.Linear(D, D, key=k), n)
            for k, n in zip(keys[1:7], names, strict=True)
        ],
        eqx.nn.Linear(D, V, key=keys[7]),
    )

    def plain(params: Any, batch: Any) -> Any:
        return loss(jax.vmap(eqx.combine(params, module))(batch), batch)

    model, params = jp_equinox.model(module, loss=loss, batch=tokens())
    return model, params, plain


MODELS: dict[str, Callable[[], Any]] = {
    "gemma, linen": gemma_linen,
    "gemma, nnx": lambda: stack_nnx("wd wd ad wd wd ad wd wd"),
    "jamba, nnx": lambda: stack_nnx("md me ad me md me ad me"),
    "llama 4, nnx": lambda: stack_nnx("ad ae ad ae"),
    "equinox": stack_equinox,
}
ENGINES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "unpipelined": ({"stage": 1, "fsdp": 2}, {"schedule": None}),
    "circular": ({"stage": 2}, {"schedule": "circular"}),
    "scheduled": ({"stage": 4}, {"schedule": "1f1b"}),
    "fsdp": ({"stage": 2, "fsdp": 2}, {"schedule": "zero_bubble_h1"}),
    "mpmd": ({"stage": 4}, {"schedule": "1f1b", "engine": "mpmd"}),
}
# Harness rows have the others: test_hybrid_models.
QUICK = {("gemma, linen", "scheduled"), ("equinox", "fsdp")}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=() if (name, engine) in QUICK else pytest.mark.slow)
        for name in MODELS
        for engine in ENGINES
    ],
)
def test_the_numbers_are_those_of_the_module(name: str, engine: str):
    model, params, plain = MODELS[name]()
    sizes, options = ENGINES[engine]
    compare(model, params, plain, sizes, **options)


def compare(model: Any, params: Any, plain: Any, sizes: dict[str, int], **options: Any) -> None:
    """Compares loss and every gradient of a pipeline with those of the plain program."""
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    pipe = jp.pipeline(model, mesh=mesh, microbatches=4, **options)
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), tokens())
    wanted, plain_grads = jax.value_and_grad(plain)(params, tokens())
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    grads = pipe.unshard(grads)
    assert jax.tree.structure(grads) == jax.tree.structure(plain_grads)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(np.abs(b).max(), 1e-6))


def test_kinds_are_named_by_what_differs():
    model, *_ = gemma_linen()
    assert set(model.layer) == {
        "GemmaBlock(window=2, base=10.0)",
        "GemmaBlock(window=None, base=1000.0)",
    }
    assert [name.count("None") for name in model.order] == [0, 0, 0, 0, 0, 1, 0, 0]
    model, *_ = stack_nnx("wd wd ad")
    assert set(model.layer) == {"Block(mixer.window=2)", "Block(mixer.window=None)"}
    mesh = jp.make_mesh({"stage": 1}, devices=jax.devices()[:1])
    pipe = jp.pipeline(model, schedule=None, mesh=mesh, microbatches=2)
    assert "; layers 2 Block(mixer.window=2), 1 Block(mixer.window=None)" in repr(pipe)


@partial(jax.jit, static_argnames="window")
def near(x: Any, window: int) -> Any:
    """Reads a constant that no program outside of it has."""
    distance = np.abs(np.arange(T)[:, None] - np.arange(T))
    return (distance < window).astype(np.float32) @ x


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled_gradient(x: Any, scale: float) -> Any:
    return x


scaled_gradient.defvjp(lambda x, scale: (x, None), lambda scale, _, g: (g * scale,))


class Differing(nnx.Module):
    """Layers that differ where their programs print alike, or for long sequences alone."""

    def __init__(self, how: str, window: int, rngs: nnx.Rngs):
        self.how, self.window, self.linear = how, window, nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any, key: Any = None) -> Any:
        h: Any = x
        if self.how == "constant":
            h = near(x, self.window)
        elif self.how == "gradient":
            h = scaled_gradient(x, float(self.window))
        elif self.how == "length" and x.shape[1] > self.window:
            h = jnp.roll(x, self.window, axis=1)
        elif self.how == "key":
            h = x * key
        return x + jax.nn.relu(self.linear(h))


class Differ(nnx.Module):
    def __init__(self, how: str, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([Differing(how, 2 + 2 * (i // 2), rngs) for i in range(4)])

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        keys = [jnp.sin(tokens.astype(x.dtype) * n)[..., None] for n in (1, 2)]
        for i, block in enumerate(self.blocks):
            x = block(x, key=keys[i % 2])
        return self.embed.attend(x)


@pytest.mark.parametrize("how", ["constant", "gradient", "key", "alike"])
def test_layers_that_only_look_alike_are_of_several_kinds(how: str):
    module = Differ(how, nnx.Rngs(0))
    graph, _ = nnx.split(module)

    def plain(params: Any, batch: Any) -> Any:
        return loss(nnx.merge(graph, params)(batch), batch)

    model, params = jp_nnx.model(module, loss=loss, batch=tokens())
    compare(model, params, plain, {"stage": 2}, schedule="1f1b")


def test_kinds_that_an_example_does_not_show_are_refused():
    module, example = Differ("length", nnx.Rngs(0)), jnp.zeros((B, 2), jnp.int32)
    model, params = jp_nnx.model(module, loss=loss, batch=example)
    mesh = jp.make_mesh({"stage": 1}, devices=jax.devices()[:1])
    pipe = jp.pipeline(model, schedule=None, mesh=mesh, microbatches=2)
    with pytest.raises(
        ValueError, match=r"`blocks\[2\]` computes something else than `blocks\[0\]`"
    ):
        pipe.value(pipe.shard(params), tokens())


class Named(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + jnp.tanh(nn.Dense(D)(x)) / (1.0 + int(str(self.name)[-1]))


class NamedStack(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(V, D)(tokens)
        for i in range(4):
            x = Named(name=f"layer_{i}")(x)
        return nn.Dense(V)(x)


def test_a_linen_layer_may_read_its_name():
    module = NamedStack()
    variables = module.init(jax.random.key(0), tokens())
    model, params = jp_linen.model(module, variables, layers="layer", loss=loss, batch=tokens())
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    pipe = jp.pipeline(model, schedule="1f1b", engine="mpmd", mesh=mesh, microbatches=4)
    value, _ = pipe.jit(pipe.value)(pipe.shard(params), tokens())
    np.testing.assert_allclose(value, loss(module.apply(variables, tokens()), tokens()), rtol=1e-5)
