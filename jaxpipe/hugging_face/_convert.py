"""Checkpoints of ours from folders of Hugging Face's safetensors, and the other way round.

Leaves are converted one by one. From a checkpoint, memory holds one leaf at a time. To a
checkpoint, numbers are copied from pages of the files, so memory holds the model once, and the
arrays that are being written.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from jaxtyping import PyTree

from .. import models
from .._durable import write_file
from .._input import MEGABYTE, parse_json, read_text
from ..models import ModelConfig
from ..models.weights import weight_shapes
from ..train import checkpoint
from ._carried import copy_from_hugging_face, files_to_hugging_face
from .folders import (
    DTYPES,
    NewTensor,
    StoredTensor,
    atomic_folder,
    create_files,
    map_new_tensor,
    read_tensor,
    tensors_in_folder,
)
from .formats import (
    ConfigValues,
    LeafSlices,
    TensorSlice,
    canonical_weights,
    format_of,
    leaf_slices,
    read_model,
    read_sizes,
)

GIGABYTE = 10**9
NAMES = {"float32": "F32", "bfloat16": "BF16"}
"""The dtypes in which weights may be stored, and their names in safetensors."""

_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors that old versions of transformers saved, although they are computed anew."""

_NOT_IN_CHECKPOINTS: ConfigValues = {"bos_token_id": None, "eos_token_id": None, "use_cache": True}
"""Fields that no weight depends on, written so that transformers assumes no other values."""


@dataclass(frozen=True)
class ConversionSummary:
    """The result of a conversion.

    Attributes:
        decoder_block: The kind of model.
        num_parameters: Numbers in all weights.
        num_tensors: The number of tensors of Hugging Face.
        num_files: The number of their files.
        dtype: The dtype of the result.
        carried: The files of the tokenizer and of generation settings that were copied.
    """

    decoder_block: str
    num_parameters: int
    num_tensors: int
    num_files: int
    dtype: str
    carried: tuple[str, ...] = ()


def model_keys(folder: Path) -> ConfigValues:
    """Reads the keys of a run that describe the model of a folder's config.json.

    Args:
        folder: A folder with config.json; weights are not read, and need not be there.

    Returns:
        Values of keys: sizes, and the family of models.

    Raises:
        ValueError: If config.json is missing, or a field of it is unknown or not supported.
    """
    file = folder / "config.json"
    block, sizes = _parse_config(file, _read_json_object(file))
    return _config_values(block, sizes)


def from_hugging_face(source: Path, destination: Path, *, dtype: str = "") -> ConversionSummary:
    """Makes a folder with `weights/`, for `init_from`, and `config.yml`, which has the sizes.

    The tokenizer and the generation settings are copied into `hugging_face/`.

    Args:
        source: A folder with config.json and safetensors.
        destination: The folder, which must not exist or be empty.
        dtype: `float32` or `bfloat16`. Default: as the tensors are, the widest if they differ.

    Returns:
        A summary of the conversion.

    Raises:
        ValueError: Before any weight is read, if a field of config.json is unknown or not
            supported, or tensors are missing, too many, corrupt or of other shapes.
    """
    config = _read_json_object(source / "config.json")
    block, sizes = _parse_config(source / "config.json", config)
    tensors = tensors_in_folder(source)
    _check_count(source, len(tensors), sizes, stacks_experts=format_of(block).stacks_experts)
    parts = leaf_slices(block, sizes)
    tensors = _without_buffers(tensors, sizes)
    _check_tensors(source, tensors, parts)
    dtype = dtype or _widest_dtype(tensors)
    values = _config_values(block, sizes) | {"weight_dtype": dtype}
    weights = _load_weights(
        canonical_weights(block, sizes, np.dtype(DTYPES[NAMES[dtype]])), parts, tensors
    )
    with atomic_folder(destination) as folder:
        model = {"decoder_block": block, "model": dataclasses.asdict(sizes)}
        metadata = {**model, "layers_after": 0}
        with checkpoint.open_checkpoints(
            folder / checkpoint.WEIGHTS_FOLDER, max_to_keep=1, asynchronous=False
        ) as checkpoints:
            checkpoint.save_checkpoint(checkpoints, 0, {"weights": weights}, metadata)
        text = yaml.safe_dump(values, sort_keys=False)
        write_file(folder / "config.yml", text)
        carried = copy_from_hugging_face(source, config, folder)
    return _summarize(block, parts, tensors, dtype, carried)


def to_hugging_face(
    source: Path,
    destination: Path,
    *,
    step: int | None = None,
    dtype: str = "",
    max_shard_bytes: int = 5 * GIGABYTE,
    max_length: int | None = None,
    allow_unverified: bool = False,
) -> ConversionSummary:
    """Makes a folder with config.json and safetensors of a checkpoint's weights.

    If the run began with a converted checkpoint, the folder also gets the tokenizer and the
    generation settings of that one; otherwise the tokenizer that the run names.

    Args:
        source: The folder of a run, or one that `from_hugging_face` made.
        destination: The folder, which must not exist or be empty.
        step: The step of the checkpoint. Default: the newest.
        dtype: `float32` or `bfloat16`. Default: the dtype of the checkpoint.
        max_shard_bytes: The largest size of a file, if there are several.
        max_length: `max_position_embeddings`, in tokens. Default: what the rotary positions were
            stretched to, or 4096, or 131072 for Llama 4.
        allow_unverified: Whether a checkpoint without digests is accepted.

    Returns:
        A summary of the conversion.

    Raises:
        ValueError: If there is no such checkpoint, its weights are still to be averaged, or Hugging
            Face has no such model.
    """
    folder = checkpoint.checkpoints_folder(source)
    carried, token_ids = files_to_hugging_face(source)
    with checkpoint.open_checkpoints_read_only(folder) as checkpoints:
        step = checkpoint.verified_step(checkpoints, step, allow_unverified=allow_unverified)
        metadata = checkpoint.read_metadata(checkpoints, step)
        checkpoint.check_not_to_average(metadata, f"{folder} step {step}")
        layers_after = metadata.get("layers_after", 0)
        block, sizes = read_sizes(metadata)
        config = format_of(block).write(sizes, max_length)
        parts = leaf_slices(block, sizes, layers_after)
        saved = _check_saved_leaves(checkpoints, step, block, sizes, layers_after)
        stored = dtype or saved["embed/table"][1]
        shapes = {part.tensor: part.shape for slices in parts.values() for part in slices}
        new_tensors = {
            name: (NAMES[stored], shapes[name]) for name in sorted(shapes, key=_layer_sort_key)
        }
        with atomic_folder(destination) as new:
            tensors = create_files(new, new_tensors, max_shard_bytes)
            for path, slices in parts.items():
                leaf = checkpoint.restore_leaf(checkpoints, step, f"weights/{path}")
                for part in slices:
                    part.tensor_view(map_new_tensor(tensors[part.tensor]))[...] = part.leaf_view(
                        leaf
                    )
            fields = _NOT_IN_CHECKPOINTS | token_ids | {"torch_dtype": stored}
            write_file(new / "config.json", json.dumps(config | fields, indent=2) + "\n")
            for name, content in carried.items():
                write_file(new / name, content)
    return _summarize(block, parts, tensors, stored, carried)


def _read_json_object(file: Path) -> ConfigValues:
    if not os.path.lexists(file):
        raise ValueError(f"{file} is missing. Give a folder as `save_pretrained` writes it.")
    config = parse_json(read_text(file, most_bytes=MEGABYTE), str(file))
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object.")
    return config


def _parse_config(file: Path, config: ConfigValues) -> tuple[str, ModelConfig]:
    try:
        return read_model(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _check_count(
    folder: Path, num_tensors: int, sizes: ModelConfig, *, stacks_experts: bool
) -> None:
    """Refuses sizes that need far more tensors than the folder has, before allocating anything."""
    num_experts = 0 if sizes.moe is None or stacks_experts else sizes.moe.num_experts
    num_sparse = sizes.base_num_decoder_layers - sizes.num_dense_layers
    least = sizes.base_num_decoder_layers + num_sparse * num_experts
    if least > num_tensors:
        raise ValueError(
            f"config.json has {sizes.base_num_decoder_layers} layers"
            + (f" and {num_experts} experts" if num_experts else "")
            + f", and {folder} has {num_tensors} tensors: not one for each. Correct config.json, "
            "or copy the missing files."
        )


def _config_values(block: str, sizes: ModelConfig) -> ConfigValues:
    """Returns the config keys that describe a model."""
    matching = (name for name, preset in models.PRESETS.items() if _is_of(preset, block, sizes))
    name = {"model_name": next(matching, f"{block.replace('_', '-')}-tiny")}
    return {**name, "decoder_block": block, **dataclasses.asdict(sizes)}


def _is_of(preset: Mapping[str, Any], block: str, sizes: ModelConfig) -> bool:
    keys = {"decoder_block": "llama", **preset}
    values = {"decoder_block": block, **dataclasses.asdict(sizes)}
    compared = keys.keys() - {*checkpoint.NOT_COMPUTED}
    return compared <= values.keys() and all(values[key] == keys[key] for key in compared)


def _without_buffers(
    tensors: dict[str, StoredTensor], sizes: ModelConfig
) -> dict[str, StoredTensor]:
    """Removes buffers, and the copy of a tied embedding, from the tensors."""
    kept = {name: x for name, x in tensors.items() if not _BUFFERS.fullmatch(name)}
    head, table = kept.get("lm_head.weight"), kept.get("model.embed_tokens.weight")
    tied = isinstance(sizes, models.LlamaConfig) and sizes.logits_via_embedding
    if not tied or head is None or table is None:
        return kept
    if head.dtype != table.dtype or not np.array_equal(
        read_tensor(head).view(np.uint8), read_tensor(table).view(np.uint8)
    ):
        raise ValueError(
            f"{head.file}: tensor lm_head.weight is not model.embed_tokens.weight, and "
            "`tie_word_embeddings` is true. Set it to false if the model has a head of its own."
        )
    return {name: x for name, x in kept.items() if name != "lm_head.weight"}


def _check_tensors(folder: Path, tensors: Mapping[str, StoredTensor], parts: LeafSlices) -> None:
    """Checks that the tensors are exactly those of the model, in its shapes."""
    expected_shapes = {part.tensor: part.shape for slices in parts.values() for part in slices}
    problems = [
        f"{x.file}: tensor {name} is {[*x.shape]}, and the model of config.json has "
        f"{[*expected_shapes[name]]}"
        for name, x in tensors.items()
        if name in expected_shapes and x.shape != expected_shapes[name]
    ]
    problems += [
        f"{folder}: tensor {name} is missing" for name in expected_shapes if name not in tensors
    ]
    problems += [
        f"{x.file}: tensor {name} is not in the model of config.json"
        for name, x in tensors.items()
        if name not in expected_shapes
    ]
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise ValueError(
            "The tensors are not those of the model that config.json describes:\n  "
            + "\n  ".join([*problems[:8], *more])
        )


def _widest_dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """Returns the dtype that holds every number exactly: bfloat16 or float32."""
    return "bfloat16" if {x.dtype for x in tensors.values()} == {"BF16"} else "float32"


class _NotCopied(np.ndarray):
    """An array that orbax does not copy before it writes it. It copies all other arrays."""

    def __deepcopy__(self, memo: Any) -> "_NotCopied":
        return self


def _load_weights(tree: PyTree, parts: LeafSlices, tensors: Mapping[str, StoredTensor]) -> PyTree:
    """Loads the weights of an abstract tree into arrays in host memory, each tensor once."""
    shapes = weight_shapes(tree)
    assert checkpoint.leaf_specs(shapes).keys() == parts.keys()
    arrays = jax.tree.map(lambda x: np.empty(x.shape, x.dtype).view(_NotCopied), shapes)
    read_by: dict[str, list[tuple[TensorSlice, np.ndarray]]] = {}
    for path, array in jax.tree_util.tree_leaves_with_path(arrays):
        for part in parts[jax.tree_util.keystr(path, simple=True, separator="/")]:
            read_by.setdefault(part.tensor, []).append((part, array))
    for name, slices in read_by.items():
        tensor = read_tensor(tensors[name])
        for part, array in slices:
            part.leaf_view(array)[...] = part.tensor_view(tensor)
    return arrays


def _check_saved_leaves(
    checkpoints: ocp.CheckpointManager, step: int, block: str, sizes: ModelConfig, layers_after: int
) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Returns the saved leaf specs, which must be those of the model, all of one dtype."""
    saved = checkpoint.saved_leaf_specs(checkpoints, step, "weights")
    dtype = np.dtype(DTYPES[NAMES[saved["embed/table"][1]]])
    weights = canonical_weights(block, sizes, dtype, layers_after)
    expected = checkpoint.leaf_specs(weight_shapes(weights))
    where = f"{checkpoints.directory} step {step}"
    checkpoint.check_same_leaves(saved, expected, where, "The checkpoint is corrupt.")
    return saved


def _summarize(
    block: str,
    parts: LeafSlices,
    tensors: Mapping[str, StoredTensor | NewTensor],
    dtype: str,
    carried: Iterable[str],
) -> ConversionSummary:
    shapes = {part.tensor: part.shape for slices in parts.values() for part in slices}
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    files = {x.file for x in tensors.values()}
    return ConversionSummary(
        decoder_block=block,
        num_parameters=count,
        num_tensors=len(shapes),
        num_files=len(files),
        dtype=dtype,
        carried=tuple(carried),
    )


def _layer_sort_key(name: str) -> list[Any]:
    """Returns a sort key by which layer 10 follows layer 9."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in name.split(".")]
