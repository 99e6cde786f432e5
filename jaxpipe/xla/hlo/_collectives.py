"""Recognises collectives, and the bytes they move, in the dialects of XLA's backends.

On TPUs a collective takes these forms, each of which is one collective here:

    all-gather                                  it runs alone
    all-gather-start, all-gather-done           asynchronous; all kinds
    call-start, call-update, call-done          asynchronous, on the SparseCore (tpu7x)
    fusions with AsyncCollectiveStart,          asynchronous: the fusions between the first and the
      async_collective_fusion, ...Done          last run other work; each repeats the collective
    fusion of all-reduce and dynamic-slice      a reduce-scatter
    send, recv of xla_megascale_runtime         between slices
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._parse import (
    Computation,
    Instruction,
    attribute,
    op_name,
    shape_bytes,
    tuple_elements,
    without_layouts,
)

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_CHAINED = "async_collective_fusion_config"


@dataclass(frozen=True)
class Collective:
    """One collective, without its loops, and the chain of fusions that share it, or ""."""

    kind: str
    name: str
    shape: str
    result_bytes: int
    asynchronous: bool
    across_slices: bool
    groups: str
    op_name: str
    chain: str


def starting_collective(
    computation: Computation, instruction: Instruction, *, fused: bool
) -> Collective | None:
    """Returns the collective that starts with an instruction, or None."""
    opcode = instruction.opcode
    kind = opcode.removesuffix("-start")
    if opcode == "recv":
        return _received(instruction)
    if kind not in KINDS or _is_continuation(computation, instruction):
        return None
    slices = _slices(computation, instruction) if fused and opcode == "all-reduce" else []
    if slices:
        shapes = [x.shape for x in slices]
        shape = shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"
        return _collective("reduce-scatter", instruction, shape, asynchronous=False)
    started = opcode != kind
    apart = started and '"is_sync":true' not in instruction.attributes  # so XLA:GPU marks them
    shape = _result_of_start(kind, instruction.shape) if started else instruction.shape
    chained = _CHAINED in instruction.attributes
    return _collective(kind, instruction, shape, asynchronous=apart or chained)


def _collective(
    kind: str, instruction: Instruction, shape: str, *, asynchronous: bool, across: bool = False
) -> Collective:
    groups = (
        attribute(instruction, "replica_groups")
        or attribute(instruction, "source_target_pairs")
        or _attribute_of_slices(instruction, "target")
    )
    return Collective(
        kind=kind,
        name=instruction.name,
        shape=without_layouts(shape),
        result_bytes=shape_bytes(shape),
        asynchronous=asynchronous,
        across_slices=across,
        groups=groups,
        op_name=op_name(instruction),
        chain=_chain(instruction),
    )


def _chain(instruction: Instruction) -> str:
    """Returns the name of the chain of fusions that share a collective, or ""."""
    match = re.search(r'\bchain_id="(\d+)"', instruction.attributes)
    return f"chain {match[1]}" if match and _CHAINED in instruction.attributes else ""


def ended_chain(computation: Computation) -> str:
    """Returns the chain of fusions that ends with the one of this body, or ""."""
    parts = computation.instructions.values()
    is_end = any('"AsyncCollectiveDone"' in x.attributes for x in parts)
    return next((chain for x in parts if (chain := _chain(x))), "") if is_end else ""


def _result_of_start(kind: str, shape: str) -> str:
    """Returns the result in a start's shape, (operands, result, ...), except for all-reduce."""
    return shape if kind == "all-reduce" or not shape.startswith("(") else tuple_elements(shape)[1]


def _is_continuation(computation: Computation, instruction: Instruction) -> bool:
    """Returns whether an earlier fusion has started this collective."""
    if _CHAINED not in instruction.attributes:
        return False
    parts = computation.instructions.values()
    starts = [x for x in parts if '"AsyncCollectiveStart"' in x.attributes]
    return not any(instruction.name in start.operands for start in starts)


_SAME_DATA = {"bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element"}


def _slices(computation: Computation, reduced: Instruction) -> list[Instruction]:
    """Returns the slices that a fused all-reduce is cut into: each device keeps only its own."""
    full_size, slices = {reduced.name}, []
    for x in computation.instructions.values():  # operands precede their users
        if not x.operands or x.operands[0] not in full_size:
            continue
        if x.opcode in _SAME_DATA:
            full_size.add(x.name)
        elif x.opcode == "dynamic-slice":
            slices.append(x)
    return slices


def _received(instruction: Instruction) -> Collective | None:
    """Returns a transfer between slices or a permute that XLA has split; None for the host's."""
    transfer = _attribute_of_slices(instruction, "transfer_type")
    host = attribute(instruction, "is_host_transfer") == "true"
    if host and not transfer:
        return None
    kind = transfer.lower().replace("_", "-")
    return _collective(
        kind if kind in KINDS else "collective-permute",
        instruction,
        tuple_elements(instruction.shape)[0],
        asynchronous=True,
        across=bool(transfer),
    )


def _attribute_of_slices(instruction: Instruction, name: str) -> str:
    match = re.search(rf'_xla_megascale_{name}=("?)(.*?)\1[,}}]', instruction.attributes)
    return match[2] if match else ""


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
