"""How results of microbatches become one: what `operation` says, and its default."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.mpmd import Add, Concat, Max, mark_stage_end, mpmd_jit_with_loop, treduce, treduce_i
from jaxpipe.mpmd.jaxpp import GPipe, Std1F1B, ZeroBubble
from mpmd.small import assert_close, batch, compare, groups, layer, layers, squared_error

MICROBATCHES = 3


def loss(weights: Any, x: Any, y: Any) -> Any:
    """(loss, (outputs, a count)) of two stages."""
    x = mark_stage_end(layer(weights[0], x))
    x = layer(weights[1], x)
    return squared_error(x, y), (x, jnp.int32(1))


def one_by_one(weights: Any, xs: Any, ys: Any) -> list[Any]:
    grad = jax.value_and_grad(loss, has_aux=True)
    return [grad(weights, x, y) for x, y in zip(xs, ys, strict=True)]


def test_without_an_operation_losses_and_metrics_are_stacked_and_gradients_added():
    """JaxPP's default, for what `value_and_grad` returns, with and without a pipeline."""

    def step(weights: Any, *data: Any) -> Any:
        grad = jax.value_and_grad(loss, has_aux=True)
        return treduce(lambda of_m: grad(weights, *of_m), data, Std1F1B(2))

    args = layers(2), *batch(MICROBATCHES)
    (values, (outs, ones)), grads = compare(step, groups(2), *args)
    assert values.shape == (MICROBATCHES,) and ones.shape == (MICROBATCHES,)
    assert outs.shape == args[1].shape
    true = [grads_of_m for _, grads_of_m in one_by_one(*args)]
    total = jax.tree.map(lambda *g: sum(g), *true)
    assert_close(grads, total)


def test_the_default_needs_a_pair_of_results():
    message = (
        "`operation` is by default (Concat(axis=0), Add), which is not a prefix of what a "
        "microbatch returns: PyTreeDef(*). Give one operation for all results, such as "
        "`operation=Add`"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        treduce(jnp.sum, jnp.ones((2, 3)), GPipe(2))


@dataclass(frozen=True)
class SumOfSquares:
    """An operation of a user: in float32, whatever comes."""

    scale: float

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(a.shape, float(n), jnp.float32)

    def update(self, state: jax.Array, update: jax.Array, index: Any) -> jax.Array:
        scale = self.scale * (1 + index).astype(jnp.float32)
        return state + scale * update.astype(jnp.float32) ** 2


@pytest.mark.parametrize("schedule", [Std1F1B(2), ZeroBubble(2)], ids=str)
def test_operations_of_users_and_a_tree_of_operations_that_is_a_prefix(schedule: Any):
    def step(weights: Any, *data: Any) -> Any:
        grad = jax.value_and_grad(loss, has_aux=True)
        operation = ((SumOfSquares(0.5), (Concat(1), Max)), [SumOfSquares(2.0), Add])
        return treduce(lambda of_m: grad(weights, *of_m), data, schedule, 0, operation)

    (_, (outs, _)), _ = compare(step, groups(2), layers(2), *batch(MICROBATCHES))
    rows, width = batch(1)[0].shape[1:]
    assert outs.shape == (rows, MICROBATCHES, width)


@pytest.mark.parametrize("axis", [1, -1])
def test_treduce_counts_microbatches_along_an_axis(axis: int):
    """`axis` is where arrays are sliced, `Concat(axis)` where results are stacked."""

    def step(weights: Any, xs: Any) -> Any:
        def of_microbatch(x: Any) -> Any:
            return layer(weights[1], mark_stage_end(layer(weights[0], x)))

        return treduce(of_microbatch, xs, GPipe(2), axis=axis, operation=Concat(axis))

    xs = jnp.moveaxis(batch(MICROBATCHES)[0], 0, axis)
    assert compare(step, groups(2), layers(2), xs).shape == xs.shape


def test_the_class_concat_is_its_instance():
    def step(x: Any) -> Any:
        return treduce(mark_stage_end, x, GPipe(2), operation=Concat)

    assert jax.jit(step)(jnp.arange(3.0)).shape == (3,)


def test_operations_that_do_not_fit():
    x = jnp.ones((2, 3))

    class Halves:
        def state(self, n: int, a: Any) -> Any:
            return jnp.zeros(a.shape, a.dtype)

        def update(self, state: Any, update: Any, index: Any) -> Any:
            return state[:1]

        def __repr__(self) -> str:
            return "Halves"

    for operation, message in (
        ("add", "`operation` has 'add'. Give Add, Max, Concat() or an object with the methods"),
        (Concat(2), "`operation` has Concat(axis=2) for a result with 1 dims. Give an axis from"),
        (Halves(), "`operation` has Halves, whose `state` returns [((3,), 'float32')] and whose"),
        (
            (Add, Add),
            "`operation` is (Add, Add), which is not a prefix of what a microbatch returns",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            treduce(lambda x: x, x, GPipe(2), operation=operation)
    with pytest.raises(ValueError, match=r"dims at `axis` 1 are .* number of microbatches"):
        treduce(lambda x: x, (x, jnp.ones((2, 2))), GPipe(2), axis=1, operation=Add)
    with pytest.raises(ValueError, match="`length`, the number of microbatches, is 0"):
        treduce_i(lambda i: i, 0, GPipe(2), operation=Add)


def test_an_operation_that_reads_a_traced_array_is_refused():
    def f(k: Any, xs: Any) -> Any:
        class Scaled:
            def state(self, n: int, a: Any) -> Any:
                return jnp.zeros(a.shape, a.dtype)

            def update(self, state: Any, update: Any, index: Any) -> Any:
                return state + update * k

        return treduce(mark_stage_end, xs, GPipe(1), operation=Scaled())

    with pytest.raises(ValueError, match="whose `update` reads an array that is traced outside"):
        mpmd_jit_with_loop(f, groups(1))(jnp.float32(2), jnp.ones((2, 3)))


def test_a_loop_that_is_differentiated_or_mapped_says_where_to_put_that():
    def loop(x: Any) -> Any:
        return treduce(jnp.sum, x, GPipe(2), operation=Add)

    with pytest.raises(ValueError, match=r"inside a function that is differentiated\. Call `jax"):
        jax.grad(loop)(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"inside `jax\.vmap`\. Call `jax\.vmap` inside of the"):
        jax.vmap(loop)(jnp.ones((4, 2, 3)))
