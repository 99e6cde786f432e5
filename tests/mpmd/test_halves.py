"""Backwards in halves over whatever a stage is made of: Flax, remat, jit, scan; stage 0 too."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpipe.mpmd import mark_stage_end, mpmd_jit_with_loop
from jaxpipe.mpmd.jaxpp import DualPipeV, ZeroBubble
from jaxpipe.schedules import Op
from mpmd.small import (
    WIDTH,
    batch,
    compare,
    gradients,
    groups,
    layer,
    layers,
    marked_loss,
    numbers,
    runs,
    squared_error,
)

SCHEDULES = {"ZeroBubble": ZeroBubble(2), "DualPipeV": DualPipeV(4)}


class Block(nn.Module):
    """As in the tutorial."""

    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=WIDTH)(x)
        x = nn.LayerNorm()(x + y)
        y = nn.Dense(features=WIDTH)(nn.gelu(nn.Dense(features=2 * WIDTH)(x)))
        return nn.LayerNorm()(x + y)


class Transformer(nn.Module):
    num_stages: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(self.num_stages):
            x = mark_stage_end(Block(name=f"block_{i}")(x))
        return x


@pytest.mark.parametrize("name", SCHEDULES)
def test_halves_over_remat_of_jit_of_a_flax_module(name: str):
    schedule = SCHEDULES[name]
    model = Transformer(schedule.num_stages)
    xs, ys = (numbers(seed, 4, 2, 4, WIDTH) for seed in (0, 1))
    params = jax.jit(model.init)(jax.random.key(0), xs[0])

    def loss(params: Any, x: Any, y: Any) -> Any:
        return squared_error(model.apply(params, x), y)

    compare(gradients(schedule, loss), groups(2), params, xs, ys)


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def scanned_with_remat(w: Any, x: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, w)[0]


@pytest.mark.parametrize("stage", [scanned, scanned_with_remat])
@pytest.mark.parametrize("name", SCHEDULES)
def test_halves_over_layers_in_a_scan(name: str, stage: Callable):
    schedule = SCHEDULES[name]
    flat = layers(3 * schedule.num_stages)
    weights = [
        jax.tree.map(lambda *w: jnp.stack(w), *flat[3 * i : 3 * i + 3])
        for i in range(schedule.num_stages)
    ]

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return marked_loss(weights, x, y, stage=stage)

    compare(gradients(schedule, loss), groups(2), weights, *batch(4))


@pytest.mark.parametrize("name", SCHEDULES)
def test_halves_of_stage_0(name: str):
    """Nothing before it waits for its I, so what only that computes has no I, and all is in W."""
    schedule = SCHEDULES[name]
    args = layers(schedule.num_stages), *batch(4)
    step = gradients(schedule)
    compare(step, groups(2), *args)
    program = mpmd_jit_with_loop(step, groups(2)).lower(*args).program
    ops = {
        stage: {
            action.op for run in runs(program) for action in run.actions if action.stage == stage
        }
        for stage in range(schedule.num_stages)
    }
    assert ops[0] == {Op.F, Op.W}
    assert all(ops[stage] == {Op.F, Op.I, Op.W} for stage in range(1, schedule.num_stages))


def test_halves_of_stage_0_with_an_embedding_before_it():
    """The gradient of a table of tokens is made where the input's gradient arrives."""
    weights = {"table": numbers(7, 16, WIDTH), "stages": layers(2)}
    tokens = jax.random.randint(jax.random.key(1), (4, 2), 0, 16)

    def loss(weights: Any, tokens: Any, y: Any) -> Any:
        return marked_loss(weights["stages"], weights["table"][tokens], y)

    compare(gradients(ZeroBubble(2), loss), groups(2), weights, tokens, batch(4)[1])
