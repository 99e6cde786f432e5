"""Folders of safetensors files: one file, or several and an index.

The library `safetensors` reads them. It writes a file only from arrays that are all in memory, so
files are written here, one tensor after the other: 8 bytes with the length of a JSON header, the
header, and the tensors (https://huggingface.co/docs/safetensors).
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from ..._durable import write_file
from ..._input import MAX_JSON_BYTES, clause, is_file, parse_json, read_bytes, shorten

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
}
"""The dtypes in which weights may be stored, by the format's names."""

TensorSpecs = Mapping[str, tuple[str, tuple[int, ...]]]
"""From the name of a tensor to its dtype, a key of `DTYPES`, and its shape."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path  # the file that has it
    name: str  # its name there
    dtype: str  # a key of `DTYPES`
    shape: tuple[int, ...]


class NewTensor(NamedTuple):
    """Room for a tensor in a file that is being written."""

    file: Path
    start: int  # its first byte there
    dtype: str  # a key of `DTYPES`
    shape: tuple[int, ...]  # its dims; the last one is contiguous


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the size of a tensor in bytes."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def read_tensor(tensor: StoredTensor) -> np.ndarray:
    """Reads a tensor."""
    with safe_open(tensor.file, "np") as opened:
        return opened.get_tensor(tensor.name)


def map_new_tensor(tensor: NewTensor) -> np.ndarray:
    """Maps the room for a tensor into memory, to write into it."""
    size = num_bytes(tensor.dtype, tensor.shape)
    raw = np.memmap(tensor.file, np.uint8, "r+", offset=tensor.start, shape=(size,))
    return np.asarray(raw).view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def tensors_in_folder(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a folder by its name. Reads headers only."""
    single, index = folder / SINGLE, folder / INDEX
    if index.is_file():
        return _read_indexed_files(folder, _read_index(index))
    if single.is_file():
        return tensors_in_file(single)
    raise ValueError(
        f"{folder} has neither {SINGLE} nor {INDEX}. Weights in other formats must be saved as "
        "safetensors first, by transformers' `save_pretrained` for instance."
    )


def tensors_in_file(file: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a file by its name."""
    if not is_file(file):
        raise ValueError(f"{file} is not a regular file. Copy it again.")
    try:
        with safe_open(file, "np") as opened:
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            stored = {
                name: StoredTensor(file, name, view.get_dtype(), tuple(view.get_shape()))
                for name, view in views.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read: {shorten(clause(error), 200)}. It is cut off, corrupt, or no "
            "safetensors file: copy it again."
        ) from None
    for tensor in stored.values():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{file}: tensor {shorten(tensor.name, 200)} is stored as {tensor.dtype}. Only "
                f"{', '.join(DTYPES)} are read: save the model in one of these first."
            )
    return stored


def create_files(folder: Path, specs: TensorSpecs, max_shard_bytes: int) -> dict[str, NewTensor]:
    """Makes files with room for tensors, to fill by `map_new_tensor`, and an index of several."""
    shards = _assign_shards(specs, max_shard_bytes)
    created: dict[str, NewTensor] = {}
    for i, shard in enumerate(shards):
        several = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        created |= _create_file(folder / (several if len(shards) > 1 else SINGLE), shard)
    if len(shards) > 1:
        total = sum(num_bytes(*entry) for entry in specs.values())
        weight_map = {name: tensor.file.name for name, tensor in created.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_file(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return created


def _read_index(file: Path) -> dict[str, str]:
    """Returns the file name of every tensor from an index."""
    try:
        index = parse_json(read_bytes(file, most_bytes=MAX_JSON_BYTES).decode("utf-8"), "it")
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{file} is corrupt: {shorten(str(error), 200)} Copy it again.") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    ):
        raise ValueError(
            f"{file} has no `weight_map` from tensors to files beside it. Copy it again."
        )
    return weight_map


def _read_indexed_files(folder: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    all_tensors: dict[str, StoredTensor] = {}
    for name in sorted({*weight_map.values()}):
        file = folder / name
        if not file.is_file():
            first = next(tensor for tensor, file_name in weight_map.items() if file_name == name)
            raise ValueError(
                f"{folder / INDEX} has tensor {shorten(first, 200)} in {name}, which is missing."
            )
        tensors = tensors_in_file(file)
        for tensor in tensors:
            if weight_map.get(tensor) != name:
                raise ValueError(
                    f"{file}: tensor {shorten(tensor, 200)} is not there in the index."
                )
        all_tensors |= tensors
    for tensor, name in weight_map.items():
        if tensor not in all_tensors:
            raise ValueError(
                f"{folder / name}: tensor {shorten(tensor, 200)} is missing, and in the index."
            )
    return all_tensors


def _assign_shards(
    specs: TensorSpecs, max_shard_bytes: int
) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """Assigns tensors to files, in order. A tensor above the limit has a file of its own."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, entry in specs.items():
        size = num_bytes(*entry)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = entry
        filled += size
    return shards


def _create_file(file: Path, specs: TensorSpecs) -> dict[str, NewTensor]:
    """Creates one file: its header, and room for its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name, (dtype, shape) in specs.items():
        end = offset + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.flush()
        opened.truncate(8 + len(text) + offset)
        # A page of a hole kills the process where the disk is full. (macOS cannot ask for more.)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(opened.fileno(), 0, 8 + len(text) + offset)
    return {
        name: NewTensor(file, 8 + len(text) + header[name]["data_offsets"][0], dtype, shape)
        for name, (dtype, shape) in specs.items()
    }
