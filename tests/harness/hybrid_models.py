"""Models of 2026 whose layers differ, each as its author would write it, with its plain loss.

D embed, H heads, C channels of a head, T tokens, V words, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpipe as jp
from jaxpipe import equinox as jp_equinox
from jaxpipe import linen as jp_linen
from jaxpipe import nnx as jp_nnx


@dataclass(frozen=True)
class Sizes:
    """How large a model is."""

    rows: int = 16
    tokens: int = 8
    embed: int = 16
    heads: int = 2
    vocab: int = 32


@dataclass(frozen=True)
class Hybrid:
    """A model and the program that its author has.

    Attributes:
        model: What `jp.pipeline` takes.
        params: The first parameters.
        plain: `(params, batch) -> loss`, which knows nothing of jaxpipe.
        batch: From a step to its batch.
    """

    model: jp.Model
    params: Any
    plain: Callable[[Any, Any], Any]
    batch: Callable[[int], Any]


def words(sizes: Sizes, step: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(step), (sizes.rows, sizes.tokens), 0, sizes.vocab)


def wide(tree: Any) -> Any:
    """Returns parameters in the widest dtype that is enabled."""
    return jax.tree.map(lambda x: x.astype(jnp.result_type(float)), tree)


def next_word(logits: Any, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:])
    return losses.mean()


def rotated(x: Any, base: float) -> Any:
    """Turns channels of [b, T, H, C] by their position."""
    angles = jnp.arange(x.shape[1])[:, None, None] * base ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attended(q: Any, k: Any, v: Any, window: int | None = None, chunk: int | None = None) -> Any:
    """Causal attention of [b, T, H, C] over fewer heads of keys, within a window or a chunk."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(q.shape[1])
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    if chunk is not None:
        mask &= columns // chunk == rows // chunk
    scores = jnp.einsum("bthc,bshc->bhts", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhts,bshc->bthc", weights, v)


# Gemma 3 in Linen: five local layers, one global one, tied and soft-capped.


class GemmaBlock(nn.Module):
    sizes: Sizes
    window: int | None
    rope_base: float

    @nn.compact
    def __call__(self, x: Any) -> Any:
        s = self.sizes
        channels = s.embed // s.heads
        h = nn.RMSNorm()(x)
        dense = partial(nn.DenseGeneral, use_bias=False)
        q = nn.RMSNorm()(dense((s.heads, channels), name="q")(h))
        k = nn.RMSNorm()(dense((1, channels), name="k")(h))
        v = dense((1, channels), name="v")(h)
        q, k = rotated(q, self.rope_base), rotated(k, self.rope_base)
        h = dense(s.embed, axis=(-2, -1), name="out")(attended(q, k, v, self.window))
        x = x + nn.RMSNorm()(h)
        h = nn.RMSNorm()(x)
        gate, up = (dense(2 * s.embed, name=name)(h) for name in ("gate", "up"))
        return x + nn.RMSNorm()(dense(s.embed, name="down")(nn.gelu(gate) * up))


class Gemma(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(self.sizes.vocab, self.sizes.embed)
        x = table(tokens) * self.sizes.embed**0.5
        for i in range(12):
            window, base = (None, 1e6) if i % 6 == 5 else (4, 1e4)
            x = GemmaBlock(self.sizes, window, base, name=f"layer_{i}")(x)
        logits = table.attend(nn.RMSNorm()(x))
        return 30.0 * jnp.tanh(logits / 30.0)


def of_linen(sizes: Sizes, module: nn.Module) -> Hybrid:
    variables = wide(jax.jit(module.init)(jax.random.key(0), words(sizes)))
    model, params = jp_linen.model(
        module, variables, layers="layer", loss=next_word, batch=words(sizes)
    )

    def plain(params: Any, batch: Any) -> Any:
        return next_word(module.apply(params, batch), batch)

    return Hybrid(model, params, plain, partial(words, sizes))


def gemma_linen(sizes: Sizes) -> Hybrid:
    return of_linen(sizes, Gemma(sizes))


# Attention residuals in Linen: every block reads the outputs of all blocks before it.


class PlainBlock(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, x: Any) -> Any:
        s = self.sizes
        qkv = nn.DenseGeneral((3 * s.heads, s.embed // s.heads), name="qkv")(nn.RMSNorm()(x))
        q, k, v = jnp.split(qkv, 3, axis=2)
        x = x + nn.Dense(s.embed, name="out")(attended(q, k, v).reshape(x.shape))
        return x + nn.Dense(s.embed, name="down")(nn.gelu(nn.Dense(2 * s.embed, name="up")(x)))


class ResidualBlock(nn.Module):
    """Reads a mean of all outputs before it: a query of its own attends to them, in each token."""

    block: nn.Module

    @nn.compact
    def __call__(self, outputs: list[Any]) -> Any:
        given = jnp.stack(outputs)
        query = self.param("query", nn.initializers.normal(), (given.shape[-1],))
        scores = jnp.einsum("nbtd,d->nbt", nn.RMSNorm()(given), query)
        return self.block(jnp.einsum("nbt,nbtd->btd", jax.nn.softmax(scores, axis=0), given))


class Residuals(nn.Module):
    table: nn.Embed
    blocks: list[nn.Module]

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        outputs = [self.table(tokens)]
        for i, block in enumerate(self.blocks):
            outputs.append(ResidualBlock(block.clone(), name=f"layer_{i}")(outputs))
        return self.table.attend(outputs[0] + sum(outputs[1:]))


def attention_residuals(sizes: Sizes) -> Hybrid:
    blocks: list[nn.Module] = [PlainBlock(sizes) for _ in range(8)]
    return of_linen(sizes, Residuals(nn.Embed(sizes.vocab, sizes.embed), blocks))


# What the models in NNX have in common.


class Attention(nnx.Module):
    def __init__(
        self,
        s: Sizes,
        rngs: nnx.Rngs,
        *,
        window: int | None = None,
        chunk: int | None = None,
        base: float | None = 1e4,
    ):
        self.heads, self.window, self.chunk, self.base = s.heads, window, chunk, base
        dense = partial(nnx.Linear, s.embed, use_bias=False, rngs=rngs)
        self.q, self.out = dense(s.embed), dense(s.embed)
        self.kv = dense(2 * s.embed // s.heads)

    def __call__(self, x: Any) -> Any:
        q = self.q(x).reshape(*x.shape[:2], self.heads, -1)
        k, v = jnp.split(self.kv(x)[:, :, None], 2, axis=-1)
        if self.base is not None:
            q, k = rotated(q, self.base), rotated(k, self.base)
        return self.out(attended(q, k, v, self.window, self.chunk).reshape(x.shape))


class Mamba(nnx.Module):
    """A selective state space: a short convolution, and a scan whose decay the input decides."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        dense = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.inputs, self.steps = dense(s.embed, 2 * s.embed), dense(s.embed, s.embed)
        self.selection, self.out = dense(s.embed, 8), dense(s.embed, s.embed)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, s.embed)) / 3)
        self.decay = nnx.Param(jnp.log(jnp.arange(1.0, 5.0)) * jnp.ones((s.embed, 1)))

    def __call__(self, x: Any) -> Any:
        x, gate = jnp.split(self.inputs(x), 2, axis=-1)
        padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
        length = x.shape[1]
        x = nnx.silu(sum(padded[:, i : i + length] * self.kernel[i] for i in range(3)))
        step, (b, c) = jax.nn.softplus(self.steps(x)), jnp.split(self.selection(x), 2, axis=-1)
        kept = jnp.exp(-step[..., None] * jnp.exp(self.decay[...]))
        added = (step * x)[..., None] * b[:, :, None]

        def turn(h: Any, now: Any) -> Any:
            kept, added, c = now
            h = kept * h + added
            return h, jnp.einsum("bdn,bn->bd", h, c)

        by_token = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (kept, added, c))
        _, y = jax.lax.scan(turn, jnp.zeros_like(added[:, 0]), by_token)
        return self.out(jnp.moveaxis(y, 0, 1) * nnx.silu(gate))


class Dense(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        dense = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up = dense(s.embed, 2 * s.embed), dense(s.embed, 2 * s.embed)
        self.down = dense(2 * s.embed, s.embed)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """Every token goes to the best experts; a loss keeps them equally busy."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs, best: int):
        self.best, self.router = best, nnx.Linear(s.embed, 4, use_bias=False, rngs=rngs)

        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape) / shape[1] ** 0.5)

        self.up, self.down = normal(4, s.embed, s.embed), normal(4, s.embed, s.embed)

    def __call__(self, x: Any) -> Any:
        shares = jax.nn.softmax(self.router(x))
        least = jax.lax.top_k(shares, self.best)[0][..., -1:]
        chosen = jnp.where(shares >= least, shares, 0.0)
        hidden = nnx.silu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        y = jnp.einsum("btef,efd,bte->btd", hidden, self.down[...], chosen)
        return y, jnp.mean(shares**2)


class Block(nnx.Module):
    def __init__(self, mixer: Any, mlp: Any, s: Sizes, rngs: nnx.Rngs):
        self.norm, self.mixer = nnx.RMSNorm(s.embed, rngs=rngs), mixer
        self.second_norm, self.mlp = nnx.RMSNorm(s.embed, rngs=rngs), mlp

    def __call__(self, x: Any) -> Any:
        x = x + self.mixer(self.norm(x))
        y = self.mlp(self.second_norm(x))
        y, balance = y if isinstance(y, tuple) else (y, None)
        return x + y if balance is None else (x + y, balance)


class Decoder(nnx.Module):
    """A language model of any blocks, which may share one behind every fourth."""

    def __init__(self, blocks: list[Any], s: Sizes, rngs: nnx.Rngs, shared: Any = None):
        dtype = jnp.result_type(float)
        self.table = nnx.Embed(s.vocab, s.embed, param_dtype=dtype, rngs=rngs)
        self.blocks, self.shared = nnx.List(blocks), shared
        self.norm = nnx.RMSNorm(s.embed, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x, balance = self.table(tokens), 0.0
        for i, block in enumerate(self.blocks):
            x = block(x)
            if isinstance(x, tuple):
                x, more = x
                balance = balance + more
            if self.shared is not None and i % 4 == 3:
                x = self.shared(x)
        return 30.0 * jnp.tanh(self.table.attend(self.norm(x)) / 30.0), balance


def with_balance(returned: Any, batch: Any) -> Any:
    logits, balance = returned
    return next_word(logits, batch) + 0.01 * balance


def of_nnx(sizes: Sizes, module: nnx.Module, layers: Any = "blocks") -> Hybrid:
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    nnx.update(module, wide(params))
    model, params = jp_nnx.model(module, layers=layers, loss=with_balance, batch=words(sizes))

    def plain(params: Any, batch: Any) -> Any:
        own: Any = nnx.merge(graph, params, rest)
        return with_balance(own(batch), batch)

    return Hybrid(model, params, plain, partial(words, sizes))


def gemma_nnx(sizes: Sizes) -> Hybrid:
    rngs = nnx.Rngs(0)
    settings: Any = [{"base": 1e6} if i % 6 == 5 else {"window": 4} for i in range(12)]
    blocks = [
        Block(Attention(sizes, rngs, **of_layer), Dense(sizes, rngs), sizes, rngs)
        for of_layer in settings
    ]
    return of_nnx(sizes, Decoder(blocks, sizes, rngs))


def jamba(sizes: Sizes) -> Hybrid:
    """One attention layer among seven of Mamba, and experts in every second layer."""
    rngs = nnx.Rngs(1)

    def block(i: int) -> Block:
        mixer = Attention(sizes, rngs, base=None) if i % 8 == 4 else Mamba(sizes, rngs)
        mlp = Experts(sizes, rngs, best=2) if i % 2 else Dense(sizes, rngs)
        return Block(mixer, mlp, sizes, rngs)

    return of_nnx(sizes, Decoder([block(i) for i in range(8)], sizes, rngs))


def llama_4(sizes: Sizes) -> Hybrid:
    """Attention within chunks but for every fourth layer, and experts in every second one."""
    rngs = nnx.Rngs(2)

    def block(i: int) -> Block:
        settings: Any = {"base": None} if i % 4 == 3 else {"chunk": 4}
        mlp = Experts(sizes, rngs, best=1) if i % 2 else Dense(sizes, rngs)
        return Block(Attention(sizes, rngs, **settings), mlp, sizes, rngs)

    return of_nnx(sizes, Decoder([block(i) for i in range(8)], sizes, rngs))


class Mixer(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.norm, self.mamba = nnx.RMSNorm(s.embed, rngs=rngs), Mamba(s, rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.mamba(self.norm(x))


def zamba(sizes: Sizes) -> Hybrid:
    """One block of attention behind every fourth of eight Mamba layers."""
    rngs = nnx.Rngs(3)
    shared = Block(Attention(sizes, rngs), Dense(sizes, rngs), sizes, rngs)
    module = Decoder([Mixer(sizes, rngs) for _ in range(8)], sizes, rngs, shared)
    return of_nnx(sizes, module, ("blocks", "shared"))


# ALBERT in Equinox: one block eight times, and a table narrower than the model.


class AlbertBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.RMSNorm]
    mlp: eqx.nn.MLP

    def __init__(self, s: Sizes, key: Any):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(s.heads, s.embed, key=first)
        self.norms = [eqx.nn.RMSNorm(s.embed, use_bias=False) for _ in range(2)]
        self.mlp = eqx.nn.MLP(s.embed, s.embed, 2 * s.embed, 1, jax.nn.gelu, key=second)

    def __call__(self, x: Any) -> Any:
        x = jax.vmap(self.norms[0])(x + self.attention(x, x, x))
        return jax.vmap(self.norms[1])(x + jax.vmap(self.mlp)(x))


class Albert(eqx.Module):
    table: eqx.nn.Embedding
    widen: eqx.nn.Linear
    block: AlbertBlock

    def __init__(self, s: Sizes, key: Any):
        keys = jax.random.split(key, 3)
        self.table = eqx.nn.Embedding(s.vocab, s.embed // 2, key=keys[0])
        self.widen = eqx.nn.Linear(s.embed // 2, s.embed, key=keys[1])
        self.block = AlbertBlock(s, keys[2])

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.widen)(jax.vmap(self.table)(tokens))
        for _ in range(8):
            x = self.block(x)
        return x @ self.widen.weight @ self.table.weight.T


def albert(sizes: Sizes) -> Hybrid:
    """Guesses words that are hidden: every third is."""
    weights, others = eqx.partition(Albert(sizes, jax.random.key(4)), eqx.is_inexact_array)
    module = eqx.combine(wide(weights), others)

    def hidden_words(logits: Any, batch: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["words"])
        return jnp.mean(losses[:, ::3])

    def batch(step: int = 0) -> Any:
        return {"words": words(sizes, step), "seen": words(sizes, step).at[:, ::3].set(0)}

    def of_row(module: Any, row: Any) -> Any:
        return module(row["seen"])

    model, params = jp_equinox.model(
        module, layers="block", loss=hidden_words, batch=batch(), call=of_row
    )

    def plain(params: Any, batch: Any) -> Any:
        own = eqx.combine(params, module)
        return hidden_words(jax.vmap(partial(of_row, own))(batch), batch)

    return Hybrid(model, params, plain, batch)


# A U-Net and a vision-language model as plain functions.


def by_flops(own: Hybrid) -> Hybrid:
    """Places layers by their operations, as models of modules are."""
    costs = jp.layer_flops(own.model, own.params, own.batch(0))
    return replace(own, model=replace(own.model, layer_costs=costs))


def normals(seed: int) -> Callable[..., jax.Array]:
    keys = iter(jax.random.split(jax.random.key(seed), 200))
    return lambda *shape: jax.random.normal(next(keys), shape) / np.prod(shape[:-1]) ** 0.5


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=names)


def unet_embed(w: Any, batch: Any) -> Any:
    return {"h": conv(batch["image"], w), "skips": ()}


def unet_down(w: Any, x: Any, batch: Any) -> Any:
    h = x["h"] + jax.nn.silu(
        conv(x["h"], w["conv"]) + batch["noise"][:, None, None, None] * w["noise"]
    )
    return {"h": conv(h, w["half"], 2), "skips": (*x["skips"], h)}


def unet_middle(w: Any, x: Any, batch: Any) -> Any:
    return x | {"h": x["h"] + jax.nn.silu(conv(x["h"], w))}


def unet_up(w: Any, x: Any, batch: Any) -> Any:
    *skips, skip = x["skips"]
    h = jnp.repeat(jnp.repeat(x["h"], 2, axis=1), 2, axis=2)
    h = jnp.concatenate([conv(h, w["half"]), skip], axis=-1)
    return {"h": jax.nn.silu(conv(h, w["conv"])), "skips": tuple(skips)}


def unet_loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean((conv(x["h"], w) - batch["target"]) ** 2)


def unet(sizes: Sizes) -> Hybrid:
    """Three levels of half the resolution and twice the channels each."""
    normal, channels, levels = normals(5), sizes.embed // 4, range(3)
    functions: dict[str, Callable] = {f"down_{i}": unet_down for i in levels}
    functions |= {"middle": unet_middle} | {f"up_{i}": unet_up for i in reversed(levels)}
    layers: dict[str, Any] = {"middle": [normal(3, 3, 8 * channels, 8 * channels) for _ in "ab"]}
    for i in levels:
        c = channels * 2**i
        layers[f"down_{i}"] = [
            {"conv": normal(3, 3, c, c), "noise": normal(c), "half": normal(3, 3, c, 2 * c)}
        ]
        layers[f"up_{i}"] = [{"half": normal(3, 3, 2 * c, c), "conv": normal(3, 3, 2 * c, c)}]
    params = {
        "embed": normal(3, 3, 3, channels),
        "layers": layers,
        "head": normal(3, 3, channels, 3),
    }

    def batch(step: int = 0) -> Any:
        keys = jax.random.split(jax.random.key(step), 3)
        shape = sizes.rows, sizes.tokens, sizes.tokens, 3
        image, target = (jax.random.normal(key, shape) for key in keys[:2])
        return {"image": image, "target": target, "noise": jax.random.uniform(keys[2], shape[:1])}

    def plain(params: Any, batch: Any) -> Any:
        x = unet_embed(params["embed"], batch)
        for i in levels:
            x = unet_down(params["layers"][f"down_{i}"][0], x, batch)
        for w in params["layers"]["middle"]:
            x = unet_middle(w, x, batch)
        for i in reversed(levels):
            x = unet_up(params["layers"][f"up_{i}"][0], x, batch)
        return unet_loss(params["head"], x, batch)

    return by_flops(Hybrid(jp.Model(unet_embed, functions, unet_loss), params, plain, batch))


def normed(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def mixed(w: Any, x: Any, source: Any, causal: bool) -> Any:
    q, k, v = normed(x) @ w["q"], normed(source) @ w["k"], normed(source) @ w["v"]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        length = jnp.arange(x.shape[1])
        scores = jnp.where(length <= length[:, None], scores, -1e9)
    x = x + jax.nn.softmax(scores) @ v
    return x + jax.nn.gelu(normed(x) @ w["up"]) @ w["down"]


def vlm_embed(w: Any, batch: Any) -> Any:
    return {"image": batch["patches"] @ w["patch"], "text": w["table"][batch["words"]]}


def vision_layer(w: Any, x: Any, batch: Any) -> Any:
    return x | {"image": mixed(w, x["image"], x["image"], causal=False)}


def language_layer(w: Any, x: Any, batch: Any) -> Any:
    return x | {"text": mixed(w, x["text"], x["text"], causal=True)}


def cross_layer(w: Any, x: Any, batch: Any) -> Any:
    more = mixed(w, x["text"], x["image"] @ w["project"], causal=False) - x["text"]
    return x | {"text": x["text"] + jnp.tanh(w["gate"]) * more}


def vlm_loss(w: Any, x: Any, batch: Any) -> Any:
    return next_word(normed(x["text"]) @ w["embed"]["table"].T, batch["words"])


def vlm(sizes: Sizes) -> Hybrid:
    """Four layers of a narrow vision tower, and eight of a language model that reads it twice."""
    normal, d, narrow = normals(6), sizes.embed, sizes.embed // 2
    order = (*("vision",) * 4, *("language", "language", "language", "cross") * 2)
    kinds = {"vision": vision_layer, "language": language_layer, "cross": cross_layer}

    def layer(kind: str) -> Any:
        c = narrow if kind == "vision" else d
        w = {name: normal(c, c) for name in "qkv"} | {
            "up": normal(c, 2 * c),
            "down": normal(2 * c, c),
        }
        return w | {"project": normal(narrow, d), "gate": jnp.ones(())} if kind == "cross" else w

    table = {"patch": normal(12, narrow), "table": normal(sizes.vocab, d)}
    params = {"embed": table, "layers": [layer(kind) for kind in order], "head": ()}

    def batch(step: int = 0) -> Any:
        patches = jax.random.normal(jax.random.key(1000 + step), (sizes.rows, sizes.tokens, 12))
        return {"patches": patches, "words": words(sizes, step)}

    def plain(params: Any, batch: Any) -> Any:
        x = vlm_embed(params["embed"], batch)
        for i, w in enumerate(params["layers"]):
            if i < 4:
                x = vision_layer(w, x, batch)
            else:
                x = (cross_layer if i % 4 == 3 else language_layer)(w, x, batch)
        return vlm_loss({"head": (), "embed": params["embed"]}, x, batch)

    model = jp.Model(vlm_embed, kinds, vlm_loss, tied=True, order=order)
    return by_flops(Hybrid(model, params, plain, batch))


HYBRIDS: dict[str, Callable[[Sizes], Hybrid]] = {
    "Gemma 3, Linen": gemma_linen,
    "Gemma 3, NNX": gemma_nnx,
    "Jamba, NNX": jamba,
    "Llama 4, NNX": llama_4,
    "Zamba, NNX": zamba,
    "ALBERT, Equinox": albert,
    "U-Net, functions": unet,
    "vision-language, functions": vlm,
    "attention residuals, Linen": attention_residuals,
}
