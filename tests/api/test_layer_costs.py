"""Layers are divided over stages by what they cost."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_modules import D, T, V, next_token_loss, random_tokens

import jaxpipe as jp
from jaxpipe import nnx as jp_nnx
from jaxpipe.api._layouts import counts_by_cost, even_counts


def attention(w: Any, x: Any, batch: Any) -> Any:
    q, k, v = (x @ w[name] for name in "qkv")
    return x + jax.nn.softmax(q @ k.mT) @ v


def mlp(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def conv(w: Any, x: Any, batch: Any) -> Any:
    return x + jax.lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )


def recurrent(w: Any, x: Any, batch: Any) -> Any:
    def step(h: Any, token: Any) -> Any:
        h = jnp.tanh(h @ w + token)
        return h, h

    return x + jax.lax.scan(step, x[:, 0], x.swapaxes(0, 1), unroll=True)[1].swapaxes(0, 1)


WIDTH, LENGTH, ROWS = 32, 16, 4


def example() -> tuple[jp.Model, Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 40))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / WIDTH

    layers = {
        "attention": [{name: normal(WIDTH, WIDTH) for name in "qkv"}],
        "mlp": [{"up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH)}] * 2,
        "conv": [normal(3, WIDTH, WIDTH)],
        "recurrent": [normal(WIDTH, WIDTH)],
    }
    functions = {"attention": attention, "mlp": mlp, "conv": conv, "recurrent": recurrent}
    model = jp.Model(lambda w, batch: batch @ w, functions, lambda w, x, batch: jnp.mean(x @ w))
    params = {"embed": normal(8, WIDTH), "layers": layers, "head": normal(WIDTH, 1)}
    return model, params, normal(ROWS, LENGTH, 8)


def test_operations_are_those_that_xla_counts():
    model, params, batch = example()
    functions: Any = model.layer
    ours = jp.layer_flops(model, params, batch)
    x = batch @ params["embed"]
    for kind, function in functions.items():
        compiled = (
            jax.jit(lambda w, x, f=function: f(w, x, batch, ()))
            .lower(params["layers"][kind][0], x)
            .compile()
        )
        xla = dict(compiled.cost_analysis() or {})["flops"]
        assert abs(ours[kind] - xla) <= 0.1 * xla, (kind, ours[kind], xla)


def test_the_largest_stage_is_the_smallest_possible():
    random = np.random.default_rng(0)
    for _ in range(200):
        num_layers = int(random.integers(1, 10))
        num_stages = int(random.integers(1, num_layers + 1))
        costs = random.choice([0.0, 1.0, 2.0, 3.5], num_layers)
        if not costs.any():
            continue

        def largest(ends: Any, costs: Any = costs) -> float:
            return max(costs[a:b].sum() for a, b in itertools.pairwise(ends))

        cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
        best = min(largest((0, *cut, num_layers)) for cut in cuts)
        counts = counts_by_cost([*map(float, costs)], num_stages)
        even = even_counts(num_layers, num_stages)
        found = largest((0, *itertools.accumulate(counts)))
        assert sum(counts) == num_layers and min(counts) >= 1 and len(counts) == num_stages
        assert found == best or (counts == even and found * 0.95 <= best)


def test_equal_costs_are_equal_numbers():
    for num_layers, num_stages in itertools.product(range(1, 12), range(1, 6)):
        if num_layers >= num_stages:
            even = even_counts(num_layers, num_stages)
            assert counts_by_cost([2.0] * num_layers, num_stages) == even


@pytest.mark.parametrize("engine", ["mpmd", "scheduled"])
def test_layers_are_placed_by_their_operations(engine: str):
    model, params, batch = example()
    batch = jnp.tile(batch, (2, 1, 1))
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    options: Any = {"schedule": "1f1b", "mesh": mesh, "microbatches": 4, "engine": engine}
    even = jp.pipeline(model, **options)
    placed = jp.pipeline(
        replace(model, layer_costs=jp.layer_flops(model, params, batch)), **options
    )
    ids = [
        [*map(len, pipe.plan(pipe.shard(params)["layers"].num_layers).layout.stage_layer_ids)]
        for pipe in (even, placed)
    ]
    assert ids == [[3, 2], [2, 3]]  # one of two mlps goes to a convolution and a recurrence
    assert placed.check(params, batch).largest <= 1e-5


class Wide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(D, 8 * D, rngs=rngs), nnx.Linear(8 * D, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(x)))


class Narrow(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.linear(x)


class Hybrid(nnx.Module):
    """Many small layers in front of a few large ones."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([Narrow(rngs) for _ in range(9)] + [Wide(rngs) for _ in range(3)])

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.blocks:
            x = layer(x)
        return self.embed.attend(x)


def test_layers_of_modules_are_placed_by_their_operations():
    tokens, module = random_tokens(8), Hybrid(nnx.Rngs(0))
    model, params = jp_nnx.model(module, loss=next_token_loss, batch=tokens)
    assert model.layer_costs is not None
    assert model.layer_costs["Wide"] > 10 * model.layer_costs["Narrow"]
    assert model.layer_costs["Narrow"] >= 2 * 8 * T * D * D
    mesh = jp.make_mesh({"stage": 4}, devices=jax.devices()[:4])
    for engine in ("mpmd", "scheduled"):
        pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=4, engine=engine)
        layout = pipe.plan(pipe.shard(params)["layers"].num_layers).layout
        assert [*map(len, layout.stage_layer_ids)] == [9, 1, 1, 1]
        assert pipe.check(params, tokens).largest <= 1e-5
    told = jp.pipeline(
        model, schedule="1f1b", mesh=mesh, microbatches=4, layers_per_stage=[3, 3, 3, 3]
    )
    layout = told.plan(told.shard(params)["layers"].num_layers).layout
    assert [*map(len, layout.stage_layer_ids)] == [3, 3, 3, 3]


def test_costs_that_are_none_are_refused():
    model, params, batch = example()
    with pytest.raises(ValueError, match=r"`layer_costs` has \['mlp'\], and the kinds of `layer`"):
        replace(model, layer_costs={"mlp": 1.0})
    with pytest.raises(ValueError, match="Give costs of 0 or more"):
        replace(model, layer_costs=dict.fromkeys(params["layers"], -1.0))
    with pytest.raises(ValueError, match=r"and the kinds of `layer` are \[\]"):
        replace(model, layer=mlp, layer_costs={"mlp": 1.0})
    with pytest.raises(ValueError, match="one kind of layers, which all cost the same"):
        jp.layer_flops(replace(model, layer=mlp), params, batch)
