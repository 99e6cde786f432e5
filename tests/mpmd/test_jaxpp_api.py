"""JaxPP's public names: that ours have them, and take the same parameters in the same order.

`JAXPP` is what `jaxpp.api` offers and documents, as facts: names and parameter names.
"""

import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpipe.mpmd
import jaxpipe.mpmd.jaxpp as jaxpp
from mpmd.small import WIDTH, batch, compare, gradients, groups, layers, numbers

JIT = (
    "in_shardings",
    "out_shardings",
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "compiler_options",
)

# Names with their positional parameters, and with those that are given by name only.
JAXPP: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "BaseSchedule": (("num_stages",), ()),
    "Concat": (("axis",), ()),
    "DualPipeV": (("num_stages", "mpmd_dim"), ()),
    "Eager1F1B": (("num_stages", "mpmd_dim"), ()),
    "GPipe": (("num_stages", "mpmd_dim"), ()),
    "Interleaved1F1B": (("num_stages", "mpmd_dim", "fuse_steady_state"), ()),
    "InterleavedGPipe": (("num_stages", "mpmd_dim"), ()),
    "KimiK2": (("num_stages", "mpmd_dim", "fuse_steady_state"), ()),
    "MpmdArray": (("partially_addressable_arrays", "mpmd_sharding", "shape", "dtype"), ()),
    "MpmdMesh": (("jax_mesh", "mpmd_axis_name"), ()),
    "MpmdSharding": (("mpmd_mesh", "mesh_ids", "spec", "memory_kind"), ()),
    "Std1F1B": (("num_stages", "mpmd_dim"), ()),
    "ZeroBubble": (("num_stages",), ()),
    "cross_mpmd_all_reduce": (("args",), ()),
    "cross_mpmd_stack": (("arrays", "axis"), ()),
    "mark_stage_end": (("anchor", "name"), ()),
    "mpmd_jit_by_yield": (("fun", "mpmd_mesh"), ("target_num_stages", *JIT)),
    "mpmd_jit_with_loop": (("fun", "mpmd_mesh"), ("in_specs", "out_specs", *JIT)),
    "mpmd_to_spmd_reshard": (("mpmd_mesh", "mpmd_arrays", "spmd_shardings", "threshold"), ()),
    "pipeline_enter_stage": (("anchor", "name"), ()),
    "place_with": ((), ()),
    "spmd_to_mpmd_reshard": (("mpmd_mesh", "spmd_arrays", "mpmd_shardings", "threshold"), ()),
    "treduce": (("fun", "xs", "schedule", "axis", "operation"), ()),
    "treduce_i": (("fun", "length", "schedule", "operation"), ()),
}

# Attributes of classes, with the parameters of those that are methods.
ATTRIBUTES: dict[str, dict[str, tuple[str, ...] | None]] = {
    "BaseSchedule": {
        "get_mpmd_idx": ("stage_id",),
        "is_partial_bwd": None,
        "tasks": ("n_mubatches",),
    },
    "MpmdArray": {
        "__format__": ("spec",),
        "__int__": (),
        "aval": None,
        "block_until_ready": (),
        "delete": (),
        "first_mpmd_replica": None,
        "is_deleted": (),
        "is_mpmd_replicated": None,
        "is_partially_addressable": None,
        "ndim": None,
        "sharding": None,
        "spec": None,
        "to_mpmd_local_array": None,
    },
    "MpmdMesh": {
        "__enter__": (),
        "__exit__": ("exception",),
        "device_coords": None,
        "device_mpmd_idx": None,
        "lowering_mesh": (),
        "mpmd_axis": None,
        "mpmd_dim": None,
        "mpmd_idx_for_mesh": None,
        "mpmd_submesh": ("mpmd_indices",),
        "my_mpmd_axis_index": None,
        "my_mpmd_group_mesh": None,
        "unstack": None,
    },
    "MpmdSharding": {"sharding": None},
}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {n: p for n, p in inspect.signature(function).parameters.items() if n != "self"}


@pytest.mark.parametrize("name", JAXPP)
def test_jaxpipe_mpmd_finds_every_name_of_jaxpp(name: str):
    assert getattr(jaxpipe.mpmd, name) is getattr(jaxpp, name)


def test_jaxpipe_mpmd_has_no_name_that_jaxpp_does_not_have():
    with pytest.raises(AttributeError, match=r"'jaxpipe\.mpmd' has no attribute 'no_such_name'"):
        jaxpipe.mpmd.no_such_name  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", JAXPP)
def test_every_name_is_there_and_takes_the_same_parameters(name: str):
    positional, named = JAXPP[name]
    ours = parameters(getattr(jaxpp, name))
    assert tuple(ours)[: len(positional)] == positional
    assert set(named) <= set(ours)
    needed = [n for n, p in ours.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    assert set(needed) <= {"x", "other", *positional}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_every_attribute_is_there_and_is_a_method_or_not(name: str):
    for attribute, expected in ATTRIBUTES[name].items():
        found = inspect.getattr_static(getattr(jaxpp, name), attribute)
        if expected is None:
            assert not inspect.isfunction(found), attribute
        else:
            assert tuple(parameters(found)) == expected, attribute


def test_every_module_of_jaxpp_that_scripts_import_is_there():
    """`jaxpp.api` and others, each under `jaxpipe.mpmd.jaxpp`."""
    modules = {
        "api": (*JAXPP, "add_multi_p", "gather_multi_p", "place_with_p", "collect_task_times_ms"),
        "mesh": ("MpmdMesh",),
        "schedules": ("BaseSchedule", "InterleavedBaseSchedule", "FusedTask", "Std1F1B", "Task"),
        "types": ("MpmdSharding", "TaskType"),
    }
    for module, names in modules.items():
        found = importlib.import_module(f"jaxpipe.mpmd.jaxpp.{module}")
        assert all(hasattr(found, name) for name in names), module
        assert getattr(jaxpp, module) is found


def test_values_and_the_version_are_there():
    assert isinstance(jaxpp.__version__, str)
    assert all(hasattr(op, "state") and hasattr(op, "update") for op in (jaxpp.Add, jaxpp.Max))


def test_tasks_are_lists_whose_items_name_stage_and_microbatch():
    tasks: Any = jaxpp.Interleaved1F1B(num_stages=2, mpmd_dim=2).tasks(2)
    assert isinstance(tasks, list) and all(isinstance(of_rank, list) for of_rank in tasks)
    assert [(task.stage_id, task.mubatch_idx) for task in tasks[0]] == [(0, 0), (0, 1)] * 2
    assert [(f.stage_id, b.mubatch_idx) for f, b in tasks[1]] == [(1, 0), (1, 1)]
    by_rank = {jaxpp.DualPipeV(4, 2): [0, 1, 1, 0], jaxpp.KimiK2(4, 2): [0, 1, 0, 1]}
    for schedule, ranks in by_rank.items():
        assert [schedule.get_mpmd_idx(stage) for stage in range(4)] == ranks
        assert isinstance(schedule, jaxpp.BaseSchedule)
    assert jaxpp.ZeroBubble(2).is_partial_bwd and not jaxpp.GPipe(2).is_partial_bwd


def test_primitives_of_jaxpp_run_where_its_functions_do():
    """`gather_multi_p` concatenates, where `cross_mpmd_stack` stacks."""

    def step(weights: Any, *data: Any) -> Any:
        _, grads = gradients("1f1b")(weights, *data)
        first, last = (w["in"] for w in grads)
        return (
            jaxpp.add_multi_p.bind(first, last),
            jaxpp.gather_multi_p.bind(first, last, axis=1),
            jaxpp.place_with_p.bind(first, last),
        )

    results = compare(step, groups(2), layers(2), *batch(2))
    assert [x.mpmd_idxs for x in results] == [(0, 1), (0, 1), (1,)]
    assert results[1].shape == (WIDTH, 4 * WIDTH)


def test_the_contexts_of_meshes_are_a_stack():
    one, two = groups(2), groups(3)
    assert jaxpp.MpmdMesh.mesh_stack == []
    with one as entered, two:
        assert entered is one and jaxpp.MpmdMesh.mesh_stack == [one, two]
    assert jaxpp.MpmdMesh.mesh_stack == []


def test_a_mesh_knows_its_devices_and_groups():
    devices = np.array(jax.devices()[:4])
    mesh = jaxpp.MpmdMesh(Mesh(devices.reshape(2, 2), ("fsdp", "stage")), "stage")
    assert (mesh.mpmd_axis, mesh.mpmd_dim) == (1, 2)
    assert mesh.device_coords[devices[1]] == (0, 1)
    assert [mesh.device_mpmd_idx[device] for device in devices] == [0, 1, 0, 1]
    assert [mesh.mpmd_idx_for_mesh[group] for group in mesh.unstack] == [0, 1]
    assert mesh.lowering_mesh() == mesh.unstack[0]
    with pytest.raises(ValueError, match=r"process 0 has the groups \(0, 1\)\. Use `local_ranks`"):
        _ = mesh.my_mpmd_group_mesh
    alone = mesh.mpmd_submesh([1])
    assert alone.my_mpmd_axis_index == 0 and alone.my_mpmd_group_mesh == mesh.unstack[1]


def test_arrays_are_made_of_the_arrays_of_their_groups():
    mesh = groups(3, fsdp=2)
    one, two = (jaxpp.MpmdSharding(mesh, ids, P("fsdp")) for ids in ({1}, {0, 2}))
    x = numbers(0, 4, 3)
    here = jaxpp.MpmdArray([jax.device_put(x, one.of_rank(1))], one)
    assert not here.is_mpmd_replicated and here.sharding.mesh == mesh.unstack[1]
    np.testing.assert_array_equal(here.to_mpmd_local_array, x)
    assert here.first_mpmd_replica is here.to_mpmd_local_array
    both = jaxpp.MpmdArray([jax.device_put(x, two.of_rank(rank)) for rank in (2, 0)], two)
    assert both.is_mpmd_replicated and both.mpmd_idxs == (0, 2)
    assert both.sharding.mesh == mesh.mpmd_submesh([0, 2]).jax_mesh
    local: Any = both.to_mpmd_local_array
    assert isinstance(local, list)
    assert [a.sharding.mesh for a in local] == [mesh.unstack[0], mesh.unstack[2]]
    last = jaxpp.MpmdArray([local[1]], two)
    assert last.is_partially_addressable and last.first_mpmd_replica is None


def test_an_array_of_another_process_has_a_shape_and_no_numbers():
    where = jaxpp.MpmdSharding(groups(2), {1}, P())
    there = jaxpp.MpmdArray([], where, shape=(3,), dtype=jnp.float32)
    assert (there.shape, there.dtype, there.aval.str_short()) == ((3,), np.float32, "float32[3]")
    assert not there.is_partially_addressable
    assert there.to_mpmd_local_array is None and there.first_mpmd_replica is None
    assert np.array(there).dtype == object and np.asarray(there).item() is there
    assert "MpmdArray(shape=(3,)" in f"{there} {there:.3f} {there!r} {np.array(there)}"
    for read in (float, bool, lambda x: np.asarray(x, np.float32), lambda x: x.item()):
        with pytest.raises(ValueError, match=r"lives on the groups \(1,\) of the processes"):
            read(there)


def test_arrays_that_are_not_those_of_their_groups_are_refused():
    mesh = groups(2, fsdp=2)
    where = jaxpp.MpmdSharding(mesh, {0}, P("fsdp"))
    x = numbers(0, 4)
    here, there = jax.device_put(x, where.of_rank(0)), jax.device_put(x, where.of_rank(1))
    cases = [
        (r"arrays\[0\]`, float32\[4\], is on \['cpu:0'\], which are not .* one group", [x], {}),
        (r"arrays\[0\]`, float32\[4\], is on group 1, and `mesh_ids` is \(0,\)", [there], {}),
        (r"arrays\[1\]`, float32\[4\], is on group 0", [here, here], {}),
        (r"is float32\[4\], and the whole is float32\[8\]", [here], {"shape": (8,)}),
        (r"is empty, so its shape and dtype are unknown. Give `shape` and `dtype`", [], {}),
    ]
    for message, arrays, more in cases:
        with pytest.raises(ValueError, match=message):
            jaxpp.MpmdArray(arrays, where, **more)
    whole = jax.device_put(x, jaxpp.MpmdSharding(mesh, {0}, P()).of_rank(0))
    with pytest.raises(
        ValueError, match=r"has the sharding .*, and `mpmd_sharding` has the spec P\('fsdp',\)"
    ):
        jaxpp.MpmdArray([whole], where)


def test_the_axis_of_groups_is_dropped_from_the_spec_of_a_sharding():
    mesh = groups(2, fsdp=2)
    for spec, within in [(P(("stage", "fsdp"), None), P("fsdp", None)), (P("stage"), P(None))]:
        assert jaxpp.MpmdSharding(mesh, {0}, spec).spec == within
    assert jaxpp.MpmdSharding(mesh, [1, 0], P()) == jaxpp.MpmdSharding(mesh, {0, 1}, P())
