"""A request: the settings of a run, and which of the keys that a planner chooses are given.

Keys that a planner chooses are free until they are given. All others are passed on to the run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import PyTree

from ..cost.work import Experts, LatentAttention, ModelWork, transformer
from ..engines import usual_engine
from ..models import PRESETS, DeepseekConfig
from ..sharding import AXES
from ..sharding.layout import parse_layout
from ..train import Config, load_config
from ..train.config import base_yaml, parse_yaml
from ..train.plan import ModelConfig, model_config
from ._candidates import Space, engine_named
from ._devices import Devices
from ._model import PlannedModel, planned_model

Values = dict[str, Any]

AXIS_KEYS = {axis: "pipeline" if axis == "stage" else axis for axis in AXES}
"""The name of each mesh axis in keys such as `ici_pipeline_parallelism`."""

GATHER_KEYS = {
    "once": "pipeline_fsdp_ag_once",
    "repeat": "pipeline_fsdp_ag_per_repeat",
    "layer": "pipeline_fsdp_ag_per_layer",
}

_FIXED = {
    "pipeline_engine": "engine",
    "pipeline_schedule": "schedule",
    "num_pipeline_repeats": "chunks",
    "num_pipeline_microbatches": "microbatches",
    "remat_policy": "policy",
    "num_vocab_tiling": "vocab_tiling",
    "gradient_accumulation_steps": "accumulation",
}
"""Keys that fix a field of a candidate, and the field."""

_FREE = {"num_pipeline_repeats": -1, "num_pipeline_microbatches": -1, "pipeline_schedule": "auto"}
"""Values of these keys that leave them free."""

_USABLE = 0.95
"""The share of a device's memory that is planned with; the rest is for what is not foreseen."""

_SCOPE_KEYS = "set_remat_policy_on_pipeline_iterations", "set_remat_policy_on_layers_per_stage"
_CHOSEN = (*_FIXED, *GATHER_KEYS.values(), *_SCOPE_KEYS, "pipeline_layout")


@dataclass(frozen=True, eq=False)
class Request:
    """The model, the devices and the keys that a plan is for.

    Attributes:
        devices: The devices of the run.
        batch: Sequences of a step.
        sequence: Tokens of a sequence.
        limit: Bytes of memory that a plan may use on a device.
        model: The model's sizes that decide memory.
        work: The work of the model per token.
        values: Values of keys of a run that no candidate changes.
        space: The sizes and limits from which candidates are made.
        before: Layers before those of the pipeline, which run with the embedding.
        after: Layers after them, which run with the head.
        own: A model of plain functions; None for one of the trainer's.
    """

    devices: Devices
    batch: int
    sequence: int
    limit: float
    model: PlannedModel
    work: ModelWork
    values: Values
    space: Space
    before: int
    after: int
    own: "OwnInputs | None" = None


class OwnModel(Protocol):
    """A model of plain functions, such as a `jaxpipe.Model`."""

    @property
    def embed(self) -> Callable[..., Any]: ...
    @property
    def layer(self) -> Any: ...
    @property
    def loss(self) -> Callable[..., Any]: ...
    @property
    def tied(self) -> bool: ...
    @property
    def shared(self) -> bool: ...
    @property
    def to_groups(self) -> Callable[..., Any]: ...


class OwnInputs(NamedTuple):
    """A model of plain functions, with what it is called with.

    Attributes:
        model: The model of plain functions.
        params: Its parameters, or their shapes.
        example: A batch, or its shapes.
    """

    model: OwnModel
    params: PyTree
    example: PyTree


def make_request(
    settings: Mapping[str, Any],
    devices: Devices,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    memory_gb: float | None = None,
    max_stages: int | None = None,
    schedule: str | None = None,
) -> Request:
    """Reads what a plan is for.

    Raises:
        ValueError: If a value is wrong.
    """
    settings = dict(settings)
    if schedule and not usual_engine(schedule).runs_schedules:
        settings["pipeline_engine"] = usual_engine(schedule).config_name
    elif schedule:
        settings["pipeline_schedule"] = schedule
        name = settings.get("pipeline_engine", usual_engine(None).config_name)
        if not engine_named(name).runs_schedules:
            settings["pipeline_engine"] = usual_engine(schedule).config_name
    fixed, chosen = _fixed(settings)
    values = {key: value for key, value in settings.items() if key not in chosen}
    config = _checked(values | ({"max_target_length": sequence} if sequence else {}))
    accumulation = fixed.get("accumulation", 1)
    rows = batch or round(config.per_device_batch_size * devices.num_devices * accumulation)
    sequence = config.max_target_length
    _check_positive(batch=rows, max_stages=max_stages or 1, memory_gb=memory_gb or 1)
    values |= {
        "max_target_length": sequence,
        "per_device_batch_size": rows / devices.num_devices / accumulation,
    }
    sizes = model_config(config)
    before = getattr(sizes, "first_num_dense_layers", 0)
    uniform = sizes.base_num_decoder_layers - before
    pipelined = uniform
    if config.pipeline_parallel_layers != -1:
        pipelined = config.pipeline_parallel_layers
    counts = fixed.get("counts", (pipelined,))
    if sum(counts) != pipelined:
        raise ValueError(
            f"`pipeline_layout` has {sum(counts)} layers, and the model's pipeline {pipelined}. "
            "Give a layout of as many."
        )
    return Request(
        devices,
        rows,
        sequence,
        usable_bytes(devices, memory_gb),
        _planned(config, sizes, pipelined, devices),
        _work(sizes, config.dtype),
        values,
        Space(
            devices,
            rows,
            sequence,
            pipelined,
            getattr(sizes, "num_experts", 0),
            getattr(sizes, "base_num_kv_heads", sizes.base_num_query_heads),
            sizes.vocab_size,
            max_stages or devices.num_devices,
            fixed,
            without=tuple(name for name, key in GATHER_KEYS.items() if settings.get(key) is False),
        ),
        before,
        uniform - pipelined,
    )


def usable_bytes(devices: Devices, memory_gb: float | None) -> float:
    """Returns the bytes of memory that a plan may use on a device."""
    return memory_gb * 1e9 if memory_gb else _USABLE * devices.memory_bytes


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"`{name}` is {value:g}. Give a number above 0.")


def _checked(values: Values) -> Config:
    """Returns the config of keys that a planner does not choose, after the checks of a run."""
    unchosen = {k: v for k, v in values.items() if k != "pipeline_parallel_layers"}
    pairs = [f"{key}={_yaml(value)}" for key, value in unchosen.items()]
    config = load_config([], pairs, presets=PRESETS)
    layers = values.get("pipeline_parallel_layers", -1)
    return config.model_copy(update={"pipeline_parallel_layers": layers})


def base_values(values: Mapping[str, Any]) -> Values:
    """Returns the values of all keys: defaults, the model's preset, and those given."""
    base = _base()
    preset = PRESETS[values.get("model_name", base["model_name"])]
    return {**base, **preset, **values}


@cache
def _base() -> Values:
    return parse_yaml(base_yaml(), "base.yml")


def _yaml(value: Any) -> str:
    """Returns a value as YAML on one line."""
    return json.dumps(value)


def _fixed(settings: Mapping[str, Any]) -> tuple[Values, set[str]]:
    """Returns the fields of candidates that are given, and the keys that give them."""
    fixed: Values = {}
    chosen = {key for key in settings if key in _CHOSEN}
    for key, name in _FIXED.items():
        if key in settings and settings[key] != _FREE.get(key):
            fixed[name] = settings[key]
    for axis, name in AXIS_KEYS.items():
        ici, dcn = (settings.get(f"{kind}_{name}_parallelism") for kind in ("ici", "dcn"))
        chosen |= {f"{kind}_{name}_parallelism" for kind in ("ici", "dcn")} & set(settings)
        if ici not in (None, -1):
            fixed[axis] = int(ici) * int(dcn or 1)
        if dcn not in (None, 1):
            fixed["across"] = axis
    gathers = [name for name, key in GATHER_KEYS.items() if settings.get(key)]
    if gathers:
        fixed["gather"] = gathers[0]
    ticks, layers = (settings.get(key) for key in _SCOPE_KEYS)
    if ticks is not None or layers is not None:
        fixed["scope"] = {(True, True): "both", (False, True): "layer"}.get(
            (ticks is not False, bool(layers)), "tick"
        )
    if settings.get("pipeline_layout"):
        fixed["counts"] = parse_layout(settings["pipeline_layout"])
    return fixed, chosen


def layout_text(counts: Sequence[int]) -> str:
    """Returns the layers of every stage as the value of `pipeline_layout`.

    Example:
        >>> layout_text((1, 2, 1))
        'Et|t*2|tL'
    """
    stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    return f"E{'|'.join(stages)}L"


def _planned(
    config: Config, sizes: ModelConfig, num_pipelined: int, devices: Devices
) -> PlannedModel:
    """Returns the sizes of a model of the trainer; kernels of attention are for TPUs and GPUs."""
    on_cpu = devices.generation == "cpu"
    no_kernel = config.attention == "dot_product" or on_cpu
    return planned_model(
        config.model_name,
        config.decoder_block,
        sizes,
        num_pipelined,
        dtypes=(config.weight_dtype, config.dtype),
        scores_length=config.max_target_length if no_kernel else 0,
        on_cpu=on_cpu,
        on_gpu=devices.is_gpu and not on_cpu,
        grouped_kernel=config.megablox is not False and not on_cpu,
    )


def _work(sizes: ModelConfig, dtype: str) -> ModelWork:
    """Returns the work of a model of the trainer, whose layers read weights in this dtype."""
    latent = experts = None
    if isinstance(sizes, DeepseekConfig):
        at, moe = sizes.attention, sizes.moe
        latent = LatentAttention(
            at.q_lora_rank, at.kv_lora_rank, at.qk_nope_head_dim, at.qk_rope_head_dim, at.v_head_dim
        )
        experts = Experts(
            moe.num_experts,
            moe.router.num_chosen,
            moe.expert_dim,
            moe.shared_experts,
            sizes.first_num_dense_layers,
        )
    work = transformer(
        layers=sizes.base_num_decoder_layers,
        hidden=sizes.base_emb_dim,
        heads=sizes.base_num_query_heads,
        vocab=sizes.vocab_size,
        mlp=sizes.base_mlp_dim,
        kv_heads=getattr(sizes, "base_num_kv_heads", None),
        head_channels=getattr(sizes, "head_dim", None),
        tied=getattr(sizes, "logits_via_embedding", False),
        latent=latent,
        experts=experts,
    )
    itemsize = float(jnp.dtype(dtype).itemsize)
    layers = (
        replace(layer, weight_bytes=itemsize, boundary_bytes=itemsize * work.hidden)
        for layer in work.layers
    )
    return replace(work, layers=tuple(layers))
