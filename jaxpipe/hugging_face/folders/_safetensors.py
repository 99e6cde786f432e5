"""Safetensors files: named tensors behind a JSON header, mapped into memory one at a time.

A file is 8 bytes with the length of the header, the header, and the tensors one after the other:
https://huggingface.co/docs/safetensors. A folder has one file, or several and an index.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._durable import write_file
from ..._input import MAX_JSON_BYTES, is_file, parse_json, read_bytes, short_repr, shorten

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
}
"""The dtypes in which weights may be stored, by the format's names."""

TensorSpecs = Mapping[str, tuple[str, tuple[int, ...]]]
"""From the name of a tensor to its dtype, a key of `DTYPES`, and its shape."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file."""

    file: Path  # the file that has it
    start: int  # its first byte there
    dtype: str  # a key of `DTYPES`
    shape: tuple[int, ...]  # its dims; the last one is contiguous


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the size of a tensor in bytes."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def map_tensor(tensor: StoredTensor, *, writable: bool = False) -> np.ndarray:
    """Maps a tensor into memory: its pages are read when they are used."""
    size = num_bytes(tensor.dtype, tensor.shape)
    mode = "r+" if writable else "r"
    raw = np.memmap(tensor.file, np.uint8, mode, offset=tensor.start, shape=(size,))
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
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size >= 8 and length > MAX_JSON_BYTES:
            raise ValueError(
                f"{file} says that its header has {length:,} bytes, and a header has at most "
                f"{MAX_JSON_BYTES:,}. The file is no safetensors file, or corrupt: copy it again."
            )
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{file} has {size} bytes, and its header says that it takes {8 + length} alone. "
                "The file is cut off, or is no safetensors file: copy it again."
            )
        header = _parsed(opened.read(length), file)
    header.pop("__metadata__", None)
    if any(len(name) > 500 for name in header):
        raise ValueError(f"{file} has a corrupt header: a name is too long. Copy it again.")
    stored = {
        name: _parse_tensor(file, name, entry, 8 + length, size) for name, entry in header.items()
    }
    _check_apart(file, stored)
    return stored


def create_files(folder: Path, specs: TensorSpecs, max_shard_bytes: int) -> dict[str, StoredTensor]:
    """Makes files with room for tensors, to fill through `map_tensor`, and an index of several."""
    shards = _assign_shards(specs, max_shard_bytes)
    created: dict[str, StoredTensor] = {}
    for i, shard in enumerate(shards):
        several = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        created |= _create_file(folder / (several if len(shards) > 1 else SINGLE), shard)
    if len(shards) > 1:
        total = sum(num_bytes(*entry) for entry in specs.values())
        weight_map = {name: tensor.file.name for name, tensor in created.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_file(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return created


def _parsed(text: bytes, file: Path) -> dict[str, Any]:
    try:
        header = parse_json(text.decode("utf-8"), "it")
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(
            f"{file} has a corrupt header: {shorten(str(error), 200)} Copy it again."
        ) from None
    if not isinstance(header, dict):
        raise ValueError(f"{file} has a corrupt header: it is no JSON object. Copy it again.")
    return header


def _parse_tensor(file: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    """Parses an entry of a header. `data` is the offset of the first byte after the header."""
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        sound = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, start, end))
        sound = sound and isinstance(dtype, str) and len(shape) <= 8
    except (TypeError, KeyError, ValueError):
        sound, dtype, shape, start, end = False, "", (), 0, 0
    if not sound:
        raise ValueError(
            f"{file}: tensor {name} has a corrupt entry in the header: {short_repr(entry)}. Copy "
            "it again."
        )
    if dtype not in DTYPES:
        raise ValueError(
            f"{file}: tensor {name} is stored as {shorten(dtype, 40)}. Only {', '.join(DTYPES)} "
            "are read: save the model in one of these first."
        )
    if end - start != num_bytes(dtype, shape):
        raise ValueError(
            f"{file}: tensor {name} is {dtype}{[*shape]}, which takes {num_bytes(dtype, shape)} "
            f"bytes, and has {end - start}. The header is corrupt: copy the file again."
        )
    if data + end > size:
        raise ValueError(
            f"{file}: tensor {name} ends at byte {data + end}, and the file has {size}. It is cut "
            "off: copy it again."
        )
    return StoredTensor(file, data + start, dtype, shape)


def _check_apart(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that no two tensors share bytes."""
    previous, end = "", 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise ValueError(
                f"{file}: tensors {previous} and {name} share bytes. The header is corrupt: copy "
                "the file again."
            )
        previous, end = name, tensor.start + num_bytes(tensor.dtype, tensor.shape)


def _read_index(file: Path) -> dict[str, str]:
    """Returns the file name of every tensor from an index."""
    weight_map = _parsed(read_bytes(file, most_bytes=MAX_JSON_BYTES), file).get("weight_map")
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
            raise ValueError(f"{folder / INDEX} has tensor {first} in {name}, which is missing.")
        tensors = tensors_in_file(file)
        for tensor in tensors:
            if weight_map.get(tensor) != name:
                raise ValueError(f"{file}: tensor {tensor} is not there in the index.")
        all_tensors |= tensors
    for tensor, name in weight_map.items():
        if tensor not in all_tensors:
            raise ValueError(f"{folder / name}: tensor {tensor} is missing, and in the index.")
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


def _create_file(file: Path, specs: TensorSpecs) -> dict[str, StoredTensor]:
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
        name: StoredTensor(file, 8 + len(text) + header[name]["data_offsets"][0], dtype, shape)
        for name, (dtype, shape) in specs.items()
    }
