"""Meshes of groups, and arrays that live on some of them."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import MpmdArray, MpmdMesh, MpmdSharding, mpmd_jit_with_loop
from jaxpipe.mpmd.jaxpp import Std1F1B
from mpmd.small import batch, compare, gradients, groups, layers, numbers


def test_a_mesh_unstacks_into_the_meshes_of_its_groups():
    mesh = groups(4, fsdp=2)
    assert mesh.mpmd_dim == 4
    devices = mesh.jax_mesh.devices.reshape(4, 2)
    for rank, group in enumerate(mesh.unstack):
        assert (group.shape["stage"], group.shape["fsdp"], group.size) == (1, 2, 2)
        assert list(group.devices.flat) == list(devices[rank].flat)
        assert group.axis_types == mesh.jax_mesh.axis_types


def test_a_submesh_has_the_groups_that_are_named_in_their_order():
    mesh = groups(4, fsdp=2)
    part = mesh.mpmd_submesh([3, 1])
    assert isinstance(part, MpmdMesh) and part.mpmd_dim == 2
    assert part.unstack == [mesh.unstack[3], mesh.unstack[1]]


def test_the_groups_may_lie_along_any_axis():
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = MpmdMesh(jax.sharding.Mesh(devices, ("fsdp", "stage")), "stage")
    assert [list(group.devices.flat) for group in mesh.unstack] == devices.T.tolist()
    specs = [{"in": P("fsdp"), "out": P(None, "fsdp")}] * 4
    step = gradients(Std1F1B(4))
    compare(step, mesh, layers(4), *batch(4), in_specs=(specs, None, None), out_specs=(P(), specs))


def array(x: Any, ranks: tuple[int, ...]) -> MpmdArray:
    where = MpmdSharding(groups(3, fsdp=2), ranks, P("fsdp") if x.ndim else P())
    copies = {rank: jax.device_put(x, where.of_rank(rank)) for rank in ranks}
    return MpmdArray(list(copies.values()), where)


def test_an_array_of_groups_reads_like_a_jax_array():
    x = numbers(1, 4, 2)
    on_two = array(x, (2, 0))
    assert (on_two.shape, on_two.dtype, on_two.ndim, on_two.size) == ((4, 2), x.dtype, 2, 8)
    assert on_two.mpmd_idxs == (0, 2) and on_two.is_partially_addressable
    assert on_two.sharding.mesh == on_two.mpmd_sharding.mpmd_mesh.mpmd_submesh([0, 2]).jax_mesh
    assert on_two.block_until_ready() is on_two and on_two.is_ready()
    np.testing.assert_array_equal(on_two, x)
    np.testing.assert_array_equal(np.asarray(on_two, np.float64), np.asarray(x, np.float64))
    np.testing.assert_array_equal(on_two.on_rank(0), x)
    assert on_two.on_rank(1) is None
    three = array(jnp.float32(3.5), (1,))
    assert (float(three), int(three), bool(three), three.item()) == (3.5, 3, True, 3.5)
    assert f"{three:.2f}" == "3.50"
    assert repr(three) == "MpmdArray(3.5, dtype=float32, mpmd_idxs=(1,))"
    assert repr(on_two).startswith("MpmdArray(shape=")
    assert jax.tree.leaves({"a": three}) == [three]
    on_two.delete()
    assert on_two.is_deleted() and not three.is_deleted()
    three.delete()
    assert repr(three).startswith("MpmdArray(shape=(), dtype=float32, mpmd_idxs=(1,), sharding=")


def test_shardings_in_place_of_specs():
    """Only their specs count: they may be those of arrays on all devices."""
    mesh = groups(2, fsdp=2)
    specs = [{"in": P("fsdp"), "out": P(None, "fsdp")}] * 2
    over_all = jax.tree.map(lambda spec: NamedSharding(mesh.jax_mesh, spec), specs)
    args, whole = (layers(2), *batch(4)), NamedSharding(mesh.jax_mesh, P())
    _, grads = compare(
        gradients(Std1F1B(2)),
        mesh,
        *args,
        in_shardings=(over_all, whole, whole),
        out_shardings=(whole, over_all),
    )
    assert jax.tree.map(lambda x: x.spec, grads) == specs
    step = mpmd_jit_with_loop(
        gradients(Std1F1B(2)), mesh, in_shardings=(over_all, None, None), out_specs=(P(), specs)
    )
    where = step.compile(*args).in_shardings[0][0]
    assert jax.tree.map(lambda x: x.spec, where) == specs
    with pytest.raises(ValueError, match="Both `in_specs` and `in_shardings` are given"):
        mpmd_jit_with_loop(jnp.sin, mesh, in_specs=P(), in_shardings=whole)


def test_what_is_no_array_on_a_group_is_refused_by_name():
    where = MpmdSharding(groups(2), {1}, P())
    cases: list[tuple[str, Any, Any]] = [
        (r"`partially_addressable_arrays\[0\]` is a ndarray, .*of_rank\(1\)", [np.ones(3)], where),
        (r"`partially_addressable_arrays\[0\]` is a float, which is on no group", [1.0], where),
        (r"`mpmd_sharding` is a NamedSharding\. Give an `MpmdSharding`", [], where.of_rank(1)),
    ]
    for message, arrays, sharding in cases:
        make = inspect.unwrap(MpmdArray.__init__)  # without the checks of types in tests
        with pytest.raises(ValueError, match=message):
            make(MpmdArray.__new__(MpmdArray), arrays, sharding)
