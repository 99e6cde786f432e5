"""Calls of a step: other shapes, other loops, and where the arrays are that go in and come out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import (
    Add,
    Concat,
    Max,
    MpmdArray,
    mark_stage_end,
    mpmd_jit_with_loop,
    treduce,
    treduce_i,
)
from jaxpipe.mpmd.jaxpp import GPipe, Interleaved1F1B, Std1F1B, ZeroBubble
from mpmd.small import (
    WIDTH,
    assert_close,
    assert_equal,
    batch,
    compare,
    gradients,
    groups,
    layer,
    layers,
    marked_loss,
    numbers,
    squared_error,
    training,
)


def test_a_second_call_with_another_batch_shape_or_number_of_microbatches():
    step, weights = gradients(Std1F1B(2)), layers(2)
    pipelined, plain = mpmd_jit_with_loop(step, groups(2)), jax.jit(step)
    for num_microbatches, rows in [(4, 2), (4, 5), (6, 2), (4, 2)]:
        data = batch(num_microbatches, rows)
        assert_close(pipelined(weights, *data), plain(weights, *data))


def test_static_argnums():
    """Functions, strings and numbers of stages; another one gives another program."""

    def step(weights: Any, kind: str, stages: int, data: Any, scale: Any, schedule: Any) -> Any:
        activation = {"tanh": jnp.tanh, "sin": jnp.sin}[kind]

        def loss(weights: Any, x: Any, y: Any) -> Any:
            for i in range(stages):
                x = mark_stage_end(activation(x @ weights[i]["in"] @ weights[i]["out"]))
            return squared_error(x, y) * scale

        return gradients(schedule, loss)(weights, *data)

    static = (1, 2, 5)
    pipelined = mpmd_jit_with_loop(step, groups(2), static_argnums=static)
    plain = jax.jit(step, static_argnums=static)
    for kind, stages, schedule in [
        ("tanh", 2, Std1F1B(2)),
        ("sin", 2, ZeroBubble(2)),
        ("tanh", 4, Interleaved1F1B(4, 2)),
    ]:
        args = layers(stages), kind, stages, batch(3), 2.0, schedule
        assert_close(pipelined(*args), plain(*args))


def of_stages(weights: Any, x: Any) -> Any:
    for w in weights:
        x = mark_stage_end(layer(w, x))
    return x


@pytest.mark.parametrize("schedule", [GPipe(3), Std1F1B(3), ZeroBubble(3)], ids=str)
def test_a_forward_only_loop(schedule: Any):
    """Evaluation: sums, maxima and all outputs in one loop, under any schedule."""

    def step(weights: Any, xs: Any, ys: Any) -> Any:
        def of_microbatch(batch: Any) -> Any:
            x = of_stages(weights, batch[0])
            return squared_error(x, batch[1]), jnp.max(x), x

        return treduce(of_microbatch, (xs, ys), schedule=schedule, operation=(Add, Max, Concat))

    compare(step, groups(3), layers(3), *batch(4))


def test_two_loops():
    """Training, and evaluation with the new weights in the same step."""

    def step(weights: Any, xs: Any, ys: Any) -> Any:
        value, grads = gradients(Std1F1B(2))(weights, xs, ys)
        new = jax.tree.map(lambda w, g: w - 0.1 * g / (1 + value), weights, grads)

        def of_microbatch(batch: Any) -> Any:
            return squared_error(of_stages(new, batch[0]), batch[1])

        after = treduce(of_microbatch, (xs, ys), schedule=GPipe(2), operation=Add)
        return new, value, after

    compare(step, groups(2), layers(2), *batch(4))


def test_the_second_loop_reads_what_the_first_makes():
    def step(weights: Any, xs: Any, ys: Any) -> Any:
        outs = treduce(lambda x: of_stages(weights, x), xs, schedule=GPipe(2), operation=Concat)
        return gradients(ZeroBubble(2))(weights, outs + xs, ys)

    compare(step, groups(2), layers(2), *batch(4))


def test_no_loop():
    def step(weights: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: 2 * w + jnp.sum(x), weights), jnp.sum(x), 3

    compare(step, groups(2), layers(2), numbers(3, 4))


def test_a_loop_with_max_and_concat_beside_gradients():
    """Integers and booleans have maxima too, and the gradients of the same loop are sums."""

    def step(weights: Any, xs: Any, ys: Any) -> Any:
        def loss(weights: Any, x: Any, y: Any) -> Any:
            x = of_stages(weights, x)
            more = {"max": jnp.max(x), "argmax": jnp.argmax(x), "any": jnp.any(x > 3), "out": x}
            return squared_error(x, y), more

        def of_microbatch(batch: Any) -> Any:
            return jax.value_and_grad(loss, has_aux=True)(weights, *batch)

        operation = ((Add, {"max": Max, "argmax": Max, "any": Max, "out": Concat}), Add)
        return treduce(of_microbatch, (xs, ys), schedule=Std1F1B(3), operation=operation)

    compare(step, groups(3), layers(3), *batch(4))


def test_treduce_i_gives_the_number_of_the_microbatch():
    def step(weights: Any, xs: Any) -> Any:
        def loss(weights: Any, i: Any) -> Any:
            return jnp.sum(of_stages(weights, xs[i]) * i.astype(jnp.float32))

        grad = jax.value_and_grad(loss)
        return treduce_i(lambda i: grad(weights, i), 4, ZeroBubble(2), operation=Add)

    compare(step, groups(2), layers(2), batch(4)[0])


@pytest.mark.parametrize("schedule", [Std1F1B(2), ZeroBubble(2)], ids=str)
def test_dropout_keys(schedule: Any):
    """Every stage and microbatch draws its own mask, and the backward the same as the forward."""

    def step(weights: Any, key: Any, xs: Any, ys: Any) -> Any:
        def loss(weights: Any, i: Any) -> Any:
            x, of_m = xs[i], jax.random.fold_in(key, i)
            for stage, w in enumerate(weights):
                mask = jax.random.bernoulli(jax.random.fold_in(of_m, stage), 0.8, x.shape)
                x = mark_stage_end(jnp.where(mask, jax.checkpoint(layer)(w, x), 0.0))
            return squared_error(x, ys[i])

        grad = jax.value_and_grad(loss)
        return treduce_i(lambda i: grad(weights, i), 4, schedule, operation=Add)

    compare(step, groups(2), layers(2), jax.random.key(3), *batch(4))


# Arrays that go in and come out.


def leaves_of(array: MpmdArray) -> list[jax.Array]:
    return list(array._partially_addressable_arrays.values())


def test_an_array_already_on_one_of_its_owners():
    """A weight of two stages comes on one of them, on both, or on another rank than its own."""
    weights = {"shared": numbers(5, WIDTH, WIDTH) / 4, "stages": layers(2)}

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights["stages"]:
            x = mark_stage_end(layer(w, x) + x @ weights["shared"])
        return squared_error(x, y)

    step = gradients(Std1F1B(2), loss)
    mesh, true = groups(2), jax.jit(step)(weights, *batch(3))
    compiled = mpmd_jit_with_loop(step, mesh).compile(weights, *batch(3))
    for rank in range(2):
        there = jax.device_put(weights, mesh.unstack[rank].devices.flat[0])
        assert_close(compiled(there, *batch(3)), true)
    of_shared = compiled.in_shardings[0][0]["shared"]
    assert of_shared.mpmd_idxs == (0, 1)
    for ranks in [(0,), (1,), (0, 1)]:
        arrays = {r: jax.device_put(weights["shared"], of_shared.of_rank(r)) for r in ranks}
        sharding = type(of_shared)(mesh, ranks, P())
        shared = MpmdArray(list(arrays.values()), sharding)
        assert_close(compiled(weights | {"shared": shared}, *batch(3)), true)


def test_what_a_step_returns_goes_into_the_next_one_as_it_is():
    """No donated array is copied: its memory is where it was."""

    def step(weights: Any, *data: Any) -> Any:
        return weights, gradients(Std1F1B(2))(weights, *data)

    pipelined = mpmd_jit_with_loop(step, groups(2), donate_argnums=0)
    weights, _ = pipelined(layers(2), *batch(3))
    before = memory(weights)
    again, _ = pipelined(weights, *batch(3))

    assert memory(again) == before


def test_saving_and_restoring_its_state(tmp_path: Any):
    """As docs/own-model.md says: two steps, a pause, and two more are as good as four."""
    optimizer = optax.adamw(1e-2)
    with jax.numpy_dtype_promotion("standard"):
        first = mpmd_jit_with_loop(training(optimizer, Std1F1B(2)), groups(2))
        second = mpmd_jit_with_loop(training(optimizer, Std1F1B(2)), groups(2))
        weights = layers(2)
        state = weights, optimizer.init(weights)
        for _ in range(2):
            state, _ = first(state, *batch(3))
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", like)
        assert_equal(restored, state)
        for _ in range(2):
            state, value = first(state, *batch(3))
            restored, again = second(restored, *batch(3))
        assert_equal((restored, again), (state, value))


def test_donated_arguments_are_deleted_and_others_are_not():
    def step(state: Any, kept: Any, xs: Any, ys: Any) -> Any:
        value, grads = gradients(Std1F1B(2))(state, xs, ys)
        more = jax.tree.map(lambda w, k: w + k, state, kept)
        return jax.tree.map(lambda w, g: w - 0.1 * g, more, grads), value

    weights = layers(2)
    true = jax.jit(step)(weights, weights, *batch(3))
    pipelined = mpmd_jit_with_loop(step, groups(2), donate_argnums=0)
    in_shardings, _ = pipelined.compile(weights, weights, *batch(3)).in_shardings

    def fresh() -> Any:
        def put(w: Any, sharding: Any) -> MpmdArray:
            ranks = sharding.mpmd_idxs
            arrays = {r: jax.device_put(np.array(w), sharding.of_rank(r)) for r in ranks}
            return MpmdArray(list(arrays.values()), sharding)

        return jax.tree.map(put, weights, in_shardings[0])

    state, kept, data = fresh(), fresh(), batch(3)
    result = pipelined(state, kept, *data)
    assert_close(result, true)
    assert all(w.is_deleted() for w in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves((kept, data)))
    assert_close(pipelined(result[0], kept, *data), jax.jit(step)(true[0], weights, *data))


def memory(tree: Any) -> set[int]:
    return {a.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for a in leaves_of(x)}


def test_new_weights_take_memory_of_old_ones_if_these_are_donated():
    optimizer = optax.sgd(0.1, momentum=0.9)
    with jax.numpy_dtype_promotion("standard"):
        state = layers(2), optimizer.init(layers(2))
        step, mesh = training(optimizer, Std1F1B(2)), groups(2)
        keeping, donating = (mpmd_jit_with_loop(step, mesh, donate_argnums=n) for n in ((), 0))
        state, _ = keeping(state, *batch(3))
        true, _ = keeping(state, *batch(3))
        assert memory(true).isdisjoint(memory(state))
        before = memory(state)
        state, _ = donating(state, *batch(3))
    assert_equal(state, true)
    assert len(before & memory(state)) >= len(before) // 2  # the rest takes that of gradients


def test_without_donation_nothing_is_deleted():
    step = gradients(ZeroBubble(2))
    pipelined = mpmd_jit_with_loop(step, groups(2))
    args = layers(2), *batch(4)
    first, second = pipelined(*args), pipelined(*args)
    assert_equal(second, first)
    assert not any(x.is_deleted() for x in jax.tree.leaves((args, first, second)))


def test_loss_and_gradients_of_one_device_per_rank_are_those_of_jit_to_the_last_bit():
    """The sums over microbatches run in the same order, so nothing differs."""
    args = layers(2), *batch(4)
    step = gradients(Std1F1B(2), marked_loss)
    assert_equal(mpmd_jit_with_loop(step, groups(2))(*args), jax.jit(step)(*args))


def test_a_call_with_another_shape_says_once_that_it_compiles(caplog):
    mesh = groups(2)
    step = mpmd_jit_with_loop(lambda x: 2 * x, mesh)
    for size in (2, 2, 3, 3):
        step(jnp.ones(size))
    said = [record.message for record in caplog.records if record.name == "jaxpipe.mpmd"]
    assert len(said) == 1 and "compiled once more" in said[0]
