"""Samples of a run: the text with which its model goes on behind a prompt."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ... import models, sharding
from ..._input import is_file
from ...data import load_tokenizer
from ...data.sources import Tokenizer
from ..checkpoint import _store
from ..checkpoint._init_from import (
    WEIGHTS_FOLDER,
    check_saved_weights,
    checkpoints_folder,
    verified_step,
)
from ..config._config import Config
from ..config._load import check_values, load_config
from ..estimate._memory_estimate import device_bytes
from ._decoding_plan import DecodingPlan, decoding_plan
from ._prompts import Sample, SamplingOptions, sampler

_AXES = ("fsdp", "tensor", "expert")
SETTINGS = (*(f"ici_{axis}_parallelism" for axis in _AXES), "dtype", "logical_axis_rules")
"""Keys of a run that a sample may have with another value."""

BYTES = "bytes"
"""The name of the tokenizer whose tokens are the bytes of a text."""


def sample(
    run: str | PathLike[str],
    prompts: Sequence[str],
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    bos: int | None = None,
    step: int | None = None,
    tokenizer: str | None = None,
    allow_unverified: bool = False,
    **settings: Any,
) -> list[Sample]:
    """Returns the text with which the model of a run goes on behind some prompts.

    Layers keep keys and values of earlier tokens (DeepSeek's the latents of both), so each new
    token is computed once. The run may go on while this function reads one of its checkpoints.

    Args:
        run: The folder of a run, or one that `jaxpipe convert` made.
        prompts: Texts of at least one token, which run as one batch.
        max_tokens: The most tokens that follow a prompt. Fewer do if the document ends.
        temperature: The divisor of logits before a token is drawn; 0 takes the likeliest.
        top_p: Tokens are drawn of the fewest that have this share of the probability together.
        seed: The seed of all draws. That of a token depends on it and on the indices of the prompt
            and of the token alone.
        bos: The id of a token in front of every prompt, as models of others were trained with; None
            for none, as in training here.
        step: The step of the checkpoint. Default: the newest.
        tokenizer: A tokenizer.json or a sentencepiece .model, or "bytes". Default: that of the
            run.
        allow_unverified: Whether a checkpoint without digests is accepted.
        **settings: Keys of a run: `ici_fsdp_parallelism`, `ici_tensor_parallelism` and
            `ici_expert_parallelism` divide the weights over devices, by default over one; `dtype`
            and `logical_axis_rules` are those of the run by default.

    Returns:
        A sample for each prompt.

    Raises:
        ValueError: If there is no such checkpoint, its weights are still to be averaged or do not
            fit the devices, no tokenizer is known, or an argument is out of its range.

    Example:
        >>> run = "runs/sonnets"
        >>> found = sample(run, ["Shall I"], temperature=0.8, max_tokens=64)  # doctest: +SKIP
        >>> print(found[0].text)  # doctest: +SKIP
    """
    options = SamplingOptions(max_tokens, temperature, top_p, seed, bos)
    config = sampled_config(run, settings)
    opened = open_run(run, config, step, tokenizer, allow_unverified=allow_unverified)
    return sampler(opened.plan, opened.tokenizer, prompts, options)(opened.weights)


@dataclass(frozen=True)
class OpenedRun:
    """The model of a checkpoint, on the devices that decode it.

    Attributes:
        plan: The model and the devices.
        step: The step of the checkpoint.
        trained_length: The tokens of a row in training; None if it is not known.
    """

    plan: DecodingPlan
    weights: PyTree
    tokenizer: Tokenizer
    step: int
    trained_length: int | None


def sampled_config(run: str | PathLike[str], settings: Mapping[str, Any]) -> Config:
    """Returns the config of a run on one device, or on those that `settings` say."""
    file = Path(run) / "config.yml"
    if not is_file(file):
        raise ValueError(
            f"{file} is missing. Give the folder of a run, or one that `jaxpipe convert` made."
        )
    for key in settings:
        if key not in SETTINGS:
            raise ValueError(
                f"`{key}` is no key that a sample reads. These are {', '.join(SETTINGS)}; all "
                "others are as in the run."
            )
    check_values(dict(settings), "the settings of the sample")
    values = load_config([file], presets=models.PRESETS).model_dump()
    one_device = {key: 1 for key in values if key.endswith("_parallelism")}
    return Config.model_validate(values | one_device | dict(settings))


def open_run(
    run: str | PathLike[str],
    config: Config,
    step: int | None = None,
    tokenizer: str | None = None,
    *,
    allow_unverified: bool = False,
) -> OpenedRun:
    """Restores the weights of a checkpoint for decoding. Changes nothing in the folder."""
    read_tokenizer = load_tokenizer(
        _tokenizer_path(config, tokenizer), vocab_size=config.vocab_size
    )
    plan, folder = decoding_plan(config, _mesh(config)), checkpoints_folder(Path(run))
    with _store.open_checkpoints_read_only(folder) as checkpoints:
        step = verified_step(checkpoints, step, allow_unverified=allow_unverified)
        metadata = _store.read_metadata(checkpoints, step)
        layers_after = metadata.get("layers_after", 0)
        as_saved = plan.weights.on_one_stage(layers_after)
        check_saved_weights(checkpoints, step, metadata, as_saved, f"{folder} step {step}")
        shapes = plan.shapes(layers_after)
        _check_fits(shapes, plan.mesh)
        weights = _store.restore_weights(checkpoints, step, shapes)
    if layers_after:
        weights = plan.lay_out(weights)
    length = None if folder.name == WEIGHTS_FOLDER else config.max_target_length
    return OpenedRun(plan, weights, read_tokenizer, step, length)


def _tokenizer_path(config: Config, wanted: str | None) -> str:
    if wanted is not None:
        return "" if wanted == BYTES else wanted
    if not config.reads_text:
        raise ValueError(
            f"`dataset_type` of the run is {config.dataset_type!r}, so nothing says which "
            "tokenizer its tokens are of. Give `tokenizer`: a tokenizer.json, a sentencepiece "
            f".model, or {BYTES!r}."
        )
    return config.tokenizer_path


def _mesh(config: Config) -> Mesh:
    sizes = {axis: getattr(config, f"ici_{axis}_parallelism") for axis in _AXES}
    devices = jax.devices()
    if -1 not in sizes.values():
        devices = devices[: math.prod(sizes.values())]
    return sharding.make_mesh(sizes, devices=devices)


def _check_fits(shapes: PyTree[jax.ShapeDtypeStruct], mesh: Mesh) -> None:
    """Checks that devices have room for their shards of the weights."""
    leaves = jax.tree.leaves(shapes)
    shards = (math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    needed = sum(size * leaf.dtype.itemsize for size, leaf in zip(shards, leaves, strict=True))
    most = device_bytes(mesh.devices.flat[0])
    if most and needed > most:
        raise ValueError(
            f"The weights need {needed / 1e9:.3g} GB on each of {mesh.size} device(s), and a "
            f"device has {most / 1e9:.3g} GB. Divide them over more: `ici_fsdp_parallelism`, "
            "`ici_tensor_parallelism` or `ici_expert_parallelism`."
        )
