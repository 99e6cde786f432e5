"""Variables of modules that a call only reads, such as tables and caches for decoding."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import fp8_ops
from small_modules import D, T, V, next_token_loss, random_tokens

import jaxpipe as jp
from jaxpipe import linen as jp_linen
from jaxpipe import nnx as jp_nnx

B = 8
tokens, loss = partial(random_tokens, B), next_token_loss
SLOW = pytest.mark.slow


def pipeline(model: Any, engine: str) -> Any:
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    return jp.pipeline(model, schedule="1f1b", engine=engine, mesh=mesh, microbatches=4)


class Decoding(nnx.Module):
    """A layer with a table that it reads, and a cache that only decoding writes."""

    def __init__(self, scale: float, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.table = nnx.Variable(scale * jnp.arange(1.0, T + 1)[:, None])
        self.keys = nnx.Cache(jnp.zeros((B, T, D)))

    def __call__(self, x: Any, decode: bool = False) -> Any:
        y = jnp.tanh(self.linear(x)) * self.table[...]
        if decode:
            self.keys[...] = y
        return x + y


class Decoder(nnx.Module):
    def __init__(self, decode: bool, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([Decoding(0.1 + 0.1 * (i % 2), rngs) for i in range(4)])
        self.decode = decode

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, decode=self.decode)
        return self.embed.attend(x)


class Counting(Decoder):
    """A module that counts its calls, outside of its layers."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(False, rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, tokens: Any) -> Any:
        self.count[...] += 1
        return super().__call__(tokens)


@pytest.mark.parametrize("engine", [pytest.param("scheduled", marks=SLOW), "mpmd"])
def test_nnx_layers_read_variables_of_their_own_that_no_call_writes(engine: str):
    module = Decoder(False, nnx.Rngs(0))
    model, params = jp_nnx.model(module, loss=loss, batch=tokens())
    assert [int(name[-1]) for name in model.order or ()] == [0, 1, 0, 1]  # by their tables
    pipe = pipeline(model, engine)
    (value, _), _ = pipe.jit(pipe.value_and_grad)(pipe.shard(params), tokens())
    np.testing.assert_allclose(value, loss(module(tokens()), tokens()), rtol=1e-5)


def test_nnx_variables_that_a_call_writes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"changes its variables \['keys'\]"):
        jp_nnx.model(Decoder(True, nnx.Rngs(0)), loss=loss, batch=tokens())
    with pytest.raises(ValueError, match=r"changes its variables \['count'\]"):
        jp_nnx.model(Counting(nnx.Rngs(0)), loss=loss, batch=tokens())
    module = Decoder(False, nnx.Rngs(0))
    scale = type(fp8_ops.OVERWRITE_WITH_GRADIENT, (nnx.Variable,), {})
    setattr(module.blocks[1].linear, "scale", scale(jnp.ones(())))  # noqa: B010
    with pytest.raises(ValueError, match=r"blocks.1.linear.scale, scales of FP8"):
        jp_nnx.model(module, loss=loss, batch=tokens())


class LinenDecoding(nn.Module):
    """A layer with running statistics, a table, and a cache that only decoding reads and writes."""

    decode: bool = False
    trains_norm: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = jnp.tanh(nn.Dense(D)(nn.BatchNorm(not self.trains_norm)(x)))
        gain = self.variable("tables", "gain", jnp.zeros, T).value
        keys = self.variable("cache", "keys", jnp.zeros, (B, T, D))
        if self.decode and not self.is_initializing():
            keys.value = jnp.concatenate([keys.value[:, 1:], y[:, :1]], axis=1)
        return x + y * gain[:, None]


class LinenDecoder(nn.Module):
    layer: LinenDecoding
    counts: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(V, D)
        x = table(tokens) * self.variable("tables", "scale", jnp.ones, ()).value
        calls = self.variable("counters", "calls", jnp.zeros, (), jnp.int32)
        if self.counts and not self.is_initializing():
            calls.value += 1
        for i in range(4):
            x = self.layer.clone(name=f"block_{i}", parent=self)(x)
        return table.attend(x)


def with_tables(module: nn.Module) -> Any:
    """Variables of a module, whose constants are of two kinds in turn where layers have their own.

    A table that is stacked is the same for all layers.
    """

    def drawn(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        end = 1.1 if "_1" in name or "_3" in name else 0.9
        shape = leaf.shape[-1:]
        return leaf + jnp.linspace(0.1, end, shape[0] if shape else 1).reshape(shape)

    variables = module.init(jax.random.key(0), tokens())
    new = {name: variables[name] for name in ("batch_stats", "tables") if name in variables}
    return {**variables, **jax.tree_util.tree_map_with_path(drawn, new)}


class LinenScan(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(V, D)
        axes: Any = {"params": 0, "tables": 0, "cache": 0, "batch_stats": 0}

        def body(layer: Any, x: Any, _: Any) -> Any:
            return layer(x), None

        scan = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=4)
        x, _ = scan(LinenDecoding(name="block"), table(tokens), None)
        return table.attend(x)


LINEN = {"list": LinenDecoder(LinenDecoding()), "scan": LinenScan()}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("list", "scheduled"),
        *(pytest.param(*row, marks=SLOW) for row in (("list", "mpmd"), ("scan", "scheduled"))),
        pytest.param("scan", "mpmd", marks=SLOW),
    ],
)
def test_linen_variables_that_no_call_writes_are_constants(name: str, engine: str):
    module = LINEN[name]
    variables = with_tables(module)
    model, params = jp_linen.model(module, variables, loss=loss, batch=tokens())
    if name == "list":
        assert [int(name[-1]) for name in model.order or ()] == [0, 1, 0, 1]  # by their tables
    assert set(params) == {"params"}

    def plain(params: Any) -> Any:
        return loss(module.apply({**variables, **params}, tokens()), tokens())

    wanted, plain_grads = jax.value_and_grad(plain)(params)
    pipe = pipeline(model, engine)
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), tokens())
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    grads = pipe.unshard(grads)
    assert jax.tree.structure(grads) == jax.tree.structure(plain_grads)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    # The constants are read: without them the loss is another one.
    others = {key: jax.tree.map(jnp.zeros_like, variables[key]) for key in ("tables",)}
    assert loss(module.apply({**variables, **others}, tokens()), tokens()) != wanted


def test_linen_variables_that_a_call_writes_are_refused_by_name():
    def model(module: nn.Module, variables: Any = None) -> Any:
        variables = variables or module.init(jax.random.key(0), tokens())
        return jp_linen.model(module, variables, loss=loss, batch=tokens())

    with pytest.raises(ValueError, match=r'variable "keys" in "/block_0" .*"cache" is immutable'):
        model(LinenDecoder(LinenDecoding(decode=True)))
    with pytest.raises(ValueError, match=r'variable "mean" in "/block_0/BatchNorm_0"'):
        model(LinenDecoder(LinenDecoding(trains_norm=True)))
    with pytest.raises(ValueError, match='variable "calls"'):
        model(LinenDecoder(LinenDecoding(), counts=True))
    module = LINEN["list"]
    variables = module.init(jax.random.key(0), tokens())
    shapes = jax.eval_shape(lambda: variables)
    with pytest.raises(ValueError, match="the shapes of batch_stats/block_0/BatchNorm_0/mean"):
        model(module, shapes)
    model(LinenDecoder(LinenDecoding()), {**variables, "params": shapes["params"]})
    scales = {fp8_ops.OVERWRITE_WITH_GRADIENT: {"block_0": {"scale": jnp.ones(())}}}
    with pytest.raises(ValueError, match="scales of FP8"):
        model(module, {**variables, **scales})


class Sowing(nn.Module):
    """A module that sows in its layers, which `nn.scan` may run, in submodules, and outside."""

    where: str
    scans: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(V, D)
        x = table(tokens)
        if self.where == "outside":
            self.sow("losses", "z", jnp.mean(x))
        if self.scans:
            axes: Any = {"params": 0, "losses": 0}
            layer = nn.scan(_SowingLayer, variable_axes=axes, split_rngs={"params": True}, length=4)
            return table.attend(layer(self.where, name="block")(x, None)[0])
        for i in range(4):
            x, _ = _SowingLayer(self.where, name=f"block_{i}")(x, None)
        return table.attend(x)


class _SowingLayer(nn.Module):
    where: str

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        if self.where == "layer":
            self.sow("losses", "z", jnp.mean(x**2), lambda a, b: a + b, lambda: jnp.zeros(()))
        return x + nn.remat(_SowingDense)(self.where, name="dense")(x), None


class _SowingDense(nn.Module):
    where: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Dense(D)(x)
        if self.where == "submodule":
            self.sow("losses", "z", jnp.mean(y**2))
        return y


@pytest.mark.parametrize(
    ("where", "scans", "path"),
    [
        ("layer", False, "losses/block_0/z"),
        ("submodule", False, "losses/block_0/dense/z"),
        ("outside", False, "losses/z"),
        ("layer", True, "losses/block/z"),
        ("submodule", True, "losses/block/dense/z"),
    ],
)
def test_losses_that_init_returned_are_never_dropped_in_silence(where, scans, path):
    """`init` returns what layers sow; a constant of that name would make `sow` do nothing."""
    module = Sowing(where, scans)
    variables = module.init(jax.random.key(0), tokens())
    assert "losses" in variables
    refused = pytest.raises(ValueError, match=f"make the values {path} besides parameters")
    with refused:
        jp_linen.model(module, variables, loss=loss, batch=tokens())
    with refused:
        model, params = jp_linen.model(module, variables, loss=loss)
        pipe = pipeline(model, "scheduled")
        jax.eval_shape(pipe.value_and_grad, pipe.shard(params), tokens())
    if where == "layer" and not scans:
        sown = {"losses": None}  # they are to be dropped
        _, params = jp_linen.model(module, variables, loss=loss, batch=tokens(), sown=sown)
        assert set(params) == {"params"}
