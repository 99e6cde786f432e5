"""Donated arguments, and that nothing is deleted which the caller still has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import (
    MpmdArray,
    MpmdSharding,
    mpmd_jit_by_yield,
    mpmd_jit_with_loop,
    mpmd_to_spmd_reshard,
    spmd_to_mpmd_reshard,
)
from jaxpipe.mpmd.jaxpp import Std1F1B
from mpmd.small import assert_close, batch, gradients, groups, layers, numbers


def test_donated_arguments_are_deleted_wherever_they_were():
    """On the host's first device, on all devices, or on their own groups, as with `jax.jit`.

    A donated argument that no result is like stays, as there.
    """

    def step(weights: Any, xs: Any, ys: Any) -> Any:
        value, grads = gradients(Std1F1B(2))(weights, xs, ys)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    data = batch(3)
    true = jax.jit(step)(layers(2), *data)
    mesh = groups(2)
    pipelined = mpmd_jit_with_loop(step, mesh, donate_argnums=0, donate_argnames="xs")
    everywhere = NamedSharding(mesh.jax_mesh, P())
    for weights in (layers(2), jax.device_put(layers(2), everywhere)):
        new, value = pipelined(weights, *data)
        assert all(w.is_deleted() for w in jax.tree.leaves(weights))
        assert_close((new, value), true)
    again, _ = pipelined(new, *data)
    assert all(w.is_deleted() for w in jax.tree.leaves(new))
    with pytest.raises(RuntimeError, match=r"MpmdArray\(shape=\(8, 16\), .* has been deleted"):
        pipelined(new, *data)
    assert not any(x.is_deleted() for x in data)
    assert not any(w.is_deleted() for w in jax.tree.leaves(again))


def test_what_is_donated_and_returned_as_it_is_keeps_its_numbers():
    """Frozen weights of a state: the result shares their memory, and the argument is gone."""

    def step(state: Any, xs: Any, ys: Any) -> Any:
        _, grads = gradients(Std1F1B(2))(state["new"], xs, ys)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, state["new"], grads)
        return {"new": new, "frozen": state["frozen"], "twice": state["frozen"]}

    pipelined, plain = mpmd_jit_with_loop(step, groups(2), donate_argnums=0), jax.jit(step)

    def first() -> Any:
        return {"new": layers(2), "frozen": numbers(7, 3, 5), "twice": numbers(8, 3, 5)}

    state, true = first(), first()
    for _ in range(3):
        before = state
        state, true = pipelined(state, *batch(3)), plain(true, *batch(3))
        assert_close(state, true)
        assert all(w.is_deleted() for w in jax.tree.leaves(before["new"]))
    assert before["frozen"].is_deleted() and not state["frozen"].is_deleted()


def test_an_array_that_is_donated_and_given_twice_is_refused_before_anything_runs():
    """`jax.jit` refuses it too, with an error of XLA."""
    step = mpmd_jit_with_loop(lambda x, y: x["w"] + y, groups(1), donate_argnums=0)
    x = step({"w": jnp.ones(3)}, jnp.ones(3))
    for given in (x, jax.device_put(jnp.ones(3), jax.devices()[1]), jnp.ones(3)):
        message = r"`args\[0\]\['w'\]` is donated, and `args\[1\]` is the same array"
        with pytest.raises(ValueError, match=message):
            step({"w": given}, given)
        assert not given.is_deleted()
    there = MpmdArray(x.local_arrays, x.mpmd_sharding)
    with pytest.raises(ValueError, match="is the same array"):
        step({"w": x}, there)
    np.testing.assert_array_equal(step({"w": x}, x.on_rank(0) + 1), np.full(3, 5.0))


def test_donated_memory_is_free_after_the_call():
    step = mpmd_jit_with_loop(lambda x: x + 1, groups(1), donate_argnums=0)
    x = step(jax.device_put(np.zeros(1000), jax.devices()[1]))
    alive = {id(a) for a in jax.live_arrays()}
    for _ in range(3):
        x = step(x)
    assert len([a for a in jax.live_arrays() if id(a) not in alive and a.shape == (1000,)]) <= 1
    np.testing.assert_array_equal(x, np.full(1000, 4.0, np.float32))


# As with `jax.jit`, each result has memory of its own.


def pointers(tree: Any) -> list[int]:
    arrays = [a for x in jax.tree.leaves(tree) for a in getattr(x, "local_arrays", [x])]
    return [a.unsafe_buffer_pointer() for a in arrays]


@pytest.mark.parametrize("jit", [mpmd_jit_with_loop, mpmd_jit_by_yield], ids=lambda f: f.__name__)
def test_what_is_returned_unchanged_or_twice_is_an_array_of_its_own(jit: Any):
    """Donating one of them deletes neither the argument nor the others."""
    mesh = groups(1)

    def step(x: Any, y: Any) -> Any:
        new = y + 1
        return {"same": x, "again": x, "new": new, "twice": new}

    same = jit(step, mesh)
    on_group = jax.device_put(numbers(1, 5), mesh.unstack[0].devices.flat[0])
    in_group = same(numbers(2, 5), on_group)["new"]
    assert jax.jit(step)(on_group, on_group)["same"] is not on_group
    spend = mpmd_jit_with_loop(lambda x: x * 2, mesh, donate_argnums=0)
    for x in (on_group, in_group):
        result = same(x, on_group)
        found = pointers((x, on_group, result) if x is in_group else (x, result))
        assert len(set(found)) == len(found)
        for name in result:
            spend(result[name])
        assert all(y.is_deleted() for y in result.values())
        np.testing.assert_array_equal(x, numbers(1, 5) + (1.0 if x is in_group else 0.0))
    assert not on_group.is_deleted()


def test_donated_and_returned_unchanged_it_is_the_argument_that_goes():
    """It takes the place of the result that it is, so an equal one beside it stays."""
    step = mpmd_jit_with_loop(lambda x, y: y, groups(1), donate_argnums=(0, 1))
    first = mpmd_jit_with_loop(lambda x: (x + 1, x + 2), groups(1))
    x, y = first(jnp.zeros(3))
    before = pointers(y)
    result = step(x, y)
    assert y.is_deleted() and not x.is_deleted() and pointers(result) == before
    np.testing.assert_array_equal(result, np.full(3, 2.0))


def test_a_reshard_that_keeps_its_source_shares_nothing_with_it():
    mesh = groups(2)
    x = jax.device_put(numbers(1, 4), NamedSharding(mesh.jax_mesh, P()))
    there = spmd_to_mpmd_reshard(mesh, x, MpmdSharding(mesh, {0, 1}, P()), donate=False)
    back = mpmd_to_spmd_reshard(mesh, there, NamedSharding(mesh.unstack[0], P()), donate=False)
    there.delete()
    np.testing.assert_array_equal(back, x)
