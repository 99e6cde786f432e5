"""Reads a run's config into the records of its parts, and checks that they agree.

This is the one place where a run's plans are made. S ranks, M microbatches.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ... import sharding
from ...api import pipeline
from ...autodiff.backward import check_offload
from ...data.batches import global_batch_size
from ...engines import Engine
from ...kernels import check_stored_scores
from ...models import MODEL_FAMILIES, ModelConfig, logical_axes
from ...models.weights import weight_shapes
from ...schedules import language
from ...sharding.layout import LayerLayout, divide_exactly
from ...sharding.specs import axes_of_dim
from ...spmd.circular_engine import check_circular
from ...xla.compiler_flags import FLAGS, StepTraits, default_options
from ..config._config import Config, check_optimizer_reads_keys, parse_xla_flags
from ..config._keys import GATHER_KEYS
from ..optim._decay import check_weight_decay_exclude
from ..optim._factories import treats_arrays_as_wholes
from ..optim._router_bias import drop_router_biases
from ._devices import BatchPlan, DeviceLayout
from ._model import ModelPlan, build_model, layer_bytes, model_config, model_plan
from ._optimizer import check_optimizer
from ._schedule_selection import ScheduleSelection, circular_layout, scheduled_layout
from ._setup import Setup, StepPlan
from ._weight_plan import StatePlan, WeightPlan


def set_up(config: Config, devices: Sequence[Any]) -> Setup:
    """Derives a run's setup from its config and devices, and checks that they agree.

    Args:
        config: The config of the run.
        devices: The devices to train on, as `jax.devices()` returns them.

    Returns:
        The setup.

    Raises:
        ValueError: If sizes do not divide, do not suit the engine, or need other devices.

    Example:
        >>> import jax
        >>> from jaxpipe.models import PRESETS
        >>> from jaxpipe.train import load_config
        >>> config = load_config([], ["model_name=llama-tiny"], presets=PRESETS)
        >>> setup = set_up(config, jax.devices()[:1])
        >>> setup.batch.num_microbatches, setup.mesh.size
        (1, 1)
    """
    sizes = model_config(config)
    device_layout = _device_layout(config, devices)
    num_ranks = device_layout.mesh.shape["stage"]
    num_microbatches = config.num_pipeline_microbatches
    if num_microbatches == -1:
        num_microbatches = (2 if config.pipeline_delay_activation_forwarding else 1) * num_ranks
    selection, layout, num_layers_after = _divided_layers(
        config, sizes, num_ranks, num_microbatches
    )
    batch = BatchPlan(
        device_layout,
        config.gradient_accumulation_steps,
        num_microbatches,
        divide_exactly(
            global_batch_size(config.per_device_batch_size, len(devices)),
            num_microbatches,
            name="The batch (`per_device_batch_size` x devices)",
            into="`num_pipeline_microbatches`",
            fix="Change one of them.",
        ),
        config.max_target_length,
        in_host_memory=config.engine.program_per_rank,
    )
    weights = WeightPlan(
        family=MODEL_FAMILIES[config.decoder_block],
        sizes=sizes,
        dtype=config.weight_dtype,
        layout=layout,
        num_layers_after=num_layers_after,
        stages_by_rank=config.engine.storage.stages_by_rank(
            selection.schedule if selection else None
        ),
        devices=device_layout,
    )
    _check_shardings(config.engine, weights, batch)
    step = _step_plan(config, weights, batch, selection)
    _check_sizes(step)
    _check_stacked_layers(config.optimizer, weights)
    if config.optimizer_arguments or config.optimizer != Config.model_fields["optimizer"].default:
        check_optimizer(step.state)
        check_optimizer_reads_keys(config)
    _check_stored_scores(step.model, weights, batch)
    check_weight_decay_exclude(config.weight_decay_exclude, drop_router_biases(weights.abstract))
    return Setup(config, step, None if selection is None else selection.reason)


def _device_layout(config: Config, devices: Sequence[Any]) -> DeviceLayout:
    ici, dcn = (
        {
            axis: getattr(config, f"{kind}_{'pipeline' if axis == 'stage' else axis}_parallelism")
            for axis in sharding.AXES
        }
        for kind in ("ici", "dcn")
    )
    explicit = config.shard_mode == "explicit"
    mesh = sharding.make_mesh(ici, dcn, devices=devices, explicit=explicit)
    rules = axis_rules(config)
    missing = {axis for axis in sharding.ROW_AXES if axis not in dict(rules)["activation_batch"]}
    if divided := [axis for axis in sorted(missing) if mesh.shape[axis] > 1]:
        raise ValueError(
            f"`logical_axis_rules` divides 'activation_batch' over no {divided[0]!r}, and the mesh "
            f"has {mesh.shape[divided[0]]} of that axis, each with rows of its own. Add the axis."
        )
    return DeviceLayout(mesh, rules)


def axis_rules(config: Config) -> sharding.Rules:
    """Returns the logical axis rules of a run."""
    changes = tuple(
        (name, (axes,) if isinstance(axes, str) else axes or ())
        for name, axes in config.logical_axis_rules or ()
    )
    if config.shard_exp_on_fsdp:
        if "exp" in dict(changes):
            raise ValueError(
                "`shard_exp_on_fsdp` is true, and `logical_axis_rules` has a rule for 'exp'. Leave "
                "one of them out."
            )
        changes += (("exp", ("expert", "fsdp", "context")),)
    if config.sequence_parallel:
        if "activation_norm_length" in dict(changes):
            raise ValueError(
                "`sequence_parallel` is true, and `logical_axis_rules` has a rule for "
                "'activation_norm_length'. Leave one of them out."
            )
        changes += (("activation_norm_length", ("context", "tensor")),)
    return sharding.override_rules(changes)


def _divided_layers(
    config: Config, sizes: ModelConfig, num_ranks: int, num_microbatches: int
) -> tuple[ScheduleSelection | None, LayerLayout, int]:
    """Returns the schedule, the layers of every stage, and the number of layers after them."""
    engine, selection = config.engine, None
    if engine.runs_schedules:
        selection, layout = scheduled_layout(config, sizes, num_ranks, num_microbatches)
    elif engine.pipelines:
        layout = circular_layout(config, sizes, num_ranks)
        check_circular(
            num_ranks,
            layout.num_repeats,
            num_microbatches,
            delay=config.pipeline_delay_activation_forwarding,
            names=("`num_pipeline_microbatches`", "`pipeline_delay_activation_forwarding`"),
        )
    else:
        layout = LayerLayout(1, 1, sizes.num_pipeline_layers)
    return selection, layout, sizes.num_pipeline_layers - layout.num_layers


def _step_plan(
    config: Config,
    weights: WeightPlan,
    batch: BatchPlan,
    selection: ScheduleSelection | None,
) -> StepPlan:
    devices, mesh = weights.devices, weights.devices.mesh
    model = model_plan(config, weights.sizes, devices.platform, mesh.shape["context"])
    dtype, exact = jnp.dtype(config.dtype), weights.exact
    pipe = pipeline(
        build_model(model, weights),
        schedule=config.engine.own_schedule.family
        if config.engine.own_schedule
        else selection and selection.schedule,
        mesh=mesh,
        microbatches=batch.num_microbatches,
        chunks=weights.layout.num_repeats if config.engine.own_schedule else None,
        layers_per_stage=[len(ids) for ids in weights.layout.stage_layer_ids],
        engine=config.engine.name,
        remat=model.remat.tick,
        layer_remat=model.remat.layer,
        accumulate=batch.gradient_accumulation_steps,
        compute_dtype=None
        if config.engine.program_per_rank
        else lambda path: None if path in exact else dtype,
        compiler_options=compiler_options(config, mesh.devices.flat[0]),
        scan_layers=config.scan_layers(mesh.shape["tensor"]),
        param_specs=weights.param_specs,
        gather=next((when for when, key in GATHER_KEYS.items() if getattr(config, key)), None),
        costs=selection.costs if selection and "costs" in config.engine.options else None,
        **config.engine_options.changed,
    )
    return StepPlan(
        pipe=pipe,
        model=model,
        state=StatePlan(weights, config),
        batch=batch,
    )


def _check_stacked_layers(optimizer: str, weights: WeightPlan) -> None:
    """Refuses layers outside of the pipeline for optimizers to which a stack is one array."""
    tree = weights.abstract_unstacked
    stacks = [f"`{name}.layers`" for name in ("embed", "head") if "layers" in tree[name]]
    if stacks and treats_arrays_as_wholes(optimizer):
        raise ValueError(
            f"`optimizer` is {optimizer!r} and the model has layers outside of the pipeline, which "
            f"{' and '.join(stacks)} stack: a stack of layers would be one array to an optimizer "
            "that computes with whole arrays. Have all layers in the pipeline (dense layers before "
            "layers of experts are not), or choose adamw, muon or another that does not."
        )


def _check_stored_scores(model: ModelPlan, weights: WeightPlan, batch: BatchPlan) -> None:
    """Refuses to store large scores that no one asked to store."""
    mesh, rules = weights.devices.mesh.shape, dict(weights.devices.rules)
    rows, heads = (
        math.prod(mesh[axis] for axis in rules[name])
        for name in ("activation_batch", "activation_heads")
    )
    num_heads = weights.sizes.base_num_query_heads // heads
    check_stored_scores(model.attention, max(batch.microbatch_size // rows, 1), num_heads)


def compiler_options(config: Config, device: Any) -> dict[str, str]:
    """Returns XLA's options for every program of a run, whose own flags win over the defaults."""
    defaults = default_options(FLAGS, step_traits(config, device), device)
    return defaults | parse_xla_flags(config.compile_xla_flags)


def step_traits(config: Config, device: Any) -> StepTraits:
    """Returns the traits on which the defaults of compiler flags depend."""
    return StepTraits(
        device.platform,
        device.device_kind,
        config.pipeline_engine,
        pipelines=config.engine.pipelines,
        program_per_rank=config.engine.program_per_rank,
        deterministic=config.deterministic,
        has_experts=config.num_experts > 1,
        sequence_parallel=config.sequence_parallel,
        layer_bytes=layer_bytes(config),
        default_flags=config.compile_default_flags,
    )


def _check_sizes(step: StepPlan) -> None:
    """Checks that devices can run the model's kernels, and that sequences and vocabulary divide."""
    mesh, remat, tiles = step.pipeline.mesh, step.model.remat, step.state.config.num_vocab_tiling
    check_offload(remat.policy, remat.locations, mesh.devices.flat)
    divide_exactly(
        step.batch.length,
        tiles * mesh.shape["context"],
        name="`max_target_length`",
        into="`num_vocab_tiling` x the shards of the sequence",
        fix="Change one of them.",
    )
    schedule = step.pipeline.schedule
    rules = step.state.weights.devices.rules
    of_tokens = sharding.partition_spec(("activation_batch", "activation_norm_length"), rules)[1]
    divide_exactly(
        step.batch.length // (language.num_slices(schedule) if schedule else 1),
        math.prod(mesh.shape[axis] for axis in axes_of_dim(of_tokens)),
        name="The length of a sequence, or of a slice of it,",
        into="the devices that divide it between products (`sequence_parallel`)",
        fix="Change `max_target_length` or the mesh.",
    )
    if not step.pipeline.options.vocab_parallel:
        return
    weights = step.state.weights
    divide_exactly(
        weights.sizes.vocab_size,
        mesh.shape["stage"],
        name="`vocab_size`",
        into="the ranks of the pipeline",
        fix="Change one of them, or leave `pipeline_vocab_parallel` at false.",
    )
    if weights.num_layers_after or tiles > 1:
        raise ValueError(
            f"`pipeline_vocab_parallel` is true, {weights.num_layers_after} layers come after the "
            f"pipeline and `num_vocab_tiling` is {tiles}. Ranks share the vocabulary alone, and "
            "all of it at once: have no layers after the pipeline, and leave `num_vocab_tiling` at "
            "1."
        )


def _check_shardings(engine: Engine, weights: WeightPlan, batch: BatchPlan) -> None:
    """Checks that arrays divide over the devices, as programs of all or of single ranks do it."""
    if engine.program_per_rank:
        _check_mpmd_axis_rules(weights.devices.rules)
    _check_experts(engine, weights)
    tree = weights.abstract
    weights.devices.shardings(weight_shapes(tree), logical_axes(tree))
    _ = batch.shardings


def _check_experts(engine: Engine, weights: WeightPlan) -> None:
    """Refuses whole experts where XLA's partitioner would not gather them as they are stored."""
    mesh, rules = weights.devices.mesh.shape, weights.devices.rules
    stored, computed = (
        math.prod(mesh[axis] for axis in axes)
        for axes in (dict(rules)["exp"], sharding.expert_axes(rules))
    )
    num_experts = getattr(weights.sizes, "num_experts", 0)
    if stored == computed or not num_experts:
        return
    rule = f"Experts are stored in {stored} parts, by `shard_exp_on_fsdp` or a rule for 'exp', and "
    by_partitioner = engine.program_per_rank or not engine.pipelines
    if computed > 1 and not by_partitioner:
        raise ValueError(
            f"{rule}computed in {computed}: to gather each part, XLA's partitioner would gather "
            "all experts on every device. Leave `shard_exp_on_fsdp` at false, or "
            "`ici_expert_parallelism` at 1."
        )
    # libtpu 0.0.48.1 fills whole weights with zeros and adds them up: 32 s of 68 are exposed of a
    # step of deepseek3-671b on 256 chips of v5p.
    if by_partitioner and stored == num_experts and weights.devices.platform == "tpu":
        raise ValueError(
            f"{rule}there are {stored} of them. XLA:TPU gathers one on each device by an "
            "all-reduce of whole weights, which takes longer than slices. Leave "
            "`shard_exp_on_fsdp` at false."
        )


def _check_mpmd_axis_rules(rules: sharding.Rules) -> None:
    """Refuses rules that split arrays over the axis `stage`: MPMD ranks share no arrays."""
    for name, mesh_axes in rules:
        if "stage" in mesh_axes and name not in ("stage", "activation_stage"):
            raise ValueError(
                f"`logical_axis_rules` maps {name!r} to 'stage' and `pipeline_engine` is 'mpmd', "
                "where ranks run programs of their own and share no arrays. Map it to "
                "other axes."
            )
