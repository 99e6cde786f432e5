"""Modules whose layers read what any layer before has returned, as their authors wrote them."""

from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_modules import D, EquinoxBlock, LinenBlock, V, next_token_loss, random_tokens

import jaxpipe as jp
from harness.hybrid_models import Residuals
from jaxpipe import equinox as jp_equinox
from jaxpipe import linen as jp_linen
from jaxpipe import nnx as jp_nnx

tokens, SIDE, C = partial(random_tokens, 16), 8, 4


def of_nnx(module: Any, batch: Any, loss: Any, **options: Any) -> Any:
    model, params = jp_nnx.model(module, loss=loss, batch=batch, **options)
    return model, params, batch, module(batch)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q, self.k, self.v = (nnx.Linear(D, D, use_bias=False, rngs=rngs) for _ in "qkv")

    def __call__(self, x: Any, source: Any) -> Any:
        return jax.nn.softmax(self.q(x) @ self.k(source).mT / D**0.5) @ self.v(source)


class Vision(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention, self.mlp = Attention(rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        return x + self.attention(x, x * mask) + jnp.tanh(self.mlp(x))


class Language(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0):
        self.attention, self.mlp = Attention(rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        return x + self.attention(x * mask, x) + jnp.tanh(self.mlp(x))


class Cross(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = Attention(rngs)

    def __call__(self, x: Any, image: Any) -> Any:
        return x + self.attention(x, image)


class VisionLanguage(nnx.Module):
    """Two towers; every fourth layer of one reads the other, through a norm between them."""

    def __init__(self, rngs: nnx.Rngs, has_norm: bool = True):
        self.patch, self.table = nnx.Linear(12, D, rngs=rngs), nnx.Embed(V, D, rngs=rngs)
        self.vision = nnx.List([Vision(rngs) for _ in range(4)])
        self.language = nnx.List([Cross(rngs) if i % 4 == 3 else Language(rngs) for i in range(8)])
        self.norm = nnx.RMSNorm(D, rngs=rngs) if has_norm else None

    def __call__(self, batch: Any) -> Any:
        image = self.patch(batch["patches"])
        mask = jnp.where(batch["patches"][..., :1] > -1, 1.0, 0.0)
        for layer in self.vision:
            image = layer(image, mask)
        if self.norm is not None:
            image = self.norm(image)
        x = self.table(batch["tokens"])
        mask = (batch["tokens"] > 2)[..., None].astype(x.dtype)
        for i, layer in enumerate(self.language):
            x = layer(x, image) if i % 4 == 3 else layer(x, mask)
        return self.table.attend(x)


def of_tokens(logits: Any, batch: Any) -> Any:
    return next_token_loss(logits, batch["tokens"])


def patches() -> Any:
    return {"patches": jax.random.normal(jax.random.key(1), (16, 5, 12)), "tokens": tokens()}


def vision_language() -> Any:
    module = VisionLanguage(nnx.Rngs(0))
    return of_nnx(module, patches(), of_tokens, layers=("vision", "language"))


class Down(nnx.Module):
    def __init__(self, c: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(c, c, (3, 3), rngs=rngs)
        self.half = nnx.Conv(c, 2 * c, (3, 3), strides=2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = x + nnx.gelu(self.conv(x))
        return h, self.half(h)


class Up(nnx.Module):
    def __init__(self, c: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3 * c, c, (3, 3), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.gelu(self.conv(x))


class UNet(nnx.Module):
    """What is concatenated on the way up is computed between layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem, self.head = (nnx.Conv(*n, (3, 3), rngs=rngs) for n in ((3, C), (C, 3)))
        self.down = nnx.List([Down(C * 2**i, rngs) for i in range(2)])
        self.middle = nnx.Conv(4 * C, 4 * C, (3, 3), rngs=rngs)
        self.up = nnx.List([Up(C * 2**i, rngs) for i in (1, 0)])

    def __call__(self, image: Any) -> Any:
        x, skips = self.stem(image), []
        for down in self.down:
            skip, x = down(x)
            skips.append(skip)
        x = self.middle(x)
        for up in self.up:
            wide = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = up(jnp.concatenate([wide, skips.pop()], axis=-1))
        return self.head(x)


def unet() -> Any:
    image = jax.random.normal(jax.random.key(2), (16, SIDE, SIDE, 3))

    def loss(y: Any, image: Any) -> Any:
        return jnp.mean((y - jnp.roll(image, 1, axis=1)) ** 2)

    return of_nnx(UNet(nnx.Rngs(1)), image, loss, layers=("down", "middle", "up"))


def residuals() -> Any:
    module = Residuals(nn.Embed(V, D), [LinenBlock() for _ in range(6)])
    variables = module.init(jax.random.key(0), tokens())
    options: Any = {"layers": "layer", "loss": next_token_loss, "batch": tokens()}
    model, params = jp_linen.model(module, variables, **options)
    return model, params, tokens(), module.apply(variables, tokens())


class Reading(eqx.Module):
    block: EquinoxBlock
    read: eqx.nn.Linear

    def __call__(self, x: Any, source: Any) -> Any:
        return self.block(x) + jax.vmap(self.read)(source)


class Translator(eqx.Module):
    """An encoder, and a decoder all of whose layers read what it returns."""

    table: Any
    encoder: list[Any]
    decoder: list[Any]

    def __init__(self, key: Any):
        keys = jax.random.split(key, 8)
        self.table = eqx.nn.Embedding(V, D, key=keys[0])
        self.encoder = [EquinoxBlock(k) for k in keys[1:4]]
        self.decoder = [Reading(EquinoxBlock(k), eqx.nn.Linear(D, D, key=k)) for k in keys[4:8]]

    def __call__(self, tokens: Any) -> Any:
        source = jax.vmap(self.table)(tokens[::-1])
        for block in self.encoder:
            source = block(source)
        x = jax.vmap(self.table)(tokens)
        for block in self.decoder:
            x = block(x, jnp.cumsum(source, axis=0) / 8)
        return x @ self.table.weight.T


def translator() -> Any:
    module = Translator(jax.random.key(0))
    model, params = jp_equinox.model(
        module,
        layers=(lambda module: module.encoder, lambda module: module.decoder),
        loss=next_token_loss,
        batch=tokens(),
    )
    return model, params, tokens(), jax.vmap(module)(tokens())


SLOW = pytest.mark.slow
ENGINES: dict[str, Any] = {
    "unpipelined": ({"stage": 1}, {"schedule": None}),
    "circular": ({"stage": 4}, {"schedule": "circular"}),
    "scheduled": ({"stage": 2, "fsdp": 2}, {"schedule": "zero_bubble_h1"}),
    "mpmd": ({"stage": 4}, {"schedule": "1f1b", "engine": "mpmd"}),
}
MODULES = [vision_language, unet, translator, residuals]
# Harness rows have the others: test_hybrid_models.
QUICK = {(translator, "scheduled"), (unet, "mpmd")}


@pytest.mark.parametrize(
    ("make", "engine"),
    [
        pytest.param(make, engine, marks=() if (make, engine) in QUICK else SLOW)
        for make in MODULES
        for engine in ENGINES
    ],
)
def test_the_numbers_are_those_of_the_module(make: Any, engine: str):
    model, params, batch, outputs = make()
    sizes, options = ENGINES[engine]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = jp.make_mesh(sizes, devices=devices)
    pipe = jp.pipeline(model, mesh=mesh, microbatches=4, **options)
    found = pipe.check(params, batch)
    assert found.largest <= 1e-5 and "the module's own call" in found.reference
    back = pipe.unshard(pipe.shard(params))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    got = pipe.jit(pipe.apply)(pipe.shard(params), batch)
    np.testing.assert_allclose(got, outputs, rtol=1e-4, atol=1e-5 * np.abs(outputs).max())


def test_kinds_are_those_of_the_module():
    model, *_ = vision_language()
    assert model.order == ("Vision",) * 4 + ("Language", "Language", "Language", "Cross") * 2
    assert model.shared  # the norm, which every layer that reads the image runs


def test_only_what_later_layers_read_is_handed_over():
    model, params, batch, _ = unet()
    mesh = jp.make_mesh({"stage": 5}, devices=jax.devices()[:5])
    pipe = jp.pipeline(model, schedule="gpipe", mesh=mesh, microbatches=4, engine="mpmd")
    program = pipe.jit(pipe.value).lower(pipe.shard(params), batch).program
    handed: list[set[Any]] = [set() for _ in range(4)]
    for sent in program.instructions:
        if type(sent).__name__ == "Send" and sent.to == sent.rank + 1:
            shapes = (buffer.value.aval.shape for buffer in sent.buffers)
            handed[sent.rank] |= {shape[2:] for shape in shapes if len(shape) == 5}
    first, second, deepest = ((SIDE // 2**i, SIDE // 2**i, C * 2**i) for i in range(3))
    all_levels = {first, second, deepest}
    assert handed == [{first, (*second[:2], 2 * C)}, all_levels, all_levels, {first, second}]


class Tied(VisionLanguage):
    """Reads the table of the embedding between layers."""

    def __call__(self, batch: Any) -> Any:
        image = self.patch(batch["patches"])
        for layer in self.vision:
            image = layer(image, 1.0)
        x = self.table(batch["tokens"]) + self.table(self.table.attend(image).argmax(-1)[:, :1])
        for i, layer in enumerate(self.language):
            x = layer(x, image if i % 4 == 3 else jnp.ones_like(x))
        return self.table.attend(x)


def test_what_runs_between_layers_is_refused_where_it_cannot_be_right():
    with pytest.raises(ValueError, match=r"Layers share the parameters table.*before or behind"):
        jp_nnx.model(
            Tied(nnx.Rngs(0)), layers=("vision", "language"), loss=of_tokens, batch=patches()
        )
    module = Translator(jax.random.key(0))

    def dropping(module: Any, row: Any, key: Any) -> Any:
        x = source = jax.vmap(module.table)(row)
        for block in module.encoder:
            source = block(source)
        source = jnp.where(jax.random.bernoulli(key, 0.5, source.shape), source, 0.0)
        for block in module.decoder:
            x = block(x, source)
        return x @ module.table.weight.T

    with pytest.raises(ValueError, match="depends on what layers return and on a dropout key"):
        jp_equinox.model(
            module,
            layers=(lambda module: module.encoder, lambda module: module.decoder),
            loss=next_token_loss,
            batch=tokens(),
            call=dropping,
        )


class Residual(nnx.Module):
    """A block whose attention reads the values of the first one too, and returns its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.values, self.mlp = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any, first: Any = None) -> Any:
        values = self.values(x)
        mixed = values if first is None else 0.5 * (values + first)
        return x + jnp.tanh(self.mlp(mixed)), values


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mlp = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any, scale: Any = None) -> Any:
        return x + jnp.tanh(self.mlp(x if scale is None else scale * x))


class Gathering(Plain):
    """Returns a dict with a key that it was not given."""

    def __call__(self, x: Any, scale: Any = None) -> Any:
        h = x["h"] if isinstance(x, dict) else x
        y = super().__call__(h)
        return {"h": y, "gate": jnp.tanh(y)}


class Calls(nnx.Module):
    """A module whose call is given, with a few blocks."""

    def __init__(self, kind: Any, body: Any, rngs: nnx.Rngs):
        self.table, self.body = nnx.Embed(V, D, rngs=rngs), body
        kinds = kind if isinstance(kind, tuple) else (kind,) * 4
        self.blocks = nnx.List([kind(rngs) for kind in kinds])

    def __call__(self, tokens: Any) -> Any:
        return self.table.attend(self.body(self, self.table(tokens)))


def value_residuals(module: Any, x: Any) -> Any:
    first = None
    for block in module.blocks:
        x, values = block(x, first)
        first = values if first is None else first
    return x


def hidden_states(module: Any, x: Any) -> Any:
    states = []
    for block in module.blocks:
        x = block(x)
        states.append(x)
    return sum(states) / len(states)


def without_the_last(module: Any, x: Any) -> Any:
    for block in module.blocks:
        before, x = x, block(x)
    return before + 0.0 * x


class Scaled(Plain):
    pass


def by_class(module: Any, x: Any) -> Any:
    for block in module.blocks:
        x = block(x, 0.5) if isinstance(block, Scaled) else block(x)
    return x


def gates(module: Any, x: Any) -> Any:
    found = []
    for block in module.blocks:
        x = block(x)
        found.append(x["gate"])
    return x["h"] * sum(found)


BODIES: dict[str, tuple[Any, Any]] = {
    "values of the first layer": (Residual, value_residuals),
    "all hidden states": (Plain, hidden_states),
    "a layer that nobody reads": (Plain, without_the_last),
    "by class": ((Scaled, Plain) * 2, by_class),
    "a key that appears": (Gathering, gates),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_read_is_what_the_module_reads(name: str):
    kind, body = BODIES[name]
    module = Calls(kind, body, nnx.Rngs(0))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def plain(params: Any) -> Any:
        own: Any = nnx.merge(graph, params, rest)
        return next_token_loss(own(tokens()), tokens())

    wanted, plain_grads = jax.value_and_grad(plain)(params)
    model, params = jp_nnx.model(module, loss=next_token_loss, batch=tokens())
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    pipe = jp.pipeline(model, schedule="1f1b", engine="mpmd", mesh=mesh, microbatches=4)
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), tokens())
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for a, b in zip(
        jax.tree.leaves(pipe.unshard(grads)), jax.tree.leaves(plain_grads), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_what_a_chain_hides_is_refused_without_an_example():
    module = Calls(Plain, hidden_states, nnx.Rngs(0))
    model, params = jp_nnx.model(module, loss=next_token_loss)
    mesh = jp.make_mesh({"stage": 1}, devices=jax.devices()[:1])
    pipe = jp.pipeline(model, schedule=None, mesh=mesh, microbatches=2)
    with pytest.raises(ValueError, match=r"depends on what `blocks\[0\]` returned.*Give `batch=`"):
        pipe.value(pipe.shard(params), tokens())


def test_numbers_that_are_drawn_for_a_layer_and_behind_the_last_are_refused():
    module = Translator(jax.random.key(0))

    def twice(module: Any, row: Any, key: Any) -> Any:
        first = jax.vmap(module.table)(row)
        first = x = jnp.where(jax.random.bernoulli(key, 0.5, first.shape), first, 0.0)
        for block in module.encoder:
            x = block(x)
        return (x + first) @ module.table.weight.T

    def apart(module: Any, row: Any, key: Any) -> Any:
        first, second = jax.random.split(key)
        x = jax.vmap(module.table)(row)
        x = jnp.where(jax.random.bernoulli(first, 0.5, x.shape), x, 0.0)
        for block in module.encoder:
            x = block(x)
        x = jnp.where(jax.random.bernoulli(second, 0.5, x.shape), x, 0.0)
        return x @ module.table.weight.T

    def in_the_middle(module: Any, row: Any, key: Any) -> Any:
        x = jax.vmap(module.table)(row)
        kept = jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
        for block in module.encoder:
            x = block(x)
        for block in module.decoder:
            x = block(x, kept)
        return (x * kept) @ module.table.weight.T

    options: Any = {"layers": "encoder", "loss": next_token_loss, "batch": tokens()}
    both = {"layers": (lambda module: module.encoder, lambda module: module.decoder)}
    for call, layers in ((twice, {}), (in_the_middle, both)):
        with pytest.raises(ValueError, match="depends on numbers that it has drawn by a dropout k"):
            jp_equinox.model(module, call=call, **options | layers)
    assert jp_equinox.model(module, call=apart, **options)[0].takes_key
