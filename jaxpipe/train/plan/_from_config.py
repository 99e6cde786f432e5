"""Builds a run's `Setup` from its config, and checks that everything in it agrees."""

from collections.abc import Sequence
from typing import Any

from ... import sharding
from ...data.batches._batches import global_batch_size
from ...sharding.layout import divide_exactly
from ...spmd.circular_engine import check_circular
from ..config._config import Config
from ..optim._decay import check_weight_decay_exclude
from ..optim._router_bias import drop_router_biases
from ._family import model_config
from ._layout import circular_layout, scheduled_layout
from ._rematerialization import check_remat
from ._setup import (
    Setup,
    batch_shardings,
    compiler_options,
    select_attention_kernel,
    select_grouped_matmul,
    weight_shardings,
)


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
        >>> setup.num_microbatches, setup.mesh.size
        (1, 1)
    """
    model = model_config(config)
    mesh = sharding.make_mesh(
        _parallelism(config, "ici"),
        _parallelism(config, "dcn"),
        devices=devices,
        explicit=config.shard_mode == "explicit",
    )
    num_ranks = mesh.shape["stage"]
    num_microbatches = config.num_pipeline_microbatches
    if num_microbatches == -1:
        rounds = 2 if config.pipeline_delay_activation_forwarding else 1
        num_microbatches = rounds * num_ranks
    schedule = None
    if config.engine.runs_schedules:
        schedule, layout = scheduled_layout(config, num_ranks, num_microbatches)
    else:
        layout = circular_layout(config, num_ranks)
    if config.engine.pipelines and not config.engine.runs_schedules:
        check_circular(
            num_ranks,
            layout.num_repeats,
            num_microbatches,
            delay=config.pipeline_delay_activation_forwarding,
            names=("`num_pipeline_microbatches`", "`pipeline_delay_activation_forwarding`"),
        )
    batch_size = global_batch_size(config.per_device_batch_size, len(devices))
    microbatch_size = divide_exactly(
        batch_size,
        num_microbatches,
        name="The batch (`per_device_batch_size` x devices)",
        into="`num_pipeline_microbatches`",
        fix="Change one of them.",
    )
    rules = sharding.override_rules(_axis_rules(config))
    setup = Setup(config, model, mesh, rules, layout, num_microbatches, microbatch_size, schedule)
    select_attention_kernel(setup)
    select_grouped_matmul(setup)
    check_remat(config, mesh.devices.flat)
    divide_exactly(
        config.max_target_length,
        config.num_vocab_tiling * mesh.shape["context"],
        name="`max_target_length`",
        into="`num_vocab_tiling` x the shards of the sequence",
        fix="Change one of them.",
    )
    if config.pipeline_vocab_parallel:
        _check_vocab_parallel(setup)
    if setup.per_stage_state:
        _check_mpmd_axis_rules(rules)
        check_no_compiler_options(compiler_options(setup))
    weight_shardings(setup)
    batch_shardings(setup)
    check_weight_decay_exclude(
        config.weight_decay_exclude, drop_router_biases(setup.abstract_weights)
    )
    if config.enable_nnx is not None:
        import_flax_decoder().check_frontend(setup)
    return setup


def _check_vocab_parallel(setup: Setup) -> None:
    """Checks that ranks can share the vocabulary equally, with no layers after the pipeline."""
    divide_exactly(
        setup.model_config.vocab_size,
        setup.mesh.shape["stage"],
        name="`vocab_size`",
        into="the ranks of the pipeline",
        fix="Change one of them, or leave `pipeline_vocab_parallel` at false.",
    )
    num_layers_after, tiles = setup.num_layers_after_pipeline, setup.config.num_vocab_tiling
    if num_layers_after or tiles > 1:
        raise ValueError(
            f"`pipeline_vocab_parallel` is true, {num_layers_after} layers come after the pipeline "
            f"and `num_vocab_tiling` is {tiles}. Ranks share the vocabulary alone, and all of it "
            "at once: have no layers after the pipeline, and leave `num_vocab_tiling` at 1."
        )


def check_no_compiler_options(options: dict[str, str]) -> None:
    """Refuses compiler options: the programs of MPMD ranks are compiled without any."""
    if options:
        raise ValueError(
            "`deterministic` is true and `pipeline_engine` 'mpmd', whose programs are compiled for "
            "GPUs without options. Set XLA_FLAGS=--xla_gpu_deterministic_ops=true in place of it, "
            "or choose another engine."
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


def _parallelism(config: Config, kind: str) -> dict[str, int]:
    return {
        axis: getattr(config, f"{kind}_{'pipeline' if axis == 'stage' else axis}_parallelism")
        for axis in sharding.AXES
    }


def _axis_rules(config: Config) -> sharding.Rules:
    def as_tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        return (axes,) if isinstance(axes, str) else axes or ()

    return tuple((name, as_tuple(axes)) for name, axes in config.logical_axis_rules or ())


def import_flax_decoder() -> Any:
    """Imports the module `_flax_decoder`, which needs Flax.

    Returns:
        The module.

    Raises:
        ValueError: If Flax is not installed.
    """
    try:
        from . import _flax_decoder
    except ImportError as error:
        raise ValueError(
            "`enable_nnx` is set, which needs Flax, and it cannot be imported "
            f'({error}). `pip install "jaxpipe[flax]"`, or leave `enable_nnx` at null.'
        ) from error
    return _flax_decoder
