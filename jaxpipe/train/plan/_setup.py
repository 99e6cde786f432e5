"""What a config decides before anything compiles: devices, layout, shapes, and that they agree.

R repeats, S ranks, M microbatches of b rows in each of A calls of the engine, T tokens a row.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ... import models, schedules, sharding
from ..._compat import splash_aborts_in_pipelines
from ..config._config import Config, parse_xla_flags
from ._family import ModelConfig, model_family
from ._layout import num_uniform_layers
from ._schedule_selection import ScheduleSelection

STACK_AXES = ("circular_repeats", "stage", "layers")
"""Logical axes of `Layout.dims`, in front of every weight of a layer."""


@dataclass(frozen=True)
class Setup:
    """One run, ready to be compiled.

    Attributes:
        config: Where everything comes from.
        model_config: The model's sizes.
        mesh: All devices.
        rules: Logical axis rules.
        layout: How the layers lie on the ranks; one stage on one rank without a pipeline.
        num_microbatches: M.
        microbatch_size: b, over all devices.
        schedule_selection: What the engines `scheduled` and `mpmd` run; None for the others.
    """

    config: Config
    model_config: ModelConfig
    mesh: Mesh
    rules: sharding.Rules
    layout: sharding.Layout
    num_microbatches: int
    microbatch_size: int
    schedule_selection: ScheduleSelection | None = None

    @property
    def batch_size(self) -> int:
        """Rows of a step, over all devices."""
        return self.gradient_accumulation_steps * self.num_microbatches * self.microbatch_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """A, how often the engine is called in a step, each time with M microbatches."""
        return self.config.gradient_accumulation_steps

    @property
    def per_stage_state(self) -> bool:
        """Whether every stage has a tree of weights of its own, instead of a part of each leaf."""
        return self.config.pipeline_engine == "mpmd"

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank in forward order, if a schedule says them."""
        assert self.schedule_selection is not None
        stages_of_rank = partial(schedules.stages_of_rank, self.schedule_selection.schedule)
        return tuple(map(stages_of_rank, range(self.layout.num_ranks)))

    @property
    def num_layers_after_pipeline(self) -> int:
        """The last layers, if they run after the pipeline: `head.layers`."""
        return num_uniform_layers(self.config) - self.layout.num_layers

    @property
    def num_parameters(self) -> int:
        """Of the model: places in stages that have no layer do not count."""
        tree = self.abstract_unstacked_weights
        ends = {"embed": tree["embed"], "head": tree["head"]}
        per_layer = models.num_parameters(tree["layer"])
        return models.num_parameters(ends) + self.layout.num_layers * per_layer

    @property
    def abstract_unstacked_weights(self) -> dict[str, Any]:
        """The abstract weights of the ends, and of one `layer`."""
        weights = model_family(self.config).weights
        dtype = jnp.dtype(self.config.weight_dtype)
        return weights(self.model_config, dtype, layers_after=self.num_layers_after_pipeline)

    @property
    def abstract_weights(self) -> dict[str, Any]:
        """The abstract weights; leaves of `stages` are [R, S, layers per stage, ...].

        Where stages lie apart, they are a list in forward order, with leaves [layers, ...].
        """
        tree = self.abstract_unstacked_weights
        if self.per_stage_state:
            counts = map(len, self.layout.layers_of_stages)
            stages = [models.stacked(tree["layer"], (count,), ("layers",)) for count in counts]
        else:
            stages = models.stacked(tree["layer"], self.layout.dims, STACK_AXES)
        return {"embed": tree["embed"], "stages": stages, "head": tree["head"]}


def compiler_options(setup: Setup) -> dict[str, str]:
    """XLA's options for what a run computes."""
    return _platform_compiler_options(setup.config, setup.mesh.devices.flat[0].platform)


def _platform_compiler_options(config: Config, platform: str) -> dict[str, str]:
    options = parse_xla_flags(config.compile_xla_flags)
    if config.deterministic and platform == "gpu":
        return {"xla_gpu_deterministic_ops": "true"} | options
    return options


def select_attention_kernel(setup: Setup) -> str:
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


def select_grouped_matmul(setup: Setup) -> models.GroupedMatmul:
    """Of the experts: what the config says, or with `auto` the kernel where it runs."""
    platform, wanted = setup.mesh.devices.flat[0].platform, setup.config.megablox
    if wanted is True and platform != "tpu":
        raise ValueError(
            f"`megablox` is true, but the devices are {platform}s, not TPUs. Give 'auto' or false."
        )
    return models.megablox() if platform == "tpu" and wanted else models.ragged_dot


def weight_shardings(setup: Setup) -> Any:
    """A sharding for every weight."""
    tree = setup.abstract_weights
    named = partial(sharding.named_shardings, mesh=setup.mesh, rules=setup.rules)
    return named(models.shapes(tree), models.logical_axes(tree))


def batch_shapes(setup: Setup) -> dict[str, jax.ShapeDtypeStruct]:
    """[A * M, b, T] of every array of a batch."""
    count = setup.gradient_accumulation_steps * setup.num_microbatches
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
