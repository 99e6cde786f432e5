"""Gradients are added where they are made: no stacked gradient is a buffer of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpipe.autodiff.backward import pullback, split_backward
from jaxpipe.ir.graph import to_graph
from jaxpipe.ir.transforms import accumulate

L, n = 3, 4
x, ws = jnp.arange(1.0, n + 1), jnp.ones((L, n, n)) * 0.3


def added(f: Callable, gradients: Sequence[bool], arguments: Sequence[Any], sums: Sequence[Any]):
    """The jaxpr of `f` with sums, after a check of its numbers."""
    whole = accumulate(to_graph(jax.make_jaxpr(f)(*arguments)), gradients)
    got, true, remaining = jax.jit(whole.__call__)(*arguments, *sums), f(*arguments), iter(sums)
    for output, value, is_gradient in zip(got, true, gradients, strict=True):
        start = next(remaining) if is_gradient else jnp.zeros_like(value)
        assert output.dtype == start.dtype
        np.testing.assert_allclose(output, start + value.astype(start.dtype), rtol=1e-5)
    return jax.make_jaxpr(whole.__call__)(*arguments, *sums).jaxpr


def stacked(jaxpr: Any) -> list[tuple[int, ...]]:
    """Shapes of what the loops of a program stack, those in loops and choices too."""
    shapes = []
    for equation in jaxpr.eqns:
        params = equation.params
        for inner in (params.get("jaxpr"), *params.get("branches", ())):
            if inner is not None:
                shapes += stacked(getattr(inner, "jaxpr", inner))
        if equation.primitive.name == "empty":  # where a graph's loop writes its slices
            shapes.append(equation.outvars[0].aval.shape)
        if equation.primitive.name == "scan":
            body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
            outputs = zip(equation.outvars, body.outvars, strict=True)
            shapes += [
                out.aval.shape for out, inner in outputs if out.aval.shape != inner.aval.shape
            ]
    return shapes


def names(jaxpr: Any) -> list[str]:
    return [equation.primitive.name for equation in jaxpr.eqns]


def outer_products(x: Any, ws: Any) -> tuple[Any, Any]:
    def turn(x, w):
        return jnp.tanh(w @ x), jnp.outer(x, x)

    return lax.scan(turn, x, ws)


def test_a_loop_adds_slices_in_place():
    jaxpr = added(outer_products, (False, True), (x, ws), (ws,))
    assert stacked(jaxpr) == []
    without = jax.make_jaxpr(outer_products)(x, ws).jaxpr
    assert stacked(without) == [(L, n, n)]


@pytest.mark.parametrize("how", [{"reverse": True}, {"unroll": 2}, {"unroll": True}])
def test_so_it_does_backwards_and_written_out(how: dict[str, Any]):
    def f(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(w @ x), jnp.outer(x, x)), x, ws, **how)

    assert stacked(added(f, (False, True), (x, ws), (ws,))) == []


def test_a_loop_may_stack_a_constant():
    def f(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(w @ x), (jnp.outer(x, x), 2.0)), x, ws)

    graph = to_graph(jax.make_jaxpr(f)(x, ws))
    for got, true in zip(graph(x, ws), jax.tree.leaves(f(x, ws)), strict=True):
        np.testing.assert_array_equal(got, true)


def test_what_is_read_elsewhere_too_is_stacked_as_before():
    def f(x, ws):
        x, products = outer_products(x, ws)
        return x + jnp.sum(products), products

    assert stacked(added(f, (False, True), (x, ws), (ws,))) == [(L, n, n)]


@pytest.mark.parametrize(
    "move",
    [
        lambda g: g.astype(jnp.bfloat16).astype(jnp.float32),
        lambda g: g.reshape(L, n * n),
        lambda g: g.reshape(L, 2, n // 2, n).transpose(0, 3, 1, 2),
        lambda g: jnp.squeeze(g[:, None], 1),
        jax.jit(lambda g: g.reshape(L, n, 1, n)),
    ],
)
def test_what_only_moves_numbers_moves_into_the_loop(move: Callable):
    def f(x, ws):
        x, products = outer_products(x, ws * 0)  # of zeros and of x: exact in bfloat16
        return x, move(products)

    shape = jax.eval_shape(f, x, ws)[1].shape
    assert stacked(added(f, (False, True), (x, ws), (jnp.ones(shape),))) == []


def test_a_move_across_the_first_dim_does_not():
    def f(x, ws):
        x, products = outer_products(x, ws)
        return x, products.transpose(1, 0, 2)

    assert stacked(added(f, (False, True), (x, ws), (jnp.ones((n, L, n)),))) == [(L, n, n)]


def test_loops_in_loops_add_slices_of_slices():
    def f(x, ws):
        return lax.scan(outer_products, x, ws)

    arguments = x, jnp.stack([ws, ws])
    assert stacked(added(f, (False, True), arguments, (arguments[1],))) == []


def test_a_choice_hands_the_sum_through_where_there_is_nothing_to_add():
    def f(x, ws, present):
        skip = lambda x, ws: (x, jnp.zeros_like(ws))  # noqa: E731
        return lax.cond(present, outer_products, skip, x, ws)

    for present in (True, False):
        jaxpr = added(f, (False, True), (x, ws, jnp.bool(present)), (ws,))
        assert stacked(jaxpr) == [] and "add" not in names(jaxpr)


def test_rows_are_scattered_onto_the_sum():
    def f(rows, index):
        return (jnp.zeros((7, n), rows.dtype).at[index].add(rows),)

    rows, index = jnp.ones((5, n), jnp.bfloat16), jnp.array([0, 3, 3, 6, 1])
    jaxpr: Any = added(f, (True,), (rows, index), (jnp.ones((7, n)),))
    assert "scatter-add" in names(jaxpr) and not [
        e for e in jaxpr.eqns if e.primitive.name == "add" and e.outvars[0].aval.shape == (7, n)
    ]


def test_all_else_is_added_at_the_end_and_zeros_are_not_added_at_all():
    def f(x):
        return jnp.sin(x), jnp.zeros(n), x

    jaxpr = added(f, (True, True, True), (x,), (x, x, x))
    assert names(jaxpr).count("add") == 2


def test_under_vmap_sums_have_their_own_rows():
    whole = accumulate(to_graph(jax.make_jaxpr(outer_products)(x, ws)), (False, True))
    rows = [jnp.stack([a, -a]) for a in (x, ws, ws)]
    _, got = jax.vmap(whole.__call__)(*rows)
    for i in range(2):
        true = rows[2][i] + outer_products(rows[0][i], rows[1][i])[1]
        np.testing.assert_allclose(got[i], true, rtol=1e-5)


def stage(w: Any, x: Any, batch_inputs: Any, rng: Any) -> Any:
    return lax.scan(lambda x, m: (x + jnp.tanh(x @ m), None), x, w)[0]


def test_the_backward_of_a_stage_needs_no_room_for_its_stacked_gradients():
    w, x = jnp.ones((16, 64, 64)), jnp.ones((2, 64))
    parts, pulled = split_backward(stage, w, x, (), ()), pullback(stage, w, x, (), ())
    _, residuals = parts.forward(w, x, (), ())
    _, _, link = parts.input(w, (), (), residuals, x)
    kept = [r for r, keep in zip(residuals, parts.for_weight, strict=True) if keep]

    def temporary(f: Callable, *arguments: Any) -> int:
        compiled = jax.jit(f, donate_argnums=(0,)).lower(*arguments).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole = temporary(lambda g: parts.backward(w, (), (), residuals, x, g), w)
    later = temporary(lambda g: parts.weight(w, (), (), kept, link, g), w)
    apart = temporary(lambda g: g + pulled.backward(w, (), (), residuals, x)[0], w)
    assert max(whole, later) < w.nbytes / 2 < w.nbytes <= apart
