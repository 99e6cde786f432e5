from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpipe.sharding import AXES, make_mesh


@dataclass(frozen=True)
class FakeDevice:
    """As much of a device as decides where it stands in a mesh."""

    id: int
    process_index: int
    slice_index: int | None = None


@pytest.fixture
def grid_of(monkeypatch: pytest.MonkeyPatch):
    """`make_mesh` with a stand-in for `Mesh`, which takes nothing but real devices."""
    monkeypatch.setattr("jaxpipe.sharding._mesh.Mesh", lambda grid, names, **_: (grid, names))

    def grid(*args: Any, **kwargs: Any) -> np.ndarray:
        grid, names = make_mesh.__wrapped__(*args, **kwargs)  # pyright: ignore
        assert names == AXES
        return np.vectorize(lambda device: device.id)(grid).squeeze()

    return grid


def test_a_mesh_has_all_axes_in_order_with_missing_ones_of_size_1():
    mesh = make_mesh({"tensor": 2, "stage": 4})
    assert mesh.axis_names == AXES == ("data", "stage", "fsdp", "tensor", "expert", "context")
    assert mesh.devices.shape == (1, 4, 1, 2, 1, 1)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_neighbours_lie_along_the_last_axes():
    mesh = make_mesh({"stage": 4, "tensor": 2})
    ids = [[d.id for d in row] for row in mesh.devices.reshape(4, 2)]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_axis_of_minus_1_takes_the_devices_that_the_others_leave():
    assert make_mesh({"fsdp": -1, "stage": 2}).shape["fsdp"] == 4
    assert make_mesh({"fsdp": -1, "stage": 8}).shape["fsdp"] == 1
    assert make_mesh({"fsdp": -1, "stage": 2}, {"data": 2}).shape["fsdp"] == 2


def test_given_devices_are_used_all_of_them_and_no_others():
    devices = jax.devices()[3:5]
    assert make_mesh({"stage": 2}, devices=devices).devices.flatten().tolist() == devices


def test_sizes_across_slices_and_within_multiply():
    mesh = make_mesh({"stage": 2, "fsdp": 2}, {"stage": 2})
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | {"stage": 4, "fsdp": 2}


@pytest.mark.parametrize("where", ["slice_index", "process_index"])
def test_groups_across_slices_are_whole_slices(grid_of: Any, where: str):
    # Two slices of four devices, listed alternately.
    devices = [
        FakeDevice(i, 0, i % 2) if where == "slice_index" else FakeDevice(i, i % 2)
        for i in range(8)
    ]
    ids = grid_of({"fsdp": 2, "tensor": 2}, {"stage": 2}, devices=devices)
    assert ids.tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_an_axis_across_and_within_slices_keeps_neighbours_together(grid_of: Any):
    devices = [FakeDevice(i, 0, i // 4) for i in range(8)]
    ids = grid_of({"stage": 2, "fsdp": 2}, {"stage": 2}, devices=devices)
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    ids = grid_of({"stage": 2, "fsdp": 2}, {"fsdp": 2}, devices=devices)
    assert ids.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("dcn", [{}, {"data": 4}])
def test_axes_that_would_cross_slices_are_refused(dcn: dict[str, int]):
    devices = [FakeDevice(i, 0, i // 4) for i in range(8)]
    message = "lie in 2 slices, but the `dcn` sizes multiply to"
    with pytest.raises(ValueError, match=message):
        make_mesh({"stage": -1}, dcn, devices=devices)


def test_a_slice_index_of_zero_counts_as_one(grid_of: Any):
    devices = [FakeDevice(0, 1, 0), FakeDevice(1, 0, 1)]
    assert grid_of({}, {"data": 2}, devices=devices).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ici", "dcn", "message"),
    [
        (
            {"stage": 8, "fsdp": 2},
            {},
            r"The mesh \(stage 8, fsdp 2\) needs 16 devices and there are 8\. .*"
            r"`emulate_devices=16`",
        ),
        ({"stage": 3}, {}, r"\(stage 3\) needs 3 devices and there are 8: some would idle\. .*-1"),
        ({}, {}, r"\(every axis 1\) needs 1 devices and there are 8"),
        ({"fsdp": -1, "stage": 3}, {}, r"\(stage 3, fsdp 2\) needs 6 .* 8: some would idle"),
        ({"fsdp": -1, "stage": 16}, {}, r"\(stage 16\) needs 16 .*`emulate_devices=16`"),
        ({"fsdp": -1}, {"data": 16}, r"\(data 16\) needs 16 devices and there are 8"),
        ({"pipe": 2}, {}, r"`ici` names the axis 'pipe'\. The axes are data, stage, fsdp, tensor"),
        ({}, {"pipe": 2}, r"`dcn` names the axis 'pipe'"),
        ({"stage": 0}, {}, r"`ici\['stage'\]` is 0\. Give at least 1\."),
        ({"stage": -2}, {}, r"`ici\['stage'\]` is -2"),
        ({}, {"data": -1}, r"`dcn\['data'\]` is -1\. Give at least 1\."),
        ({"stage": -1, "fsdp": -1}, {}, r"`ici` is .*'stage': -1.* Only one axis can be -1\."),
    ],
)
def test_sizes_that_cannot_be_are_refused(ici: dict, dcn: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_mesh(ici, dcn)
