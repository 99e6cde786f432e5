"""Layers as users write them, `(weights, x) -> x`, with what XLA says of their backwards."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Dims = dict[str, tuple[int, ...]]


class Layer(NamedTuple):
    """A layer, and how much lives at a time in its backward, in units of x.

    Attributes:
        run: `(weights, x) -> x`.
        weights: Shapes of its weights.
        channels: Those of x.
        tokens: Those of a row.
        on_tpu: What XLA:TPU holds, jax 0.11.2, libtpu 0.0.48.1: the slope of the peak of a step
            with four layers that are recomputed in a loop, of 8 and 16 rows on a v5p, less the
            inputs of layers and of the step.
        on_gpu: What XLA:GPU holds, jax 0.10.2, h100; likewise.
        milliseconds: Those of the step of 16 rows on a v5p, by the cycles of XLA:TPU.
    """

    run: Callable[[Any, jax.Array], jax.Array]
    weights: dict[str, jax.ShapeDtypeStruct]
    channels: int
    tokens: int
    on_tpu: float
    on_gpu: float
    milliseconds: float


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(squares + 1e-6)).astype(jnp.bfloat16) * scale


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return attended.reshape(*attended.shape[:2], -1)


def gpt(w: Any, x: jax.Array, act: Callable = jax.nn.gelu) -> jax.Array:
    parts = jnp.split(norm(w["n1"], x) @ w["qkv"], 3, -1)
    x = x + attend(*(y.reshape(*x.shape[:2], 16, -1) for y in parts)) @ w["o"]
    return x + act(norm(w["n2"], x) @ w["u"]) @ w["d"]


def rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    p, q = jnp.split(x, 2, -1)
    return jnp.concatenate([p * cos - q * sin, q * cos + p * sin], -1)


def gated(w: Any, x: jax.Array) -> jax.Array:
    h = norm(w["n"], x)
    return x + (jax.nn.silu(h @ w["g"]) * (h @ w["u"])) @ w["d"]


def llama(w: Any, x: jax.Array) -> jax.Array:
    h = norm(w["n1"], x)
    q, k, v = ((h @ w[name]).reshape(*x.shape[:2], -1, 128) for name in "qkv")
    return gated(w, x + attend(rotated(q), rotated(k), v) @ w["o"])


def tanh_mlp(w: Any, x: jax.Array) -> jax.Array:
    h = norm(w["n"], x)
    for weight in w["w"]:
        h = jnp.tanh(h @ weight)
    return x + h


def scan_of_products(w: Any, x: jax.Array) -> jax.Array:
    h = norm(w["n"], x)
    decay, value, gate = jax.nn.sigmoid(h @ w["a"]), h @ w["v"], h @ w["g"]

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, states = jax.lax.associative_scan(combine, (decay, value * (1 - decay)), axis=1)
    return x + (states * jax.nn.silu(gate)) @ w["o"]


def shifted(w: Any, x: jax.Array) -> jax.Array:
    h = norm(w["n"], x)
    value, length = h @ w["v"], x.shape[1]
    y = [jnp.pad(value, ((0, 0), (i, 0), (0, 0)))[:, :length] * w["k"][i] for i in range(4)]
    return x + (jax.nn.silu(sum(y[1:], y[0])) * (h @ w["g"])) @ w["o"]


def convolved(w: Any, x: jax.Array) -> jax.Array:
    value = norm(w["n"], x) @ w["v"]
    y = jax.lax.conv_general_dilated(
        value,
        w["k"],
        (1,),
        [(3, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=value.shape[-1],
    )
    return x + jax.nn.silu(y) @ w["o"]


def recurrent(w: Any, x: jax.Array) -> jax.Array:
    h = norm(w["n"], x) @ w["i"]

    def step(state: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(state @ w["h"] + value)
        return state, state

    _, y = jax.lax.scan(step, jnp.zeros_like(h[:, 0]), jnp.swapaxes(h, 0, 1))
    return x + jnp.swapaxes(y, 0, 1) @ w["o"]


def linear_attention(w: Any, x: jax.Array, chunk: int = 256) -> jax.Array:
    h = norm(w["n"], x)
    q, k, v = ((h @ w[name]).reshape(len(x), -1, chunk, 16, x.shape[2] // 16) for name in "qkv")
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    scores = jnp.einsum("bnchd,bnmhd->bnhcm", q, k) * jnp.tril(jnp.ones((chunk, chunk), q.dtype))
    sums = jnp.cumsum(jnp.einsum("bnchd,bnche->bnhde", k, v), 1)
    before = jnp.pad(sums, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1]
    y = jnp.einsum("bnhcm,bnmhd->bnchd", scores, v) + jnp.einsum("bnchd,bnhde->bnche", q, before)
    return x + y.reshape(x.shape) @ w["o"]


def in_float32(w: Any, x: jax.Array) -> jax.Array:
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return x + (jax.nn.gelu(h @ w["u"]) @ w["d"]).astype(x.dtype)


def four_mlps(w: Any, x: jax.Array) -> jax.Array:
    for n, u, d in zip(w["n"], w["u"], w["d"], strict=True):
        x = x + jax.nn.gelu(norm(n, x) @ u) @ d
    return x


def mixer(w: Any, x: jax.Array) -> jax.Array:
    over_tokens = jnp.swapaxes(norm(w["n"], x), 1, 2)
    x = x + jnp.swapaxes(jax.nn.gelu(over_tokens @ w["t1"]) @ w["t2"], 1, 2)
    return x + jax.nn.gelu(norm(w["n2"], x) @ w["u"]) @ w["d"]


def every_expert(w: Any, x: jax.Array) -> jax.Array:
    h = norm(w["n"], x)
    p = jax.nn.softmax((h @ w["r"]).astype(jnp.float32), -1)
    chosen = (p * (p >= jax.lax.top_k(p, 2)[0][..., -1:])).astype(x.dtype)
    y = jax.nn.gelu(jnp.einsum("btd,edf->btef", h, w["u"])) * chosen[..., None]
    return x + jnp.einsum("btef,efd->btd", y, w["d"])


def _gpt(d: int, f: int) -> Dims:
    return {"n1": (d,), "qkv": (d, 3 * d), "o": (d, d), "n2": (d,), "u": (d, f), "d": (f, d)}


def _relu2(w: Any, x: jax.Array) -> jax.Array:
    return gpt(w, x, lambda y: jnp.square(jax.nn.relu(y)))


_NORM: Dims = {"n": (2048,)}
_MLP: Dims = {"u": (2048, 8192), "d": (8192, 2048)}
_SQUARE: Dims = {"n": (1024,), "o": (1024, 1024)}
_LLAMA: Dims = {"n1": (2048,), "q": (2048, 2048), "k": (2048, 512), "v": (2048, 512)}
_LLAMA |= {"o": (2048, 2048), "g": (2048, 5632), "u": (2048, 5632), "d": (5632, 2048)}
_GATES: Dims = {"v": (2048, 3072), "g": (2048, 3072), "a": (2048, 3072), "o": (3072, 2048)}
_SHIFTS: Dims = {"v": (2048, 4096), "g": (2048, 4096), "k": (4, 4096), "o": (4096, 2048)}
_KERNEL: Dims = {"v": (2048, 4096), "k": (4, 1, 4096), "o": (4096, 2048)}
_LOOP: Dims = {"i": (1024, 1024), "h": (1024, 1024)}
_QKV: Dims = {"q": (1024, 1024), "k": (1024, 1024), "v": (1024, 1024)}
_FOUR: Dims = {"n": (4, 1024), "u": (4, 1024, 4096), "d": (4, 4096, 1024)}
_TOKENS: Dims = {"t1": (512, 2048), "t2": (2048, 512), "n2": (2048,)}
_EXPERTS: Dims = {"n": (1024,), "r": (1024, 8), "u": (8, 1024, 2048), "d": (8, 2048, 1024)}

# Its name and function, dims of weights, channels and tokens of x, and what compilers say.
_TABLE: list[tuple[str, Callable, Dims, int, int, float, float, float]] = [
    ("GPT", gpt, _gpt(1024, 4096), 1024, 1024, 62.0, 90.0, 51.6),
    ("GPT of 4,096 tokens", gpt, _gpt(1024, 4096), 1024, 4096, 205.1, 354.0, 511.7),
    ("squared ReLU", _relu2, _gpt(2048, 8192), 2048, 1024, 35.8, 46.0, 107.6),
    ("gated MLP", gated, _NORM | _MLP | {"g": (2048, 8192)}, 2048, 2048, 17.0, 15.0, 117.0),
    ("three tanh", tanh_mlp, _NORM | {"w": (3, 2048, 2048)}, 2048, 2048, 5.0, 6.0, 37.6),
    ("llama", llama, _NORM | _LLAMA, 2048, 1024, 39.5, 46.3, 95.5),
    ("associative scan", scan_of_products, _NORM | _GATES, 2048, 1024, 20.5, 20.0, 55.3),
    ("shifts", shifted, _NORM | _SHIFTS, 2048, 2048, 12.0, 12.0, 71.1),
    ("convolution", convolved, _NORM | _KERNEL, 2048, 2048, 7.0, 10.0, 51.0),
    ("loop over tokens", recurrent, _SQUARE | _LOOP, 1024, 512, 7.3, 10.0, 42.0),
    ("linear attention", linear_attention, _SQUARE | _QKV, 1024, 2048, 15.0, 21.0, 34.0),
    ("float32", in_float32, _MLP, 2048, 1024, 13.0, 19.0, 39.6),
    ("four MLPs", four_mlps, _FOUR, 1024, 1024, 23.0, 52.0, 47.3),
    ("mixer", mixer, _NORM | _TOKENS | _MLP, 2048, 512, 17.0, 24.0, 29.0),
    ("every expert", every_expert, _EXPERTS, 1024, 1024, 16.0, 81.0, 41.2),
]


def _layer(run: Callable, dims: Dims, *figures: Any) -> Layer:
    """Returns a layer that reads its weights in the dtype of x; `in_float32` as they are."""

    def layer(w: Any, x: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        return run(w if run is in_float32 else cast, x)

    return Layer(layer, {name: shape(*of_weight) for name, of_weight in dims.items()}, *figures)


LAYERS = {name: _layer(run, dims, *figures) for name, run, dims, *figures in _TABLE}
