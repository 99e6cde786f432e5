"""Reads keys of a run for a planner: those that it chooses are free until they are given.

All other keys are passed on to the run.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ...autodiff.backward import TENSORS, saved_names
from ...cost.work import (
    FLOAT32_SCORE_BYTES,
    Experts,
    LatentAttention,
    ModelWork,
    backward_products,
    flops_per_token,
    transformer,
)
from ...engines import CONFIG_ENGINES, usual_engine
from ...kernels import LARGEST_STORED, for_heads_up_to
from ...models import (
    MODEL_FAMILIES,
    PRESETS,
    DeepseekConfig,
    ModelConfig,
    matmul_flops_per_token,
    num_parameters,
)
from ...models.weights import is_weight
from ...planner import (
    OFFLOAD_INPUTS,
    POLICIES,
    Devices,
    PlannedModel,
    Request,
    Space,
    Values,
    check_positive,
    device_hardware,
)
from ...schedules import FAMILIES
from ...schedules.builders import get_family
from ...sharding.layout import parse_layout
from ..config._config import Config, unread_by_engines
from ..config._keys import GATHER_KEYS, OPTION_KEYS
from ..config._load import load_config
from ..config._yaml import to_yaml
from ..estimate._planned_model import SCORES, planned_model
from ..plan._from_config import axis_rules
from ..plan._model import ModelPlan, model_config, model_plan
from ..plan._schedule_selection import is_schedule_file
from ._source import AXIS_KEYS, TrainerSource

_LAYERS_KEY = "num_layers_per_pipeline_stage"
_FIXED = {
    "pipeline_engine": "engine",
    "pipeline_schedule": "schedule",
    "num_pipeline_repeats": "chunks",
    "num_pipeline_microbatches": "microbatches",
    "remat_policy": "policy",
    "num_vocab_tiling": "vocab_tiling",
    "gradient_accumulation_steps": "accumulation",
    "shard_exp_on_fsdp": "whole_experts",
    _LAYERS_KEY: "layers_per_stage",
}
"""Keys that fix a field of a candidate, and the field."""

_COUNTS = (
    "num_pipeline_repeats",
    "num_pipeline_microbatches",
    "num_vocab_tiling",
    "gradient_accumulation_steps",
)

_FREE = {
    "num_pipeline_repeats": -1,
    "num_pipeline_microbatches": -1,
    "pipeline_schedule": "auto",
    _LAYERS_KEY: 1,
}
"""Values of these keys that leave them free."""

_SCOPE_KEYS = "set_remat_policy_on_pipeline_iterations", "set_remat_policy_on_layers_per_stage"
_CHOSEN = (*_FIXED, *GATHER_KEYS.values(), *_SCOPE_KEYS, "pipeline_layout")


def make_request(
    settings: Mapping[str, Any],
    devices: Devices,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    memory_gb: float | int | None = None,
    max_stages: int | None = None,
    schedule: str | None = None,
) -> Request:
    """Reads what a plan is for."""
    is_implied = "pipeline_engine" not in settings
    settings = dict(settings) | _keys_of_schedule(schedule, settings.get("pipeline_engine"))
    fixed, chosen = _fixed(settings, devices.num_slices)
    values = {key: value for key, value in settings.items() if key not in chosen}
    of_engines = {k: settings[k] for k in (_LAYERS_KEY, "pipeline_schedule") if k in settings}
    unread = unread_by_engines(values | of_engines)
    _check_engine_reads(unread, settings.get("pipeline_engine"), schedule if is_implied else None)
    config = _checked(values | ({"max_target_length": sequence} if sequence else {}), fixed, unread)
    if "sequence_parallel" not in settings and _gains_by_sequence_parallel(config, devices):
        values["sequence_parallel"] = True
        config = config.model_copy(update={"sequence_parallel": True})
    accumulation = fixed.get("accumulation", 1)
    rows = round(config.per_device_batch_size * devices.num_devices * accumulation)
    if batch and "per_device_batch_size" in settings and batch != rows:
        raise ValueError(
            f"`batch` is {batch}, and `per_device_batch_size` = {config.per_device_batch_size:g} "
            f"makes {rows} rows on {devices.num_devices} devices. Give one of them."
        )
    length = settings.get("max_target_length")
    if sequence and length not in (None, sequence):
        raise ValueError(
            f"`sequence` is {sequence} and `max_target_length` {length}. Give one of them."
        )
    rows, sequence = batch or rows, config.max_target_length
    check_positive(batch=rows)
    values |= {
        "max_target_length": sequence,
        "per_device_batch_size": rows / devices.num_devices / accumulation,
    }
    sizes = model_config(config)
    uniform = pipelined = sizes.num_pipeline_layers
    if config.pipeline_parallel_layers != -1:
        pipelined = config.pipeline_parallel_layers
    counts = fixed.get("counts", (pipelined,))
    if sum(counts) != pipelined:
        raise ValueError(
            f"`pipeline_layout` has {sum(counts)} layers, and the model's pipeline {pipelined}. "
            "Give a layout of as many."
        )
    widest_head = device_hardware(devices).widest_cudnn_head
    with for_heads_up_to(widest_head):
        model = model_plan(config, sizes, devices.platform)
    family = MODEL_FAMILIES[config.decoder_block]

    def planned(config: Config) -> PlannedModel:
        return planned_model(
            _name(config, settings),
            sizes,
            pipelined,
            family.weights(sizes, jnp.dtype(config.weight_dtype), layers_after=uniform - pipelined),
            model,
            config,
            rules=axis_rules(config),
        )

    return Request(
        devices=devices,
        batch=rows,
        sequence=sequence,
        limit=devices.usable_bytes(memory_gb),
        model=planned(config),
        work=_work(sizes, family.weights(sizes), model),
        source=TrainerSource(values, devices.num_slices, widest_head),
        space=replace(
            _space(config, sizes, settings, fixed, devices, rows, pipelined, max_stages),
            unread_by=unread,
        ),
        before=sizes.num_dense_layers,
        after=uniform - pipelined,
        default_flags=config.compile_default_flags,
        most_scores=math.inf if config.attention == "dot_product" else SCORES * LARGEST_STORED,
        leaner=lambda: [(words, planned(config)) for words, config in _leaner(config, settings)],
    )


def _gains_by_sequence_parallel(config: Config, devices: Devices) -> bool:
    """Returns whether plans with `tensor` have sequence parallelism: where it was compiled."""
    has_rule = "activation_norm_length" in dict(config.logical_axis_rules or ())
    return devices.platform != "cpu" and config.num_experts == 1 and not has_rule


def _keys_of_schedule(schedule: str | None, engine_name: str | None) -> Values:
    """Returns the keys that a schedule implies: its engine, if it is the only one for it."""
    if not schedule:
        return {}
    if schedule != "auto" and not is_schedule_file(schedule):
        get_family(schedule)  # an unknown name is told before layouts are tried
    usual = usual_engine(schedule)
    name = engine_name or usual.config_name
    if name in CONFIG_ENGINES and CONFIG_ENGINES[name].runs_schedules != usual.runs_schedules:
        raise ValueError(
            f"`schedule` is {schedule!r}, and `pipeline_engine` is {name!r}, which does not run "
            "it. Leave one of them out."
        )
    if not usual.runs_schedules:
        return {"pipeline_engine": name}
    # `auto` and files are read by the usual engine; a family is planned by all that run it.
    is_free = schedule in FAMILIES and engine_name is None
    return {"pipeline_schedule": schedule} | ({} if is_free else {"pipeline_engine": name})


def _check_engine_reads(
    unread: Mapping[str, tuple[str, ...]], engine_name: str | None, schedule: str | None
) -> None:
    """Checks that the engine that is given, or one that runs the schedule, reads all keys."""
    name, named = engine_name, f"`pipeline_engine` is {engine_name!r}, which does"
    if schedule:
        runners = [key for key, engine in CONFIG_ENGINES.items() if engine.runs_schedules]
        name = name or min(runners, key=lambda runner: len(unread[runner]) > 0)
        named = f"`schedule` is {schedule!r}, whose engine {name!r} does"
    if name in CONFIG_ENGINES and unread[name]:
        raise ValueError(f"{named} not read `{unread[name][0]}`. Leave one of them out.")


def _leaner(config: Config, settings: Mapping[str, Any]) -> Iterator[tuple[str, Config]]:
    """Yields configs with state in 16 bits, from the one that changes least, and their keys.

    Moments have the dtype of weights, so that both together save no more than the second.
    """
    options: dict[str, Values] = {
        "`optimizer_arguments={mu_dtype: bfloat16}`": {
            "optimizer_arguments": (("mu_dtype", "bfloat16"),)
        },
        "`weight_dtype=bfloat16`": {"weight_dtype": "bfloat16"},
    }
    if config.optimizer == "adamw" and config.weight_dtype == "float32":
        for words, keys in options.items():
            if not keys.keys() & settings.keys():
                yield words, config.model_copy(update=keys)


def _space(
    config: Config,
    sizes: ModelConfig,
    settings: Mapping[str, Any],
    fixed: Values,
    devices: Devices,
    rows: int,
    num_layers: int,
    max_stages: int | None,
) -> Space:
    """Returns the sizes and limits of candidates of all engines."""
    offloading = (OFFLOAD_INPUTS,) if device_hardware(devices).host_bandwidth else ()
    return Space(
        devices=devices,
        batch=rows,
        sequence=config.max_target_length,
        num_layers=num_layers,
        num_experts=getattr(sizes, "num_experts", 0),
        num_kv_heads=getattr(sizes, "base_num_kv_heads", sizes.base_num_query_heads),
        vocab=sizes.vocab_size,
        max_stages=max_stages or devices.num_devices,
        fixed=fixed,
        policies=(*POLICIES, *offloading),
        without=tuple(name for name, key in GATHER_KEYS.items() if settings.get(key) is False),
        options=config.engine_options,
        free_options=frozenset(name for name, key in OPTION_KEYS.items() if key not in settings),
        hidden=sizes.base_emb_dim,
        scan_layers=config.scan_layers,
    )


def _name(config: Config, settings: Mapping[str, Any]) -> str:
    """Returns the name of the preset, or of the family if sizes differ from the preset's."""
    preset = PRESETS[config.model_name]
    is_preset = all(settings.get(key, value) == value for key, value in preset.items())
    return config.model_name if is_preset else f"{config.decoder_block} of your sizes"


def _checked(values: Values, fixed: Values, unread: Mapping[str, tuple[str, ...]]) -> Config:
    """Returns the config of keys that a planner does not choose, after the checks of a run."""
    values = dict(values)
    num_pipelined = values.pop("pipeline_parallel_layers", -1)
    readers = [name for name, keys in unread.items() if not keys]
    if readers and usual_engine(None).config_name not in readers:
        values["pipeline_engine"] = readers[0]
    values["remat_policy"] = fixed.get("policy", "full").replace(OFFLOAD_INPUTS, "full")
    pairs = [f"{key}={to_yaml(value)}" for key, value in values.items()]
    config = load_config([], pairs, presets=PRESETS)
    _check_planned(config)
    return config.model_copy(update={"pipeline_parallel_layers": num_pipelined})


def _check_planned(config: Config) -> None:
    """Refuses keys that change a step in a way that the planner cannot count."""
    places = {tensor: getattr(config, tensor) for tensor in TENSORS}
    if offloaded := saved_names(config.remat_policy, places)[1]:
        raise ValueError(
            f"`remat_policy` is {config.remat_policy!r}, which offloads {', '.join(offloaded)} to "
            "the host. The planner offloads inputs of layers alone, where that is what fits: leave "
            "`remat_policy` out, or compare by `jaxpipe compile`."
        )
    if config.quantization:
        raise ValueError(
            f"`quantization` is {config.quantization!r}, and the planner knows neither time nor "
            "memory of its products. Plan without it, or compare by `jaxpipe compile`."
        )


def _fixed(settings: Mapping[str, Any], num_slices: int) -> tuple[Values, set[str]]:
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
            if dcn != num_slices or "across" in fixed:
                raise ValueError(
                    f"`dcn_{name}_parallelism` is {dcn}, and `num_slices` {num_slices}. One axis "
                    "is divided over all slices: give their number to one of these keys."
                )
            fixed["across"] = axis
    if fixed.get("policy") == "custom" and _offloads_inputs(settings):
        fixed["policy"] = OFFLOAD_INPUTS
        chosen |= TENSORS & settings.keys()
    keys = {_FIXED[key]: key for key in _COUNTS}
    keys |= {axis: f"ici_{name}_parallelism" for axis, name in AXIS_KEYS.items()}
    check_positive(**{key: fixed[name] for name, key in keys.items() if name in fixed})
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


def _offloads_inputs(settings: Mapping[str, Any]) -> bool:
    """Returns whether keys of tensors move the inputs of layers to the host, and do no more."""
    places = {key: settings[key] for key in TENSORS & settings.keys()}
    offloaded = places.pop("decoder_layer_input", None) == "offload"
    return offloaded and all(place == "remat" for place in places.values())


def _work(sizes: ModelConfig, weights: dict[str, Any], model: ModelPlan) -> ModelWork:
    """Returns the work of a model of the trainer."""
    kernel = model.attention.kernel
    latent = experts = None
    if isinstance(sizes, DeepseekConfig):
        at = sizes.attention
        latent = LatentAttention(
            at.q_lora_rank, at.kv_lora_rank, at.qk_nope_head_dim, at.qk_rope_head_dim, at.v_head_dim
        )
    if moe := sizes.moe:
        experts = Experts(
            moe.num_experts,
            moe.router.num_chosen,
            moe.expert_dim,
            moe.shared_experts,
            sizes.num_dense_layers,
        )
    # Layers without a window cost more: the planner's are all the mean of local and global ones.
    windows = [sizes.attention_scores[kind].window or 0 for kind in sizes.layer_kinds]
    work = transformer(
        layers=sizes.num_blocks,
        mlps_before_experts=sizes.layers_per_block - 1,
        hidden=sizes.base_emb_dim,
        heads=sizes.base_num_query_heads,
        vocab=sizes.vocab_size,
        mlp=sizes.mlp.width,
        gated=sizes.mlp.has_gate,
        kv_heads=getattr(sizes, "base_num_kv_heads", None),
        head_channels=getattr(sizes, "head_dim", None),
        tied=getattr(sizes, "logits_via_embedding", False),
        fused_attention=kernel != "dot_product",
        whole_square=all(attention.computes_whole_square for attention in model.attentions),
        score_bytes=FLOAT32_SCORE_BYTES,
        backward_products=backward_products(kernel),
        window=max(windows, default=0),
        windowed=sum(map(bool, windows)) / len(windows) if windows else 1.0,
        latent=latent,
        experts=experts,
    )
    _check_work(work, sizes, weights)
    itemsize = float(jnp.dtype(model.config.dtype).itemsize)
    layers = (
        replace(layer, weight_bytes=itemsize, boundary_bytes=itemsize * work.hidden)
        for layer in work.layers
    )
    return _with_counts(replace(work, layers=tuple(layers)), weights)


def _check_work(work: ModelWork, sizes: ModelConfig, weights: dict[str, Any]) -> None:
    """Checks that the planner's description of a family's layers has the products of its weights.

    The description restates them by arithmetic, and a plan of another model would be silent.
    """
    length = 512  # any: both count attention by it
    described = flops_per_token(work, length)
    counted = matmul_flops_per_token(sizes, weights, length)
    if not math.isclose(described, counted, rel_tol=1e-6):
        raise ValueError(
            f"The planner counts {described:,.0f} operations a token for this model, whose weights "
            f"make {counted:,.0f}: it does not know the layers of this `decoder_block`. Compare "
            f"layouts by `jaxpipe compile`. (`{type(sizes).__name__}` is described in "
            "`jaxpipe/train/planning/_request.py`.)"
        )


def _with_counts(work: ModelWork, weights: dict[str, Any]) -> ModelWork:
    """Returns the work with the numbers of parameters of weights without layers in `head`."""
    dense = weights["embed"].get("layers", {})
    boundary = num_parameters((weights["embed"], weights["head"])) - num_parameters(dense)
    head = num_parameters(weights["head"]) if work.head_parameters else 0
    *before, last = work.layers  # of one kind, or of dense layers and then of those with experts
    leaves = jax.tree_util.tree_leaves_with_path(weights["layer"], is_leaf=is_weight)
    experts = num_parameters([w for path, w in leaves if jax.tree_util.DictKey("experts") in path])
    outside = num_parameters(weights["layer"]) - experts
    layers = (
        *(replace(la, dense_parameters=num_parameters(dense) // la.count) for la in before),
        replace(last, dense_parameters=outside, expert_parameters=experts),
    )
    return replace(work, layers=layers, embedding_parameters=boundary - head, head_parameters=head)
