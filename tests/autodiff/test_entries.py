"""Programs read entries of buffers, and write to them, as arrays: without copies of stacks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpipe.autodiff.backward import split_backward
from jaxpipe.ir.graph import to_graph
from jaxpipe.ir.transforms import Entry, accumulate, call_with_entries

L, n, SLOTS = 3, 4, 2
x, ws = jnp.arange(1.0, n + 1) / n, jnp.arange(float(L * n * n)).reshape(L, n, n) / 50


def layers(x: Any, ws: Any) -> tuple[Any, Any]:
    def layer(x, w):
        return jnp.tanh(w @ x), x

    return lax.scan(layer, x, ws)


def backwards(x: Any, ws: Any) -> tuple[Any, Any]:
    """A loop from the last layer to the first, which returns a stack of what it reads."""
    return lax.scan(lambda x, w: (x @ w, w[0]), x, ws, reverse=True)


def with_entries(f: Callable, read: Sequence[int], written: Sequence[int]) -> list[tuple[int, ...]]:
    """Runs `f(x, ws)` with inputs and outputs in buffers, after a check of its numbers.

    Returns:
        The shapes of all intermediate values.
    """
    program, true = to_graph(jax.make_jaxpr(f)(x, ws)), f(x, ws)
    inputs = [Entry(jnp.stack([a - 7, a]), 1) if i in read else a for i, a in enumerate([x, ws])]
    into = {i: Entry(jnp.full((SLOTS, *true[i].shape), 7.0), 1) for i in written}

    def run(inputs, into):
        return call_with_entries(program, inputs, into)

    got = jax.jit(run)(inputs, into)
    for i, value in enumerate(true):
        if i in written:
            np.testing.assert_array_equal(got[i][0], jnp.full_like(value, 7))
        np.testing.assert_allclose(got[i][1] if i in written else got[i], value, rtol=1e-6)
    return shapes_in(jax.make_jaxpr(run)(inputs, into).jaxpr)


def shapes_in(jaxpr: Any) -> list[tuple[int, ...]]:
    found = []
    for equation in jaxpr.eqns:
        found += [out.aval.shape for out in equation.outvars]
        inner = [*equation.params.get("branches", ()), equation.params.get("jaxpr")]
        found += [s for each in inner if each for s in shapes_in(getattr(each, "jaxpr", each))]
    return found


@pytest.mark.parametrize("f", [layers, backwards])
def test_a_loop_reads_and_writes_entries_layer_by_layer(f):
    assert (L, n) in with_entries(f, [], [])
    shapes = with_entries(f, [1], [1])
    assert ws.shape not in shapes, "the weights of all layers are not copied out of their buffer"
    assert (L, n) not in shapes, "what the loop stacks is not an array of its own"


def test_what_no_loop_reads_or_writes_is_an_array():
    with_entries(lambda x, ws: (jnp.sum(ws) * x, 2 * x), [0, 1], [0, 1])
    with_entries(lambda x, ws: (*layers(x, ws), ws + 1), [1], [2])  # the loop reads, and others
    with_entries(lambda x, ws: (lambda y, s: (y, s, s + 1))(*layers(x, ws)), [], [1, 2])


def test_a_loop_adds_to_sums_in_entries_layer_by_layer():
    def f(ws, x):
        return jnp.sum(layers(x, ws)[0])

    split = split_backward(lambda w, x, batch, rng: f(w, x), ws, x, (), ())
    _, residuals = split.forward(ws, x, (), ())
    start = jnp.full_like(ws, 3.0)

    def backward(gradient):
        return split.backward(ws, (), (), residuals, jnp.ones(()), gradient)[0]

    buffer = jnp.stack([start - 7, start])
    found = jax.jit(lambda buffer: backward(Entry(buffer, 1)))(buffer)
    np.testing.assert_array_equal(found[0], buffer[0])
    np.testing.assert_allclose(found[1], 3 + jax.grad(f)(ws, x), rtol=1e-6)
    shapes = shapes_in(jax.make_jaxpr(lambda buffer: backward(Entry(buffer, 1)))(buffer).jaxpr)
    assert ws.shape not in shapes, "no sum of all layers is copied out of its buffer"


def test_an_input_from_one_entry_may_be_an_output_in_another():
    program = to_graph(jax.make_jaxpr(lambda x, ws: (x, ws))(x, ws))
    one, other = Entry(jnp.stack([ws - 7, ws]), 1), Entry(jnp.full((SLOTS, *ws.shape), 7.0), 0)
    _, written = call_with_entries(program, [x, one], {1: other})
    np.testing.assert_array_equal(written, jnp.stack([ws, jnp.full_like(ws, 7.0)]))
    _, unchanged = call_with_entries(program, [x, one], {1: one})
    np.testing.assert_array_equal(unchanged, one.buffer)


def test_a_sum_from_one_entry_may_be_written_to_another():
    def gradient(x, ws):
        return jax.grad(lambda ws: jnp.sum(layers(x, ws)[0]))(ws)

    program = accumulate(to_graph(jax.make_jaxpr(gradient)(x, ws)), [True])
    one, other = Entry(jnp.stack([ws - 7, ws]), 1), Entry(jnp.full((SLOTS, *ws.shape), 7.0), 0)
    (written,) = call_with_entries(program, [x, ws, one], {0: other})
    expected = jnp.stack([ws + gradient(x, ws), jnp.full_like(ws, 7.0)])
    np.testing.assert_allclose(written, expected, rtol=1e-6)
    (summed,) = call_with_entries(program, [x, ws, one], {0: one})
    np.testing.assert_allclose(summed, jnp.stack([ws - 7, expected[0]]), rtol=1e-6)


def test_a_loop_without_iterations():
    def f(x, ws):
        return layers(x, ws[:0])

    with_entries(f, [1], [1])


def test_halves_of_a_backward_read_what_a_forward_wrote():
    def stage(ws, x, batch_inputs, rng):
        del batch_inputs, rng
        return layers(x, ws)[0]

    split = split_backward(stage, ws, x, (), ())
    y, residuals = split.forward(ws, x, (), ())
    dy, start = jnp.ones_like(y), jnp.full_like(ws, 2.0)
    true, dx, _ = split.backward(ws, (), (), residuals, dy, start)

    @jax.jit
    def run(buffers, wgrad_buffers):
        stored = [Entry(b, 1) for b in buffers]
        _, buffers = split.forward(ws, x, (), (), stored)
        stored = [Entry(b, 1) for b in buffers]
        whole = split.backward(ws, (), (), stored, dy, start)[:2]
        into = [Entry(b, 0) for b in wgrad_buffers]
        dx, _, wgrad_buffers = split.input(ws, (), (), stored, dy, into)
        late = [e for e, is_late in zip(stored, split.for_weight, strict=True) if is_late]
        into = [Entry(b, 0) for b in wgrad_buffers]
        return whole, (split.weight(ws, (), (), late, into, start), dx)

    _, _, wgrads = split.input(ws, (), (), residuals, dy)
    unset = jax.tree.map(lambda r: jnp.full((SLOTS, *r.shape), jnp.nan), (residuals, wgrads))
    for gradient, dx_of in run(*unset):
        np.testing.assert_allclose(gradient, true, rtol=1e-6)
        np.testing.assert_allclose(dx_of, dx, rtol=1e-6)
