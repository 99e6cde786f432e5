"""What a config decides before anything compiles: devices, layout, shapes, and that they agree.

R repeats, S ranks, M microbatches of b rows in each of A calls of the engine, T tokens a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .. import models, schedules, sharding, spmd
from .._versions import splash_aborts_in_pipelines
from ..data import global_batch_size
from ._choice import Choice
from ._config import Config
from ._decay import check_excluded
from ._family import Sizes, family_of, sizes_of
from ._layout import circular_layout, num_alike_layers, scheduled_layout
from ._remat import check_remat
from ._router_bias import without_router_biases
from ._xla_flags import compiler_options

STACKED = ("circular_repeats", "stage", "layers")
"""Logical axes of `Layout.dims`, in front of every weight of a layer."""


@dataclass(frozen=True)
class Setup:
    """One run, ready to be compiled.

    Attributes:
        config: Where everything comes from.
        model: The model's sizes.
        mesh: All devices.
        rules: Logical axis rules.
        layout: How the layers lie on the ranks; one stage on one rank without a pipeline.
        num_microbatches: M.
        microbatch_size: b, over all devices.
        schedule: What the engines `scheduled` and `mpmd` run; None for the others.
    """

    config: Config
    model: Sizes
    mesh: Mesh
    rules: sharding.Rules
    layout: sharding.Layout
    num_microbatches: int
    microbatch_size: int
    schedule: Choice | None = None

    @property
    def batch_size(self) -> int:
        """Rows of a step, over all devices."""
        return self.num_calls * self.num_microbatches * self.microbatch_size

    @property
    def num_calls(self) -> int:
        """A, how often the engine is called in a step, each time with M microbatches."""
        return self.config.gradient_accumulation_steps

    @property
    def stages_apart(self) -> bool:
        """Whether every stage has a tree of weights of its own, instead of a part of each leaf."""
        return self.config.pipeline_engine == "mpmd"

    @cached_property
    def stages_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank in forward order, if a schedule says them."""
        assert self.schedule is not None
        stages_of_rank = partial(schedules.stages_of_rank, self.schedule.schedule)
        return tuple(map(stages_of_rank, range(self.layout.num_ranks)))

    @property
    def layers_after(self) -> int:
        """The last layers, if they run after the pipeline: `head.layers`."""
        return num_alike_layers(self.config) - self.layout.num_layers

    @property
    def num_parameters(self) -> int:
        """Of the model: places in stages that have no layer do not count."""
        tree = self.layer_tree
        ends = {"embed": tree["embed"], "head": tree["head"]}
        per_layer = models.num_parameters(tree["layer"])
        return models.num_parameters(ends) + self.layout.num_layers * per_layer

    @property
    def layer_tree(self) -> dict[str, Any]:
        """The abstract weights of the ends, and of one `layer`."""
        weights = family_of(self.config).weights
        dtype = jnp.dtype(self.config.weight_dtype)
        return weights(self.model, dtype, layers_after=self.layers_after)

    @property
    def weight_tree(self) -> dict[str, Any]:
        """The abstract weights; leaves of `stages` are [R, S, layers per stage, ...].

        Where stages lie apart, they are a list in forward order, with leaves [layers, ...].
        """
        tree = self.layer_tree
        if self.stages_apart:
            counts = map(len, self.layout.layers_of_stages)
            stages = [models.stacked(tree["layer"], (count,), ("layers",)) for count in counts]
        else:
            stages = models.stacked(tree["layer"], self.layout.dims, STACKED)
        return {"embed": tree["embed"], "stages": stages, "head": tree["head"]}


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


def options_of_steps(setup: Setup) -> dict[str, str]:
    """XLA's options for what a run computes."""
    return _options(setup.config, setup.mesh.devices.flat[0].platform)


def _options(config: Config, platform: str) -> dict[str, str]:
    options = compiler_options(config.compile_xla_flags)
    if config.deterministic and platform == "gpu":
        return {"xla_gpu_deterministic_ops": "true"} | options
    return options


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


def attention_kernel(setup: Setup) -> str:
    """`splash` or `dot_product`: what the config says, or with `auto` splash where it runs."""
    config = setup.config
    if config.attention == "dot_product":
        return "dot_product"
    platform = setup.mesh.devices.flat[0].platform
    length = config.max_target_length
    problems = {
        f"the devices are {platform}s, not TPUs": platform != "tpu",
        f"`max_target_length` is {length}, not a multiple of 128": length % 128 != 0,
        "sequences are split over the axis 'context'": setup.mesh.shape["context"] > 1,
        f"jax {jax.__version__} cannot compile it in a pipeline (take 0.11 or newer, or set "
        "JAX_USE_SHARDY_PARTITIONER=false)": splash_aborts_in_pipelines(),
    }
    found = "; ".join(problem for problem, applies in problems.items() if applies)
    if config.attention == "splash" and found:
        raise ValueError(f"`attention` is 'splash', but {found}. Give 'auto' or 'dot_product'.")
    return "dot_product" if found else "splash"


def grouped_matmul(setup: Setup) -> models.GroupedMatmul:
    """Of the experts: what the config says, or with `auto` the kernel where it runs."""
    platform, wanted = setup.mesh.devices.flat[0].platform, setup.config.megablox
    if wanted is True and platform != "tpu":
        raise ValueError(
            f"`megablox` is true, but the devices are {platform}s, not TPUs. Give 'auto' or false."
        )
    return models.megablox() if platform == "tpu" and wanted else models.ragged_dot


def weights_shardings(setup: Setup) -> Any:
    """A sharding for every weight."""
    tree = setup.weight_tree
    named = partial(sharding.named_shardings, mesh=setup.mesh, rules=setup.rules)
    return named(models.shapes(tree), models.logical_axes(tree))


def batch_shapes(setup: Setup) -> dict[str, jax.ShapeDtypeStruct]:
    """[A * M, b, T] of every array of a batch."""
    count = setup.num_calls * setup.num_microbatches
    shape = (count, setup.microbatch_size, setup.config.max_target_length)
    numbers = jax.ShapeDtypeStruct(shape, jnp.int32)
    return {
        "tokens": numbers,
        "targets": numbers,
        "target_weights": jax.ShapeDtypeStruct(shape, jnp.float32),
        "positions": numbers,
        "segment_ids": numbers,
    }


def batch_shardings(setup: Setup) -> Any:
    """A sharding for each array [A * M, b, T] of a batch."""
    shapes = batch_shapes(setup)
    rows = {"microbatches": next(iter(shapes.values()))}  # all alike; an error names them so
    axes = {"microbatches": ("microbatches", "activation_batch", "activation_length")}
    where = sharding.named_shardings(rows, axes, setup.mesh, setup.rules)["microbatches"]
    return dict.fromkeys(shapes, where)


def _parallelism(config: Config, kind: str) -> dict[str, int]:
    return {
        axis: getattr(config, f"{kind}_{'pipeline' if axis == 'stage' else axis}_parallelism")
        for axis in sharding.AXES
    }


def _axis_rules(config: Config) -> sharding.Rules:
    def as_tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        return (axes,) if isinstance(axes, str) else axes or ()

    return tuple((name, as_tuple(axes)) for name, axes in config.logical_axis_rules or ())
