"""What docs/several-kinds.md says that errors say is what they say."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxpipe as jp

D, V = 8, 16
BATCH = {"tokens": jnp.zeros((8, 6), int)}
PAGE = Path(__file__).parents[2] / "docs/several-kinds.md"
ROWS = PAGE.read_text().split("## What is refused")[1].split("|---|---|---|\n")[1].splitlines()


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Flax promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any, bias: Any = 0.0) -> Any:
        return x + self.linear(x) + bias


class Counting(Block):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any, bias: Any = 0.0) -> Any:
        self.count[...] = self.count[...] + 1
        return super().__call__(x, bias)


def mapped(net: Any, x: Any) -> Any:
    for block in net.blocks:
        x = jax.vmap(block)(x)
    return x


def in_turn(net: Any, x: Any) -> Any:
    for block in net.blocks:
        x = block(x)
    return x


def without_the_last(net: Any, x: Any) -> Any:
    for block in list(net.blocks)[:-1]:
        x = block(x)
    return x


def dropping(net: Any, x: Any) -> Any:
    for block in net.blocks:
        x = block(x, net.dropout(x))
    return x


def reading_the_embedding(net: Any, x: Any) -> Any:
    for block in net.blocks:
        x = block(x) + net.embed.embedding[...].mean(0)
    return x


class Net(nnx.Module):
    def __init__(self, run: Callable, block: type[Block] = Block):
        rngs = nnx.Rngs(0)
        self.run, self.embed = run, nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([block(rngs) for _ in range(4)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        return self.run(self, self.embed(batch["tokens"]))


def loss(y: Any, batch: Any) -> Any:
    del batch
    return jnp.mean(y**2)


def of_nnx(run: Callable, block: type[Block] = Block) -> Callable:
    return lambda: jp.nnx.model(Net(run, block), layers="blocks", loss=loss, batch=BATCH)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.BatchNorm(use_running_average=False)(x)


class Linear(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(D)(x)


class LinenNet(nn.Module):
    layer: Any

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        x = nn.Embed(V, D)(batch["tokens"])
        for i in range(4):
            x = self.layer(name=f"block_{i}")(x)
        return x


def of_linen(layer: Any) -> Callable:
    def make() -> Any:
        net = LinenNet(layer)
        return jp.linen.model(net, net.init(jax.random.key(0), BATCH), loss=loss, batch=BATCH)

    return make


class EquinoxNet(eqx.Module):
    blocks: list
    again: list

    def __init__(self) -> None:
        self.blocks = [eqx.nn.Linear(D, D, key=jax.random.key(i)) for i in range(4)]
        self.again = self.blocks

    def __call__(self, batch: Any) -> Any:
        x = jnp.ones((*batch["tokens"].shape, D))
        for block in self.blocks:
            x = jax.vmap(jax.vmap(block))(x)
        return x


def of_equinox() -> Any:
    return jp.equinox.model(EquinoxNet(), layers="blocks", loss=loss, batch=BATCH)


def wider(w: Any, x: Any, batch: Any) -> Any:
    del w, batch
    return jnp.pad(x, ((0, 0), (0, 0), (0, 2)))


def same(w: Any, x: Any, batch: Any) -> Any:
    del w, batch
    return x


def of_functions(layer: Any, weights: Any, order: Any = None) -> Callable:
    def run() -> Any:
        model = jp.Model(
            lambda w, batch: w[batch["tokens"]],
            layer,
            lambda w, x, batch: jnp.mean(jax.tree.leaves(x)[0] ** 2),
            order=order,
        )
        mesh = jp.make_mesh({"stage": 4}, devices=jax.devices()[:4])
        pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=4)
        params = {"embed": jnp.ones((V, D)), "layers": [weights] * 4, "head": ()}
        return pipe.jit(pipe.value_and_grad).lower(pipe.shard(params), BATCH)

    return run


def with_a_bias(w: Any, x: Any, batch: Any) -> Any:
    del batch
    return {"x": x, "bias": w} if not isinstance(x, dict) else x


KINDS = {"first": with_a_bias, "others": same}
PROGRAMS: list[Callable | tuple[Callable, ...]] = [
    (of_nnx(in_turn, Counting), of_linen(Normed)),
    (of_nnx(mapped), of_linen(nn.remat(Linear))),
    of_nnx(without_the_last),
    of_nnx(dropping),
    of_nnx(reading_the_embedding),
    of_equinox,
    of_functions(KINDS, jnp.ones(D), ("first", "others", "others", "others")),
    of_functions({"down": wider, "flat": same}, jnp.ones(D), ("down", "flat") * 2),
    of_functions(lambda w, x, batch: x[..., :4] * w, jnp.ones(())),
    of_functions(same, {}),
    of_functions({"a": same}, jnp.ones(D), ("a", "c")),
]


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_an_error_is_the_one_on_the_page(index: int):
    assert len(ROWS) == len(PROGRAMS)
    texts = re.findall(r'"(.*?)"', ROWS[index].split("|")[2])
    programs = PROGRAMS[index]
    programs = programs if isinstance(programs, tuple) else (programs,)
    for i, run in enumerate(programs):
        text = texts[i % len(texts)]
        with pytest.raises(ValueError, match=re.escape(text)):
            run()
