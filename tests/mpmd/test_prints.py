"""Prints and callbacks in a step of several groups: as often as without groups, and once each."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.mpmd import Add, mark_stage_end, mpmd_jit_with_loop, treduce_i
from jaxpipe.mpmd.jaxpp import GPipe, Interleaved1F1B, Std1F1B, ZeroBubble
from mpmd.small import assert_close, batch, gradients, groups, layer, layers, runs, squared_error

MICROBATCHES = 4


class Seen:
    """What callbacks were given, by the name of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def show(self, name: str, x: Any) -> None:
        jax.debug.callback(lambda x: self.calls.append((name, np.asarray(x))), x)

    def counts_of(self, f: Callable, *args: Any) -> tuple[Counter, Any]:
        self.calls.clear()
        result = jax.block_until_ready(jax.tree.map(np.asarray, f(*args)))
        jax.effects_barrier()
        return Counter((name, x.tobytes()) for name, x in self.calls), result


def same_as_jit(seen: Seen, f: Callable, mesh: Any, *args: Any) -> Counter:
    """Checks that callbacks and results are those of `jax.jit`, and returns how many have which
    name."""
    counts, result = seen.counts_of(mpmd_jit_with_loop(f, mesh), *args)
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], "nothing")):
        true_counts, true = seen.counts_of(jax.jit(f), *args)
    assert_close(result, true)
    names = Counter(name for name, _ in seen.calls)
    found: Counter = Counter()
    for (name, _), count in counts.items():
        found[name] += count
    assert found == names
    exact = {key for key in true_counts if key[0].startswith("exact")}
    assert {key: counts[key] for key in exact} == {key: true_counts[key] for key in exact}
    return found


def loss_with_prints(seen: Seen, wrap: Callable = lambda f: f) -> Callable:
    """Each stage shows its number and microbatch, its weights, and activations in a scan."""

    def stage(i: int, w: Any, x: Any, m: Any) -> Any:
        seen.show(f"exact stage {i}", m)
        seen.show(f"exact weights {i}", jnp.max(w["in"]))

        def turn(x: Any, _: Any) -> Any:
            seen.show(f"turn {i}", x[0, 0])
            return layer(w, x), None

        x = jax.lax.scan(turn, x, None, 2)[0]
        jax.lax.cond(m > 1, lambda x: seen.show(f"late {i}", x), lambda x: None, x[0, 0])
        return x

    def loss(weights: Any, x: Any, y: Any, m: Any) -> Any:
        for i, w in enumerate(weights):
            x = wrap(lambda w, x, m, i=i: stage(i, w, x, m))(w, x, m)
            if i < len(weights) - 1:
                x = mark_stage_end(x)
        value = squared_error(x, y)
        seen.show("loss", value)
        return value

    return loss


def test_a_print_of_an_array_that_two_stages_read_is_one_print():
    seen, (shared, _) = Seen(), layers(2)

    def step(shared: Any, *data: Any) -> Any:
        seen.show("exact shared", shared["in"])
        return gradients(Std1F1B(2), loss)([shared, shared], *data)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return squared_error(layer(weights[1], mark_stage_end(layer(weights[0], x))), y)

    found = same_as_jit(seen, step, groups(2), shared, *batch(MICROBATCHES))
    assert found == Counter({"exact shared": 1})


SCHEDULES = {
    "1f1b": (Std1F1B(2), 2),
    "zero bubble": (ZeroBubble(2), 2),
    "interleaved": (Interleaved1F1B(4, 2), 4),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_prints_once_for_each_microbatch(name: str, devices: int):
    schedule, stages = SCHEDULES[name]
    seen = Seen()
    args = layers(stages), *batch(MICROBATCHES), jnp.arange(MICROBATCHES)
    mesh = groups(2) if devices == 1 else groups(2, data=2)
    found = same_as_jit(seen, gradients(schedule, loss_with_prints(seen)), mesh, *args)
    for i in range(stages):
        assert found[f"exact stage {i}"] == found[f"exact weights {i}"] == MICROBATCHES
        assert found[f"turn {i}"] == 2 * MICROBATCHES
        assert found[f"late {i}"] == MICROBATCHES - 2
    assert found["loss"] == MICROBATCHES


def test_what_is_rematerialised_prints_as_often_as_plain_checkpoint_does():
    seen = Seen()
    loss = loss_with_prints(seen, jax.checkpoint)
    args = layers(2), *batch(MICROBATCHES), jnp.arange(MICROBATCHES)
    for schedule in (Std1F1B(2), ZeroBubble(2)):
        found = same_as_jit(seen, gradients(schedule, loss), groups(2), *args)
        assert found["exact stage 0"] == found["exact stage 1"] == 2 * MICROBATCHES


def test_a_print_in_what_is_rematerialised_leaves_it_in_the_backward():
    """Otherwise the forward would compute it twice, and keep it."""
    seen = Seen()

    def bytes_of(loss: Callable) -> dict[str, int]:
        step = mpmd_jit_with_loop(gradients(Std1F1B(2), loss), groups(2))
        args = layers(2), *batch(2), jnp.arange(2)
        return {
            i.name: sum(b.value.num_bytes for b in i.writes if b.value.aval.shape)
            for i in runs(step.lower(*args).program)
        }

    def stage(w: Any, x: Any, show: bool) -> Any:
        if show:
            seen.show("x", jnp.sum(jnp.tanh(x @ w["in"])))
        return layer(w, x)

    def loss(weights: Any, x: Any, y: Any, m: Any, *, show: bool) -> Any:
        del m
        for w in weights:
            x = mark_stage_end(jax.checkpoint(lambda w, x: stage(w, x, show))(w, x))
        return squared_error(x, y)

    shown, hidden = (bytes_of(lambda *args, s=s: loss(*args, show=s)) for s in (True, False))
    assert shown == hidden


def test_prints_of_gradients_and_cotangents_run_in_the_backward():
    seen = Seen()

    @jax.custom_vjp
    def look(x: Any) -> Any:
        return x

    def backward(_: Any, ct: Any) -> Any:
        seen.show("cotangent", ct[0, 0])
        return (ct,)

    look.defvjp(lambda x: (x, None), backward)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = mark_stage_end(layer(w, look(x)))
        return squared_error(x, y)

    def step(schedule: Any, weights: Any, xs: Any, ys: Any) -> Any:
        def of_microbatch(m: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(weights, xs[m], ys[m])
            for i, grad in enumerate(grads):
                seen.show(f"gradient {i}", jnp.max(grad["in"]))
            return value, grads

        return treduce_i(of_microbatch, MICROBATCHES, schedule, Add)

    for schedule in (Std1F1B(2), ZeroBubble(2)):
        found = same_as_jit(
            seen, partial(step, schedule), groups(2), layers(2), *batch(MICROBATCHES)
        )
        # No cotangent of the inputs is asked for, so only that of stage 1 is shown.
        assert found == {"cotangent": 4, "gradient 0": 4, "gradient 1": 4}


def test_around_the_loop_each_print_runs_once_where_what_it_shows_is():
    """A weight stays on the group of its stage, although it is shown before the loop."""
    seen = Seen()

    def step(weights: Any, xs: Any, ys: Any) -> Any:
        seen.show("exact constant", 3.0)
        for i, w in enumerate(weights):
            seen.show(f"exact weights {i}", jnp.max(w["in"]))
        scale = jax.lax.scan(lambda c, x: (c + x, seen.show("turn", x)), 0.0, jnp.arange(3.0))[0]

        def loss(weights: Any, x: Any, y: Any) -> Any:
            for w in weights:
                x = mark_stage_end(layer(w, x * scale))
            return squared_error(x, y)

        value, grads = gradients(Std1F1B(2), loss)(weights, xs, ys)
        seen.show("value", value)
        total = sum(jnp.sum(x**2) for x in jax.tree.leaves(grads))
        seen.show("norm", total)
        return value, jax.tree.map(lambda w, g: w - g, weights, grads)

    args = layers(2), *batch(2)
    found = same_as_jit(seen, step, groups(2), *args)
    once = ("exact constant", "exact weights 0", "exact weights 1", "value", "norm")
    assert found == dict.fromkeys(once, 1) | {"turn": 3}
    compiled = mpmd_jit_with_loop(step, groups(2)).lower(*args)
    ranks = [ranks for _, ranks in compiled.program.inputs]
    assert ranks[:4] == [(0,), (0,), (1,), (1,)]


def test_a_forward_alone_and_a_function_without_a_loop_print():
    seen = Seen()
    loss = loss_with_prints(seen)
    weights, (xs, ys) = layers(2), batch(2)

    def forward(weights: Any) -> Any:
        return treduce_i(lambda m: loss(weights, xs[m], ys[m], m), 2, GPipe(2), Add)

    found = same_as_jit(seen, forward, groups(2), weights)
    assert found["exact stage 0"] == found["exact stage 1"] == 2
    no_loop = same_as_jit(seen, lambda x: [seen.show("exact x", x), x + 1][1], groups(2), 1.0)
    assert no_loop == {"exact x": 1}


def test_a_print_of_a_divided_value_is_the_text_of_plain_jit(capfd: pytest.CaptureFixture):
    def loss(weights: Any, x: Any, y: Any) -> Any:
        x = jax.lax.with_sharding_constraint(x, jax.P("data"))
        jax.debug.print("input {x}", x=x)
        x = mark_stage_end(layer(weights[0], x))
        return squared_error(layer(weights[1], x), y)

    def lines(f: Callable, mesh: Any) -> list[str]:
        with jax.set_mesh(mesh):
            jax.block_until_ready(f(layers(2), *batch(2)))
            jax.effects_barrier()
        return sorted(capfd.readouterr().out.split("input"))

    mesh = groups(2, data=2)
    step = gradients(Std1F1B(2), loss)
    plain = jax.sharding.Mesh(jax.devices()[:2], "data")
    true = lines(jax.jit(step), plain)
    assert len(true) == 3
    assert lines(mpmd_jit_with_loop(step, mesh), jax.sharding.Mesh(jax.devices()[:1], "x")) == true
