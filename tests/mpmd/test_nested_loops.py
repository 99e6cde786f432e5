"""Loops over microbatches inside of other constructs: pipelined, or refused by name."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.mpmd.jaxpp import Std1F1B
from mpmd.small import batch, compare, gradients, groups, layer, layers, runs

update = gradients(Std1F1B(2))


def descent(weights: Any, *data: Any) -> Any:
    value, grads = update(weights, *data)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def in_a_scan(weights: Any, xs: Any, ys: Any) -> Any:
    """Two steps in one program, the second batch first."""

    def turn(weights: Any, data: Any) -> Any:
        x, y, scale = data
        weights, value = descent(weights, scale * x, y)
        return weights, (value, scale)

    scales = jnp.array([0.5, 2.0])
    data = jnp.stack([xs, ys]), jnp.stack([ys, xs]), scales
    return lax.scan(turn, weights, data, reverse=True)


def in_a_fori_loop(weights: Any, xs: Any, ys: Any) -> Any:
    return lax.fori_loop(0, 2, lambda i, weights: descent(weights, xs, ys)[0], weights)


def in_a_scan_in_a_scan(weights: Any, xs: Any, ys: Any) -> Any:
    def turn(weights: Any, _: Any) -> Any:
        return in_a_fori_loop(weights, xs, ys), None

    return lax.scan(turn, weights, length=1)[0]


@pytest.mark.parametrize("f", [in_a_scan, in_a_fori_loop, in_a_scan_in_a_scan])
def test_a_loop_in_a_scan_of_static_length_is_pipelined(f: Callable):
    args = layers(2), *batch(2)
    compare(f, groups(2), *args)
    program = mpmd_jit_with_loop(f, groups(2)).lower(*args).program
    names = [i.name for i in runs(program) if i.actions]
    assert names.count("bwd_0__1") == 2, "each turn runs its own tasks"


def in_a_long_scan(weights: Any, xs: Any, ys: Any) -> Any:
    return lax.fori_loop(0, 100, lambda i, weights: descent(weights, xs, ys)[0], weights)


def in_a_while_loop(weights: Any, xs: Any, ys: Any) -> Any:
    return lax.while_loop(
        lambda state: state[1] > 0.5, lambda state: descent(state[0], xs, ys), (weights, 1.0)
    )


def in_a_cond(weights: Any, xs: Any, ys: Any) -> Any:
    return lax.cond(jnp.sum(xs) > 0, lambda: update(weights, xs, ys)[0], lambda: 0.0)


def in_a_switch_in_a_scan(weights: Any, xs: Any, ys: Any) -> Any:
    return lax.scan(lambda c, _: (c, in_a_cond(weights, xs, ys)), 0.0, length=2)


def in_jit_with_shardings(weights: Any, xs: Any, ys: Any) -> Any:
    whole = NamedSharding(groups(2).unstack[0].abstract_mesh, P())  # pyright: ignore[reportArgumentType]
    return jax.jit(descent, out_shardings=whole)(weights, xs, ys)


def in_a_shard_map(weights: Any, xs: Any, ys: Any) -> Any:
    specs = P(), P(), P()
    return jax.shard_map(descent, in_specs=specs, out_specs=(P(), P()), check_vma=False)(
        weights, xs, ys
    )


def in_another_loop(weights: Any, xs: Any, ys: Any) -> Any:
    def of_microbatch(i: Any) -> Any:
        x = mark_stage_end(layer(weights[0], i))
        return jnp.sum(x), update(weights, xs, ys)[1]

    return treduce(of_microbatch, xs, Std1F1B(2))


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (in_a_long_scan, "a `lax.scan` or `lax.fori_loop` of 100 turns, which is written out"),
        (in_a_while_loop, "inside `lax.while_loop`, or `lax.fori_loop` with traced bounds, where"),
        (in_a_cond, "inside `lax.cond`, where it would run without a pipeline. Choose in Python"),
        (in_a_switch_in_a_scan, "inside `lax.cond`, where it would run without a pipeline."),
        (in_jit_with_shardings, "inside `jax.jit` with shardings of its own, where it would run"),
        (in_a_shard_map, "inside `jax.shard_map`, where it would run without a pipeline."),
        (in_another_loop, "inside of a stage, by a function that another `treduce` runs"),
    ],
)
def test_a_loop_elsewhere_is_refused_and_never_silently_not_pipelined(f: Callable, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        mpmd_jit_with_loop(f, groups(2)).lower(layers(2), *batch(2))


def test_a_mark_in_a_while_loop_or_outside_of_a_loop_in_a_cond_is_refused():
    def in_a_while(weights: Any, xs: Any, ys: Any) -> Any:
        def of_microbatch(batch: Any) -> Any:
            x = mark_stage_end(layer(weights[0], batch[0]))
            turn = lambda x: mark_stage_end(layer(weights[1], x))  # noqa: E731
            return jnp.sum(lax.while_loop(lambda x: x[0, 0] < 0, turn, x)), 0.0

        return treduce(of_microbatch, (xs, ys), Std1F1B(2))

    def outside(weights: Any, xs: Any, ys: Any) -> Any:
        value, _ = update(weights, xs, ys)
        return lax.cond(value > 0, mark_stage_end, lambda x: x, value)

    for f, message in (
        (in_a_while, "A stage ends inside `lax.while_loop`, or `lax.fori_loop` with traced bounds"),
        (outside, "A stage ends inside `lax.cond` within the function, where it cannot be cut."),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            mpmd_jit_with_loop(f, groups(2)).lower(layers(2), *batch(2))
