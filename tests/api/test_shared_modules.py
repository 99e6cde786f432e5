"""Modules that share layers, as their authors wrote them, in a pipeline."""

from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_modules import D, EquinoxBlock, LinenBlock, V, next_token_loss, random_tokens

import jaxpipe as jp
from jaxpipe import equinox as jp_equinox
from jaxpipe import linen as jp_linen
from jaxpipe import nnx as jp_nnx

tokens, loss = partial(random_tokens, 16), next_token_loss


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, scale: float = 1.0):
        self.up, self.down = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)
        self.scale = scale

    def __call__(self, x: Any) -> Any:
        return x + self.scale * self.down(jnp.tanh(self.up(x)))


class Mamba(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.gate = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + jnp.sin(self.gate(x))


class Hybrid(nnx.Module):
    """Runs a block that other layers have too, and a layer of its own."""

    def __init__(self, shared: Block, rngs: nnx.Rngs):
        self.shared, self.mamba = shared, Mamba(rngs)

    def __call__(self, x: Any) -> Any:
        return self.mamba(self.shared(x))


class Decoder(nnx.Module):
    def __init__(self, blocks: list[Any], rngs: nnx.Rngs, shared: Any = None):
        self.table = nnx.Embed(V, D, rngs=rngs)
        self.blocks, self.shared = nnx.List(blocks), shared

    def layers(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, tokens: Any) -> Any:
        return self.table.attend(self.layers(self.table(tokens)))


class Albert(Decoder):
    def layers(self, x: Any) -> Any:
        for _ in range(8):
            x = self.shared(x)
        return x


class Zamba(Decoder):
    def layers(self, x: Any) -> Any:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i % 3 == 2:
                x = self.shared(x)
        return x


class Universal(Decoder):
    def layers(self, x: Any) -> Any:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x


def of_nnx(module: Any, layers: Any) -> Any:
    def plain(params: Any, batch: Any) -> Any:
        trained = nnx.clone(module)
        nnx.update(trained, params)
        return loss(trained(batch), batch)

    return (
        *jp_nnx.model(module, layers=layers, loss=loss, batch=tokens()),
        plain,
        module(tokens()),
    )


def albert() -> Any:
    rngs = nnx.Rngs(0)
    return of_nnx(Albert([], rngs, Block(rngs)), "shared")


def albert_in_a_list() -> Any:
    rngs = nnx.Rngs(0)
    return of_nnx(Decoder([Block(rngs)] * 8, rngs), "blocks")


def zamba() -> Any:
    rngs = nnx.Rngs(0)
    blocks = [Mamba(rngs) for _ in range(6)]
    return of_nnx(Zamba(blocks, rngs, Block(rngs)), ("blocks", "shared"))


def two_shared_blocks() -> Any:
    rngs = nnx.Rngs(0)
    shared = [Block(rngs), Block(rngs)]
    blocks: list[Any] = [Mamba(rngs) for _ in range(8)]
    for place in (1, 3, 4, 7):
        blocks[place] = Hybrid(shared[place % 2], rngs)
    return of_nnx(Decoder(blocks, rngs), "blocks")


def universal() -> Any:
    rngs = nnx.Rngs(0)
    blocks = [Block(rngs, scale) for scale in (1.0, 0.5, 1.0, 0.5)]
    return of_nnx(Universal(blocks, rngs), ("blocks",))


class LinenMixer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + jnp.sin(nn.Dense(D)(x))


class LinenZamba(nn.Module):
    every: int | None = 3

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table, shared = nn.Embed(V, D), LinenBlock(name="shared")
        x = table(tokens)
        for i in range(6):
            if self.every:
                x = LinenMixer(name=f"mixer_{i}")(x)
            if not self.every or i % self.every == 1:
                x = shared(x)
        return table.attend(x)


def of_linen(module: Any, layers: Any) -> Any:
    variables = module.init(jax.random.key(0), tokens())
    model, params = jp_linen.model(module, variables, layers=layers, loss=loss, batch=tokens())

    def plain(params: Any, batch: Any) -> Any:
        return loss(module.apply(params, batch), batch)

    return model, params, plain, module.apply(variables, tokens())


def linen_zamba() -> Any:
    return of_linen(LinenZamba(), ("mixer", "shared"))


def linen_albert() -> Any:
    return of_linen(LinenZamba(None), "shared")


class EquinoxModel(eqx.Module):
    table: Any
    blocks: tuple[Any, ...]
    shared: Any

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.table)(tokens)
        for i in range(6):
            x = self.shared(x) if i % 2 or not self.blocks else x
            x = self.blocks[i](x) if self.blocks else x
        return x @ self.table.weight.T


def of_equinox(num_blocks: int, layers: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), 10)
    blocks = [EquinoxBlock(key) for key in keys[1:8]]
    table = eqx.nn.Embedding(V, D, key=keys[0])
    module = EquinoxModel(table, tuple(blocks[1 : 1 + num_blocks]), blocks[0])
    model, params = jp_equinox.model(module, layers=layers, loss=loss, batch=tokens())

    def plain(params: Any, batch: Any) -> Any:
        return loss(jax.vmap(eqx.combine(params, module))(batch), batch)

    return model, params, plain, jax.vmap(module)(tokens())


def equinox_zamba() -> Any:
    return of_equinox(6, ("blocks", lambda module: module.shared))


def equinox_albert() -> Any:
    return of_equinox(0, "shared")


MODULES = [
    albert,
    albert_in_a_list,
    zamba,
    two_shared_blocks,
    universal,
    linen_zamba,
    linen_albert,
    equinox_zamba,
    equinox_albert,
]
ENGINES: dict[str, Any] = {
    "circular": ({"stage": 4}, {"schedule": "circular", "microbatches": 4}),
    "scheduled": ({"stage": 2, "fsdp": 2}, {"schedule": "zbv", "microbatches": 4}),
    "mpmd": ({"stage": 2}, {"schedule": "1f1b", "engine": "mpmd", "microbatches": 4}),
}


def pipeline(model: Any, engine: str) -> Any:
    sizes, options = ENGINES[engine]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jp.pipeline(model, mesh=jp.make_mesh(sizes, devices=devices), **options)


PAIRS = [(make, engine) for make in MODULES for engine in ENGINES]
IN_CI = [(make, [*ENGINES][i % len(ENGINES)]) for i, make in enumerate(MODULES)]


@pytest.mark.parametrize(
    ("make", "engine"),
    [pytest.param(*pair, marks=() if pair in IN_CI else pytest.mark.slow) for pair in PAIRS],
)
def test_the_numbers_are_those_of_the_module(make: Any, engine: str):
    model, params, plain, logits = make()
    pipe = pipeline(model, engine)
    wanted, plain_grads = jax.value_and_grad(plain)(params, tokens())
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), tokens())
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        pipe.unshard(grads),
        plain_grads,
    )
    outputs = pipe.jit(pipe.apply)(pipe.shard(params), tokens())
    np.testing.assert_allclose(outputs, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [albert, linen_zamba, equinox_zamba])
def test_steps_of_an_optimizer_are_those_of_the_module(make: Any):
    model, params, plain, _ = make()
    pipe, tx = pipeline(model, "mpmd"), optax.adam(1e-2, eps=1e-3)
    stored, state = pipe.shard(params), tx.init(params)
    own = pipe.optimizer(tx)
    own_state = own.init(stored)

    @pipe.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = pipe.value_and_grad(params, batch)
        updates, state = own.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def plain_step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = tx.update(jax.grad(plain)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):  # optax adds an int32 count to floats
        for _ in range(20):
            stored, own_state = step(stored, own_state, tokens())
            params, state = plain_step(params, state, tokens())
    got = pipe.unshard(stored)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, params)


def test_kinds_of_calls_are_shown():
    for make, shown in (
        (zamba, "6 Mamba, 2 Block"),
        (two_shared_blocks, "4 Mamba, 3 Hybrid 1, 1 Hybrid 2"),
        (universal, "2 Block(scale=1.0) 0, 2 Block(scale=0.5) 1, 2 Block(scale=1.0) 2"),
    ):
        model, params, *_ = make()
        pipe = pipeline(model, "mpmd")
        pipe.jit(pipe.value)(pipe.shard(params), tokens())
        assert shown in repr(pipe)


def test_what_is_no_chain_of_calls_is_refused_by_name():
    def refused(match: str, module: Any, layers: Any, batch: Any = tokens) -> None:
        with pytest.raises(ValueError, match=match):
            jp_nnx.model(module, layers=layers, loss=loss, batch=batch and batch())

    rngs = nnx.Rngs(0)
    blocks = [Mamba(rngs) for _ in range(6)]
    refused(
        r"(?s)shared.up.*name it too: `layers=\('blocks', 'sha",
        Zamba(blocks, rngs, Block(rngs)),
        "blocks",
    )
    refused(r"say so by a tuple of one name", Universal(blocks, rngs), "blocks")
    refused(
        "give `batch=`, an example of a batch, by wh", Albert([], rngs, Block(rngs)), "shared", None
    )
    both = "blocks", "shared"
    refused(r"names blocks\[0\], .* does not call", Albert(blocks, rngs, Block(rngs)), both)
    refused("shared, which the call of the", Decoder(blocks, rngs, Block(rngs)), both)
    refused("`table` is a stack of layers, and the call", Decoder(blocks, rngs), "table")
    refused("`layers` names no modules", Decoder(blocks, rngs), ())
    refused("blocks\\[0\\] is called once", Decoder([Block(rngs)], rngs), ("blocks",))
    tied = Decoder(blocks, rngs)
    setattr(blocks[3], "table", tied.table.embedding)  # noqa: B010
    refused(
        r"the parameters blocks\.3\.table, which the module reads before or beh", tied, "blocks"
    )


def test_an_equinox_module_in_two_places_is_refused():
    class TwoNames(EquinoxModel):
        alias: Any

    table = eqx.nn.Embedding(V, D, key=jax.random.key(0))
    block = EquinoxBlock(jax.random.key(1))
    module = TwoNames(table, (), block, block)
    with pytest.raises(ValueError, match=r"in several places of the module, \.shared, \.alias"):
        jp_equinox.model(module, layers="shared", loss=loss, batch=tokens())
