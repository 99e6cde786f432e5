"""Kinds of models that Hugging Face has too: their config.json, and their weights as a whole."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import PyTree

from ... import models
from ..._input import short_repr
from ...models import MODEL_FAMILIES, ModelConfig
from ...models.weights import stack_weights
from ...train.config import check_values
from ._deepseek import deepseek_dense_slices, deepseek_slices, read_deepseek, write_deepseek
from ._fields import ConfigValues, check_no_problems
from ._gemma import gemma_slices, read_gemma, write_gemma
from ._gpt_oss import gpt_oss_slices, read_gpt_oss, write_gpt_oss
from ._llama import LLAMA_FIELDS, llama_slices, read_llama, write_llama
from ._llama4 import llama4_slices, read_llama4, write_llama4
from ._tensors import LeafSlices, boundary, stacked_layers, with_prefix


@dataclass(frozen=True)
class ModelFormat:
    """A kind of model, as jaxpipe and as Hugging Face have it."""

    # `config.json -> keys of ours`. Its ValueErrors are lists of what is not supported.
    read: Callable[[Mapping[str, Any]], ConfigValues]
    write: Callable[..., ConfigValues]  # `(sizes, max_length) -> config.json`
    # `sizes -> the slices of a layer of the pipeline`; if that is a block of layers,
    # `(sizes, index) -> those of one of them`.
    layer: Callable[..., LeafSlices]
    dense: Callable[..., LeafSlices] = lambda sizes: {}  # the same for a layer before the pipeline
    stacks_experts: bool = False  # whether a tensor has the matrices of all experts


def _llama(block: str) -> ModelFormat:
    read, write, layer = (partial(f, block=block) for f in (read_llama, write_llama, llama_slices))
    return ModelFormat(read, write, layer)


MODEL_FORMATS = {block: _llama(block) for block in LLAMA_FIELDS} | {
    "gemma3": ModelFormat(read_gemma, write_gemma, gemma_slices),
    "gpt_oss": ModelFormat(read_gpt_oss, write_gpt_oss, gpt_oss_slices, stacks_experts=True),
    "llama4": ModelFormat(read_llama4, write_llama4, llama4_slices, stacks_experts=True),
    "deepseek": ModelFormat(read_deepseek, write_deepseek, deepseek_slices, deepseek_dense_slices),
}
"""The formats by `decoder_block`, of the families that Hugging Face has too."""

MODEL_TYPES = {block: block for block in LLAMA_FIELDS} | {
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt_oss",
    "llama4_text": "llama4",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
}
"""From Hugging Face's `model_type` to `decoder_block`."""


def format_of(block: str) -> ModelFormat:
    """Returns the format of a `decoder_block`; raises a `ValueError` if Hugging Face has none."""
    if block not in MODEL_FORMATS:
        raise ValueError(
            f"`decoder_block` is {block!r}, which Hugging Face does not have. Models of "
            f"{', '.join(MODEL_FORMATS)} are converted."
        )
    return MODEL_FORMATS[block]


def read_model(config: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    """Returns `decoder_block` and the sizes that a config.json gives."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise ValueError(
            f"`model_type` is {short_repr(kind)}: only {', '.join(MODEL_TYPES)} are supported"
        )
    block = MODEL_TYPES[kind]
    return block, _parse_sizes(block, MODEL_FORMATS[block].read(config))


def read_sizes(metadata: Mapping[str, Any]) -> tuple[str, ModelConfig]:
    """Returns `decoder_block` and the sizes from the metadata of a checkpoint."""
    saved, saved_block = metadata["model"], metadata.get("decoder_block")
    for block, family in MODEL_FAMILIES.items():
        fields = dataclasses.fields(family.sizes)  # pyright: ignore[reportArgumentType]
        required = {f.name for f in fields if f.default is dataclasses.MISSING}
        if not required <= saved.keys() <= {f.name for f in fields}:
            continue
        sizes = family.sizes(**saved)
        # Older checkpoints do not say which of two families with the same sizes they are of.
        is_fixed = all(getattr(sizes, name) == value for name, value in family.fixed.items())
        if saved_block in (None, block) and is_fixed:
            return block, sizes
    raise ValueError(
        f"The checkpoint is of a model with {', '.join(sorted(saved))}, which is of no family: "
        f"{', '.join(MODEL_FAMILIES)}."
    )


def canonical_weights(
    block: str, sizes: ModelConfig, dtype: Any, layers_after: int = 0
) -> dict[str, PyTree]:
    """Returns the abstract weights of a checkpoint: layers in forward order, [L, ...]."""
    tree = MODEL_FAMILIES[block].weights(sizes, dtype, layers_after=layers_after)
    count = (sizes.num_pipeline_layers - layers_after,)
    stages = stack_weights(tree["layer"], count, ("layers",))
    return {"embed": tree["embed"], "stages": stages, "head": tree["head"]}


def leaf_slices(block: str, sizes: ModelConfig, layers_after: int = 0) -> LeafSlices:
    """Returns the slices of every leaf of a checkpoint's weights."""
    kind = format_of(block)
    tied = isinstance(sizes, models.LlamaConfig) and sizes.logits_via_embedding
    num_dense, num_layers = sizes.num_dense_layers, sizes.num_pipeline_layers - layers_after
    dense = stacked_layers(kind.dense(sizes), range(num_dense)) if num_dense else {}
    first_after = num_dense + num_layers * sizes.layers_per_block
    after = _layers(kind, sizes, first_after, layers_after) if layers_after else {}
    return {
        **boundary(sizes.base_emb_dim, sizes.vocab_size, tied=tied),
        **with_prefix("embed/layers", dense),
        **with_prefix("stages", _layers(kind, sizes, num_dense, num_layers)),
        **with_prefix("head/layers", after),
    }


def _layers(kind: ModelFormat, sizes: ModelConfig, first: int, count: int) -> LeafSlices:
    """Returns the slices of `count` layers of the pipeline, from layer `first` of the model on."""
    size = sizes.layers_per_block
    if size == 1:
        return stacked_layers(kind.layer(sizes), range(first, first + count))
    slices: LeafSlices = {}
    for i in range(size):
        ids = range(first + i, first + count * size, size)
        slices |= with_prefix(f"layer_{i}", stacked_layers(kind.layer(sizes, i), ids))
    return slices


def _parse_sizes(block: str, values: ConfigValues) -> ModelConfig:
    """Parses sizes from JSON values, where a float may be written as an integer."""
    fields = dataclasses.fields(MODEL_FAMILIES[block].sizes)  # pyright: ignore[reportArgumentType]
    types = {field.name: field.type for field in fields}
    values = {**MODEL_FAMILIES[block].fixed, **values}
    floats = {name for name, kind in types.items() if kind is float}
    typed = {
        name: float(value)
        if name in floats and type(value) is int and abs(value) < 2**63
        else value
        for name, value in values.items()
    }
    check_no_problems(
        [
            f"`{name}` would be {short_repr(value)}, which is no "
            f"{getattr(types[name], '__name__', '')}"
            for name, value in typed.items()
            if type(value) is not types[name]
        ]
    )
    check_values({"decoder_block": block, **typed}, "config.json")
    return MODEL_FAMILIES[block].sizes(**typed)
