"""Reads which devices communicate with each other from a collective's text."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def device_groups(text: str) -> Groups:
    """Returns the devices that communicate with each other, by their index in the program.

    The text is as XLA writes it: `{{0,1},{2,3}}`, or pairs of source and target of a permute.

    Example:
        >>> device_groups("[4,2]<=[2,4]T(1,0)")
        ((0, 4), (1, 5), (2, 6), (3, 7))
        >>> device_groups("mesh['stage'=2,'fsdp'=2] {'stage'}")
        ((0, 2), (1, 3))
    """
    named = re.match(r"mesh\[(.*?)\]\s*\{(.*?)\}", text)
    if named:
        return _of_axes(re.findall(r"'([^']*)'=(\d+)", named[1]), named[2])
    counted = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if counted:
        sizes = [int(size) for size in counted[3].split(",")]
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        if counted[4]:
            ids = ids.transpose([int(dim) for dim in counted[4].split(",")])
        return _rows(ids.reshape(int(counted[1]), int(counted[2])))
    listed = re.findall(r"\{([\d,]+)\}", text)
    return tuple(tuple(int(i) for i in group.split(",")) for group in listed)


def _of_axes(axes: list[tuple[str, str]], chosen: str) -> Groups:
    names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
    inside = [names.index(name) for name in re.findall(r"'([^']*)'", chosen)]
    outside = [dim for dim in range(len(names)) if dim not in inside]
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(outside + inside)
    return _rows(ids.reshape(-1, math.prod(sizes[dim] for dim in inside)))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids)


def crosses_hosts(text: str, hosts: Sequence[int]) -> bool:
    """Tells whether devices of different hosts communicate with each other."""
    return any(len({hosts[i] for i in group}) > 1 for group in device_groups(text))


def gpu_hosts(devices: Iterable[Any]) -> list[int]:
    """Returns the host of every GPU, by which an audit tells what crosses the network."""
    return [device.process_index for device in devices if device.platform == "gpu"]
