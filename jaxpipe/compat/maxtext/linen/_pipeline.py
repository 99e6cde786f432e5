"""Linen modules of a pipeline, with the methods and attributes of MaxText's."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from .._method_loop import record_originals
from .._methods import LoopMethods, PipelineMethods, WindowMethods
from .._settings import AxisRules, PipelineSettings, pipeline_settings
from .._stages import Stage, stage_keys
from .._weight_sharding import rules_in_stage
from ..nnx import Factory
from . import _run as run
from . import _stacked as stacked
from ._nnx_stage import as_linen


class PipelineBase(PipelineMethods, nn.Module):
    """A stack of equal stages that runs as a pipeline.

    Attributes:
        config: Any object with MaxText's fields, which docs/flax.md lists.
        layers: A stage, or a factory of one in NNX, `rngs -> module`. Its call is `(inputs,
            segment_ids, positions, deterministic, model_mode)` and returns outputs like inputs, or
            (outputs, None).
        mesh: A mesh with the axis "stage", or None: then one device runs all ranks.
        remat_policy: A policy of `jax.checkpoint` that replaces the config's.
    """

    config: Any
    layers: nn.Module | Factory
    mesh: Any
    remat_policy: Any = None

    def setup(self):
        """Raises an error if the config or the stage is invalid.

        The attributes that MaxText's `setup` calculates are properties of the base class
        `PipelineAttributes`, which do not need this method.
        """
        _ = self.settings, self.stage

    @property
    def stage(self) -> nn.Module:
        """Returns the stage as a Linen module."""
        if isinstance(self.layers, nn.Module):
            return self.layers
        if isinstance(self.layers, nnx.Module) or not callable(self.layers):
            raise TypeError(
                f"`layers` is of the type {type(self.layers).__name__}. Give a Linen module, or a "
                "function of `rngs` that returns an NNX module."
            )
        return as_linen(self.layers)

    @property
    def settings(self) -> PipelineSettings:
        """Returns the settings that `config` describes."""
        return pipeline_settings(self.config, self.mesh, self.remat_policy)

    @property
    def axis_rules(self) -> AxisRules:
        """Returns the config's logical axis rules, or else Flax's in context, or else jaxpipe's."""
        return self.settings.rules_or(nn.get_logical_axis_rules())

    def stage_function(
        self,
        deterministic: bool,
        model_mode: str,
        instance: nn.Module | None = None,
        records: bool = False,
    ) -> Stage:
        """Returns the stage, or `instance`, as a pure function.

        With `records` it returns the values that it sows into mutable collections.
        """
        rules = rules_in_stage(self.settings.rules)
        stage = self.stage if instance is None else instance
        mutable = run.mutable_in_stage(self) if records else []
        return run.stage_function(stage, rules, mutable, deterministic, model_mode)

    def draw_keys(self) -> Any:
        """Returns [R, S] keys by random stream, or () if the module has no random streams."""
        scope: Any = self.scope
        dims = self.settings.dims
        return {name: stage_keys(self.make_rng(name), dims) for name in scope.rngs} or ()

    def stage_variables(self) -> dict[str, Any]:
        """Returns the arrays of all stages, by collection.

        The methods of MaxText call these arrays weights.
        """
        return stacked.without_boxes(run.stacked_variables(self))

    def get_weight_sharding(self, *init_args) -> Any:
        """Returns logical specs of the variables of all stages, by collection.

        `init_args` are the arguments of a call. They may be omitted if the module is bound to
        variables.
        """
        shapes_of = run.shapes_of_init if init_args else run.stacked_variables
        return stacked.logical_specs(shapes_of(self, *init_args), [*self.settings.stacked])

    def get_vmap_func_for_init(self) -> Callable:
        """Returns the function that initializes all stages of a repeat.

        Its arguments are [S] keys by random stream and those of a stage's call. It returns
        variables with [S, ...] leaves.
        """
        return stacked.map_keys(run.init_of(self.stage, rules_in_stage(self.settings.rules)))

    def __call__(
        self,
        inputs: Any,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = False,
        model_mode: str = "train",
        logical_partition_spec: Any = None,
        *,
        microbatched: bool = False,
    ) -> Any:
        """Runs a batch through all stages."""
        arrays, options = (inputs, segment_ids, positions), (deterministic, model_mode)
        if self.is_initializing():
            return run.initialize(self, arrays, options, microbatched)
        return run.run(self, arrays, logical_partition_spec, options, microbatched)


@record_originals
class Pipeline(LoopMethods, PipelineBase):
    """A pipeline that gathers weights in every iteration.

    With `pipeline_fsdp_ag_once` it gathers them once per step instead.
    """


@record_originals
class CircularPipeline(WindowMethods, PipelineBase):
    """A pipeline that gathers the weights of each repeat once, before the repeat starts."""


def create_pipeline(
    config: Any, layers: nn.Module | Factory, mesh: Any, remat_policy: Any = None
) -> Pipeline | CircularPipeline:
    """Returns a `CircularPipeline` if `pipeline_fsdp_ag_per_repeat` is set, else a `Pipeline`.

    Args:
        config: Any object with MaxText's fields, which docs/flax.md lists.
        layers: A stage: a Linen module, or a function `rngs -> module` that makes one in NNX. Its
            call is `(inputs, segment_ids, positions, deterministic, model_mode)` and returns
            outputs like inputs, or (outputs, None).
        mesh: A mesh with the axis "stage", or None: then one device runs all ranks.
        remat_policy: A policy of `jax.checkpoint` that replaces the config's.

    Returns:
        The Linen module.

    Raises:
        ValueError: If the config has an invalid value, or fields that contradict each other or
            `mesh`.
        TypeError: If `layers` is neither a Linen module nor a function.
    """
    settings = pipeline_settings(config, mesh, remat_policy)
    kind = CircularPipeline if settings.gather == "repeat" else Pipeline
    pipeline = kind(config, layers, mesh, remat_policy)
    _ = pipeline.stage
    return pipeline
