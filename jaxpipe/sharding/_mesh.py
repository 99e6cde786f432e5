"""The device mesh: one size per axis inside a slice (ICI) and one across slices (DCN)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "stage", "fsdp", "tensor", "expert", "context")

ROW_AXES = ("data", "fsdp")
"""The axes that divide the rows of a microbatch."""


def make_mesh(
    ici: Mapping[str, int],
    dcn: Mapping[str, int] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    explicit: bool = False,
) -> Mesh:
    """Makes a mesh over all of `AXES`, every axis being `dcn` groups of `ici` neighbours.

    Args:
        ici: Size of each axis inside a slice. A missing axis has size 1. One axis may be -1: it
            takes the devices that the others leave.
        dcn: Size of each axis across slices, or across processes where devices have no slices.
        devices: The devices to use, all of them. Default: `jax.devices()`.
        explicit: Whether data, stage and fsdp are of type Explicit: an array's type then says how
            it is split over them, and JAX, not the compiler, decides what is communicated. The axes
            inside a layer (tensor, expert, context) are left to the compiler either way.

    Returns:
        A mesh whose axes are `AXES`, in that order, of type Auto but for `explicit`.

    Raises:
        ValueError: If an axis is unknown, a size is not positive, or the sizes do not multiply to
            the number of devices.

    Example:
        >>> mesh = make_mesh({"fsdp": -1}, devices=jax.devices()[:1])
        >>> dict(mesh.shape)
        {'data': 1, 'stage': 1, 'fsdp': 1, 'tensor': 1, 'expert': 1, 'context': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    dcn = dcn or {}
    for name, sizes in (("ici", ici), ("dcn", dcn)):
        _check_sizes(name, sizes, may_fill=name == "ici")
    across = [dcn.get(axis, 1) for axis in AXES]
    within = _fill([ici.get(axis, 1) for axis in AXES], len(devices) // math.prod(across))
    _check_count(within, across, len(devices))

    _check_slices(across, devices)

    # [dcn of each axis, ici of each axis] -> [dcn x ici of each axis]
    ordered = sorted(devices, key=_slice_of)
    size = math.prod(within)
    groups = [_arrange(ordered[i : i + size], within) for i in range(0, len(ordered), size)]
    grid = np.stack(groups).reshape(*across, *within)
    grid = grid.transpose([i for axis in range(len(AXES)) for i in (axis, axis + len(AXES))])
    sizes = [a * w for a, w in zip(across, within, strict=True)]
    typed = ("data", "stage", "fsdp") if explicit else ()
    types = tuple(AxisType.Explicit if axis in typed else AxisType.Auto for axis in AXES)
    return Mesh(grid.reshape(sizes), AXES, axis_types=types)


def _arrange(devices: list[Any], sizes: list[int]) -> np.ndarray:
    """Returns a slice's devices as a grid whose neighbours are neighbours on a TPU's torus."""
    if getattr(devices[0], "platform", None) == "tpu":
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(sizes)


def _check_slices(across: list[int], devices: list[Any]) -> None:
    slices = {getattr(device, "slice_index", None) for device in devices}
    if len(slices) > 1 and math.prod(across) != len(slices):
        raise ValueError(
            f"The devices lie in {len(slices)} slices, but the `dcn` sizes multiply to "
            f"{math.prod(across)}. Make them multiply to {len(slices)}, so that `ici` axes stay "
            "inside a slice."
        )


def _slice_of(device: Any) -> int:
    slice_index = getattr(device, "slice_index", None)
    return device.process_index if slice_index is None else slice_index


def _check_sizes(name: str, sizes: Mapping[str, int], *, may_fill: bool) -> None:
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"`{name}` names the axis {axis!r}. The axes are {', '.join(AXES)}.")
        if size < 1 and not (may_fill and size == -1):
            raise ValueError(f"`{name}[{axis!r}]` is {size}. Give at least 1.")
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"`{name}` is {dict(sizes)}. Only one axis can be -1.")


def _fill(within: list[int], num_devices: int) -> list[int]:
    if -1 not in within:
        return within
    rest = num_devices // -math.prod(within)
    return [max(rest, 1) if size == -1 else size for size in within]


def _check_count(within: list[int], across: list[int], num_devices: int) -> None:
    needed = math.prod(within) * math.prod(across)
    if needed == num_devices:
        return
    sizes = ", ".join(
        f"{axis} {w * a}" for axis, w, a in zip(AXES, within, across, strict=True) if w * a > 1
    )
    requirement = f"The mesh ({sizes or 'every axis 1'}) needs {needed} devices"
    if needed > num_devices:
        raise ValueError(
            f"{requirement} and there are {num_devices}. Make an axis smaller or, to try it on a "
            f"CPU, emulate them: `emulate_devices={needed}` for `jaxpipe train`, or "
            f"`jaxpipe.emulate_devices({needed})` before anything else uses JAX."
        )
    raise ValueError(
        f"{requirement} and there are {num_devices}: some would idle. Make an axis larger (-1 "
        "takes what is left), or use fewer devices."
    )


def num_ranks_of(mesh: Mesh) -> int:
    """Returns the number of ranks of a mesh.

    Args:
        mesh: A mesh with an axis `stage`.

    Returns:
        S, the size of that axis.

    Raises:
        ValueError: If the mesh has no such axis.
    """
    if "stage" not in mesh.shape:
        raise ValueError(
            f"`mesh` has the axes {tuple(mesh.axis_names)}. A pipeline needs one that is named "
            "'stage'."
        )
    return mesh.shape["stage"]
