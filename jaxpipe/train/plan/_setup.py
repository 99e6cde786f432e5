"""A run's setup: what its config and devices decide before anything is compiled.

R repeats, S ranks, M microbatches of b rows in each of A steps of gradient accumulation, T tokens
per row.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ... import models, sharding
from ..._compat import splash_aborts_in_pipelines
from ...models.layers._grouped_matmul import GroupedMatmul, megablox, ragged_dot
from ...models.weights._abstract import stack_weights, weight_shapes
from ...schedules import language
from ...sharding.layout import LayerLayout
from ..config._config import Config, parse_xla_flags
from ._family import ModelConfig, model_family
from ._layout import num_uniform_layers
from ._schedule_selection import ScheduleSelection

STACK_AXES = ("circular_repeats", "stage", "layers")
"""Logical axes of the leading dims [R, S, layers per stage] of every stacked weight."""


@dataclass(frozen=True)
class Setup:
    """One run, ready to be compiled.

    Attributes:
        config: The config that everything else is derived from.
        model_config: The model's sizes.
        mesh: The mesh of all devices.
        rules: Logical axis rules.
        layout: The layers of every stage and rank; without a pipeline, one stage on one rank.
        num_microbatches: M.
        microbatch_size: b, summed over all devices.
        schedule_selection: The schedule of the engines `scheduled` and `mpmd`; None for the others.
    """

    config: Config
    model_config: ModelConfig
    mesh: Mesh
    rules: sharding.Rules
    layout: LayerLayout
    num_microbatches: int
    microbatch_size: int
    schedule_selection: ScheduleSelection | None = None

    @property
    def batch_size(self) -> int:
        """Number of rows of a step, summed over all devices: A * M * b."""
        return self.gradient_accumulation_steps * self.num_microbatches * self.microbatch_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number A of calls of the engine in a step, each with M microbatches."""
        return self.config.gradient_accumulation_steps

    @property
    def per_stage_state(self) -> bool:
        """True if every stage has its own tree of weights, false if leaves stack all stages."""
        return self.config.engine.per_stage_state

    @property
    def num_slices(self) -> int:
        """Number of slices of each sequence that the schedule runs one after the other."""
        selection = self.schedule_selection
        return 1 if selection is None else language.num_slices(selection.schedule)

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """Stages that every rank stores, in forward order, for engines that run a schedule."""
        assert self.schedule_selection is not None
        return language.stored_stages(self.schedule_selection.schedule)

    @property
    def num_layers_after_pipeline(self) -> int:
        """Number of last layers that run after the pipeline; their weights are `head.layers`."""
        return num_uniform_layers(self.config) - self.layout.num_layers

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model; padding layers do not count."""
        tree = self.abstract_unstacked_weights
        boundary = {"embed": tree["embed"], "head": tree["head"]}
        per_layer = models.num_parameters(tree["layer"])
        return models.num_parameters(boundary) + self.layout.num_layers * per_layer

    @property
    def abstract_unstacked_weights(self) -> dict[str, Any]:
        """Abstract weights of `embed`, of `head`, and of one `layer`."""
        weights = model_family(self.config).weights
        dtype = jnp.dtype(self.config.weight_dtype)
        return weights(self.model_config, dtype, layers_after=self.num_layers_after_pipeline)

    @property
    def abstract_weights(self) -> dict[str, Any]:
        """Abstract weights; leaves of `stages` are [R, S, layers per stage, ...].

        With `per_stage_state`, `stages` is a list in forward order, with leaves [layers, ...].
        """
        tree = self.abstract_unstacked_weights
        if self.per_stage_state:
            counts = map(len, self.layout.stage_layer_ids)
            stages = [stack_weights(tree["layer"], (count,), ("layers",)) for count in counts]
        else:
            stages = stack_weights(tree["layer"], self.layout.dims, STACK_AXES)
        return {"embed": tree["embed"], "stages": stages, "head": tree["head"]}


def compiler_options(setup: Setup) -> dict[str, str]:
    """Returns XLA's options for every program that the run computes with.

    Args:
        setup: The run.

    Returns:
        Options by name, as `jax.jit` takes them as `compiler_options`.
    """
    return platform_compiler_options(setup.config, setup.mesh.devices.flat[0].platform)


def platform_compiler_options(config: Config, platform: str) -> dict[str, str]:
    """Returns the XLA options that programs of this run are compiled with on a platform."""
    options = parse_xla_flags(config.compile_xla_flags)
    if config.deterministic and platform == "gpu":
        return {"xla_gpu_deterministic_ops": "true"} | options
    return options


def select_attention_kernel(setup: Setup) -> str:
    """Selects the attention kernel that the config names, or for `auto` splash where it can run.

    Args:
        setup: The run.

    Returns:
        `splash` or `dot_product`.

    Raises:
        ValueError: If the config asks for splash and it cannot run.
    """
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


def select_grouped_matmul(setup: Setup) -> GroupedMatmul:
    """Selects the experts' grouped matmul: Megablox's kernel on TPUs unless the config refuses it.

    Args:
        setup: The run.

    Returns:
        The function that multiplies rows with the weights of their experts.

    Raises:
        ValueError: If the config asks for the kernel and the devices are not TPUs.
    """
    platform, wanted = setup.mesh.devices.flat[0].platform, setup.config.megablox
    if wanted is True and platform != "tpu":
        raise ValueError(
            f"`megablox` is true, but the devices are {platform}s, not TPUs. Give 'auto' or false."
        )
    return megablox() if platform == "tpu" and wanted else ragged_dot


def weight_shardings(setup: Setup) -> Any:
    """Returns a sharding for every leaf of the weights.

    Args:
        setup: The run.

    Returns:
        A tree of `NamedSharding` with the structure of `setup.abstract_weights`.

    Raises:
        ValueError: If a dim does not divide by the mesh axes that split it.
    """
    tree = setup.abstract_weights
    named = partial(sharding.named_shardings, mesh=setup.mesh, rules=setup.rules)
    return named(weight_shapes(tree), models.logical_axes(tree))


def batch_shapes(setup: Setup) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract arrays [A * M, b, T] of a batch.

    Args:
        setup: The run.

    Returns:
        `jax.ShapeDtypeStruct` by name: tokens, targets, target_weights, positions and segment_ids.
    """
    count = setup.gradient_accumulation_steps * setup.num_microbatches
    shape = (count, setup.microbatch_size, setup.config.max_target_length)
    int32_array = jax.ShapeDtypeStruct(shape, jnp.int32)
    return {
        "tokens": int32_array,
        "targets": int32_array,
        "target_weights": jax.ShapeDtypeStruct(shape, jnp.float32),
        "positions": int32_array,
        "segment_ids": int32_array,
    }


def batch_shardings(setup: Setup) -> Any:
    """Returns a sharding for each array [A * M, b, T] of a batch.

    Args:
        setup: The run.

    Returns:
        `NamedSharding` by the names of `batch_shapes`.

    Raises:
        ValueError: If microbatches or rows do not divide by the mesh axes that split them.
    """
    shapes = batch_shapes(setup)
    rows = {"microbatches": next(iter(shapes.values()))}  # all alike; an error names them so
    axes = {"microbatches": ("microbatches", "activation_batch", "activation_length")}
    where = sharding.named_shardings(rows, axes, setup.mesh, setup.rules)["microbatches"]
    return dict.fromkeys(shapes, where)
