"""Arrays between the two worlds: divided over all devices, or whole on some groups."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import (
    MpmdSharding,
    mpmd_jit_with_loop,
    mpmd_to_spmd_reshard,
    spmd_to_mpmd_reshard,
)
from jaxpipe.mpmd.jaxpp import Std1F1B
from mpmd.small import assert_close, assert_equal, batch, gradients, groups, layers, on_host

SPEC = {"in": P("fsdp", "tensor"), "out": P("tensor", "fsdp")}
WORLDS = {
    "all axes": P(("stage", "fsdp"), "tensor"),
    "groups only": P("stage"),
    "within groups only": P("tensor", "fsdp"),
    "nowhere divided": P(),
}
OWNERS = [(0,), (1,), (1, 0)]
AXES = {"fsdp": 2, "tensor": 2}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("ranks", OWNERS, ids=str)
def test_there_and_back_with_fsdp(ranks: tuple[int, ...], world: str):
    """Every shard on every device has its numbers, and all of it comes back to the last bit."""
    mesh = groups(2, **AXES)
    over_all = NamedSharding(mesh.jax_mesh, WORLDS[world])
    true = on_host(layers(2))
    spmd = jax.device_put(true, over_all)
    where = [{name: MpmdSharding(mesh, ranks, spec) for name, spec in SPEC.items()}] * 2
    there = spmd_to_mpmd_reshard(mesh, spmd, where)
    assert jax.tree.map(lambda x: x.mpmd_sharding, there) == where
    for leaf, numbers in zip(jax.tree.leaves(there), jax.tree.leaves(true), strict=True):
        for rank in range(2):
            array = leaf.on_rank(rank)
            assert (array is not None) == (rank in ranks)
            if array is not None:
                assert array.sharding == leaf.mpmd_sharding.of_rank(rank)
                assert array.devices() == set(mesh.unstack[rank].devices.flat)
                for shard in array.addressable_shards:
                    assert shard.data.size == leaf.size // 4
                    np.testing.assert_array_equal(shard.data, numbers[shard.index])
    assert all(x.is_deleted() for x in jax.tree.leaves(spmd))
    assert_equal(there, true)
    back = mpmd_to_spmd_reshard(mesh, there, over_all)
    assert all(x.sharding == over_all for x in jax.tree.leaves(back))
    assert_equal(back, true)
    assert all(x.is_deleted() for x in jax.tree.leaves(there))


def test_a_state_that_comes_from_one_program_and_returns_to_it():
    """Steps of both kinds in turn are steps of `jax.jit` on one device."""
    mesh = groups(2, **AXES)
    step, data = gradients(Std1F1B(2)), batch(4, 4)
    over_all = NamedSharding(mesh.jax_mesh, P("fsdp", "tensor"))

    def update(weights: Any, *data: Any) -> Any:
        _, grads = step(weights, *data)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    pipelined = mpmd_jit_with_loop(
        update, mesh, in_specs=([SPEC] * 2, None, None), out_specs=[SPEC] * 2
    )
    compiled = pipelined.compile(layers(2), *data)
    spmd = jax.device_put(layers(2), over_all)
    true = layers(2)
    shardings = jax.tree.map(lambda _: over_all, true)
    of_all = jax.jit(update, out_shardings=shardings)
    for _ in range(2):
        mpmd = compiled(spmd_to_mpmd_reshard(mesh, spmd, compiled.in_shardings[0][0]), *data)
        spmd = of_all(mpmd_to_spmd_reshard(mesh, mpmd, shardings), *data)
        true = jax.jit(update)(jax.jit(update)(true, *data), *data)
    assert_close(spmd, true)


def test_a_threshold_bounds_what_is_on_its_way_and_the_same_array_twice_moves_twice():
    """Also from a device that is one of the group's: what is deleted takes nothing with it."""
    mesh = groups(2)
    x, y = (jax.device_put(x, mesh.unstack[0].devices.flat[0]) for x in layers(1)[0].values())
    true = on_host([x, x, y])
    where = MpmdSharding(mesh, {0}, P())
    there = spmd_to_mpmd_reshard(mesh, [x, x, y], (where, where, where), threshold=1)
    assert x.is_deleted() and y.is_deleted()
    assert_equal(there, true)
    kept = mpmd_to_spmd_reshard(mesh, there, NamedSharding(mesh.jax_mesh, P()), donate=False)
    assert_equal(there, true)
    assert_equal(kept, true)
    with pytest.raises(ValueError, match=r"`threshold` is 0\. Give a number of bytes"):
        mpmd_to_spmd_reshard(mesh, there, where.sharding, threshold=0)


def test_arrays_of_numpy_are_moved_and_stay():
    mesh, x = groups(2), np.arange(3, dtype=np.float32)
    assert_equal(spmd_to_mpmd_reshard(mesh, [x], [MpmdSharding(mesh, {1}, P())]), [x])


def test_shardings_that_do_not_fit_the_arrays_are_named():
    mesh = groups(2)
    arrays = {"a": layers(1), "b": layers(1)[0]["in"]}
    where = MpmdSharding(mesh, {0}, P())
    with pytest.raises(ValueError, match=r"`mpmd_shardings\['a'\]` is None\. Give a MpmdSharding"):
        spmd_to_mpmd_reshard(mesh, arrays, {"a": None, "b": where})
    with pytest.raises(ValueError, match=r"`mpmd_shardings` is a dict of 1 \(\['b'\]\), and the"):
        spmd_to_mpmd_reshard(mesh, arrays, {"b": where})
    assert not arrays["b"].is_deleted()


def test_an_array_that_no_group_needs_goes_to_the_first():
    mesh = groups(2)
    nowhere = MpmdSharding(mesh, (), P())
    x = spmd_to_mpmd_reshard(mesh, layers(1)[0]["in"], nowhere)
    assert x.mpmd_idxs == (0,)
