"""Builds a run's `Setup` from its config, and checks that everything in it agrees."""

from collections.abc import Sequence
from typing import Any

from ... import sharding, spmd
from ...data import global_batch_size
from ..config._config import Config
from ..optim._decay import check_excluded
from ..optim._router_bias import without_router_biases
from ._family import sizes_of
from ._layout import circular_layout, scheduled_layout
from ._rematerialization import check_remat
from ._setup import (
    Setup,
    attention_kernel,
    batch_shardings,
    grouped_matmul,
    options_of_steps,
    weights_shardings,
)


def set_up(config: Config, devices: Sequence[Any]) -> Setup:
    """Checks a config against the devices and itself.

    Raises:
        ValueError: If sizes do not divide, do not suit the engine, or need other devices.
    """
    model = sizes_of(config)
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
    if config.pipeline_engine in ("scheduled", "mpmd"):
        schedule, layout = scheduled_layout(config, num_ranks, num_microbatches)
    else:
        layout = circular_layout(config, num_ranks)
    if config.pipeline_engine == "circular":
        spmd.check_circular(
            num_ranks,
            layout.num_repeats,
            num_microbatches,
            delay=config.pipeline_delay_activation_forwarding,
            names=("`num_pipeline_microbatches`", "`pipeline_delay_activation_forwarding`"),
        )
    batch_size = global_batch_size(config.per_device_batch_size, len(devices))
    microbatch_size = sharding.divide(
        batch_size,
        num_microbatches,
        name="The batch (`per_device_batch_size` x devices)",
        into="`num_pipeline_microbatches`",
        fix="Change one of them.",
    )
    rules = sharding.with_rules(_axis_rules(config))
    setup = Setup(config, model, mesh, rules, layout, num_microbatches, microbatch_size, schedule)
    attention_kernel(setup)
    grouped_matmul(setup)
    check_remat(config, mesh.devices.flat)
    sharding.divide(
        config.max_target_length,
        config.num_vocab_tiling * mesh.shape["context"],
        name="`max_target_length`",
        into="`num_vocab_tiling` x the shards of the sequence",
        fix="Change one of them.",
    )
    if config.pipeline_share_head:
        _check_shared_head(setup)
    if setup.stages_apart:
        _check_rules(rules)
        _check_options(options_of_steps(setup))
    weights_shardings(setup)
    batch_shardings(setup)
    check_excluded(config.weight_decay_exclude, without_router_biases(setup.weight_tree))
    if config.enable_nnx is not None:
        flax_decoder().check_rim(setup)
    return setup


def _check_shared_head(setup: Setup) -> None:
    sharding.divide(
        setup.model.vocab_size,
        setup.mesh.shape["stage"],
        name="`vocab_size`",
        into="the ranks of the pipeline",
        fix="Change one of them, or leave `pipeline_share_head` at false.",
    )
    if setup.layers_after or setup.config.num_vocab_tiling > 1:
        raise ValueError(
            f"`pipeline_share_head` is true, and {setup.layers_after} layers come after the "
            f"pipeline and `num_vocab_tiling` is {setup.config.num_vocab_tiling}. Ranks share the "
            "vocabulary alone, and all of it at once: have no layers after, and leave "
            "`num_vocab_tiling` at 1."
        )


def _check_options(options: dict[str, str]) -> None:
    """Programs of ranks are compiled without any."""
    if options:
        raise ValueError(
            "`deterministic` is true and `pipeline_engine` 'mpmd', whose programs are compiled for "
            "GPUs without options. Set XLA_FLAGS=--xla_gpu_deterministic_ops=true in place of it, "
            "or choose another engine."
        )


def _check_rules(rules: sharding.Rules) -> None:
    """Programs of ranks divide nothing over ranks."""
    for name, mesh_axes in rules:
        if "stage" in mesh_axes and name not in ("stage", "activation_stage"):
            raise ValueError(
                f"`logical_axis_rules` maps {name!r} to 'stage' and `pipeline_engine` is 'mpmd', "
                "where ranks run programs of their own and divide nothing among them. Map it to "
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


def flax_decoder() -> Any:
    """The module `_flax_decoder`, which needs Flax.

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
