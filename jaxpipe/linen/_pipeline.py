"""The Linen modules: what they do is in `_run`, and in methods that `jaxpipe.spmd` lends them."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from .. import modules
from . import _run as run
from . import _stacked as stacked


class PipelineBase(modules.PipelineMethods, nn.Module):
    """A stack of equal layers, spread over the ranks of a pipeline.

    Attributes:
        config: Any object with the fields of `jaxpipe.modules.pipeline_settings`.
        layers: One layer. Its call is `(inputs, segment_ids, positions, deterministic, model_mode)`
            and returns outputs like inputs, or (outputs, None).
        mesh: A mesh with the axis "stage", or None: one device plays all ranks.
        remat_policy: A policy of `jax.checkpoint`, in place of the config's.
    """

    config: Any
    layers: nn.Module
    mesh: Any
    remat_policy: Any = None

    def setup(self):
        """Refuses a config that cannot work.

        The attributes that MaxText's `setup` calculates are properties, of
        `jaxpipe.modules.PipelineAttributes`, and exist without it.
        """
        _ = self.settings

    @property
    def settings(self) -> modules.PipelineSettings:
        """What `config` says."""
        return modules.pipeline_settings(self.config, self.mesh, self.remat_policy)

    @property
    def axis_rules(self) -> modules.AxisRules:
        """The config's logical axis rules, else those in Flax's context, else jaxpipe's."""
        return self.settings.rules_or(nn.get_logical_axis_rules())

    def layer_function(
        self, deterministic: bool, model_mode: str, instance: nn.Module | None = None
    ) -> modules.Layer:
        """The layer, or `instance`, as a pure function that records nothing."""
        rules = modules.rules_in_stage(self.settings.rules)
        layer = self.layers if instance is None else instance
        return run.layer_function(layer, rules, [], deterministic, model_mode)

    def draw_keys(self) -> Any:
        """[R, S, L] keys by stream of random numbers, () if there are none."""
        return run.draw_keys(self)

    def layer_variables(self) -> dict[str, Any]:
        """The [R, S, L, ...] arrays of all layers, by collection: what the methods call weights."""
        return stacked.without_boxes(run.stacked_variables(self))

    def get_weight_sharding(self, *init_args) -> Any:
        """Logical specs of the [R, S, L, ...] variables, by collection.

        `init_args` are those of a call, or nothing if the module is bound to variables.
        """
        if not init_args:
            return stacked.logical_specs(run.stacked_variables(self))
        return run.weight_sharding(self, *init_args)

    def get_vmap_func_for_init(self) -> Callable:
        """`(keys [S, L] by stream, *arguments of a layer) -> variables` with [S, L, ...] leaves."""
        return run.init_stages(self)

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
        """Sends a batch through all layers.

        Args:
            inputs: [batch, ...] leaves: [batch, sequence, embed], or any pytree.
            segment_ids: [batch, sequence], or None.
            positions: [batch, sequence], or None.
            deterministic: Handed to the layers.
            model_mode: Handed to the layers.
            logical_partition_spec: As of `get_weight_sharding`, in place of the names in boxes.
            microbatched: Arrays are [microbatches, rows, ...] instead, in and out: nothing is
                moved to split a batch.

        Returns:
            Outputs like `inputs`; while the module is initialised, `inputs`.

        Raises:
            ValueError: If counts do not divide, or a collection cannot be carried.
        """
        if self.is_initializing():
            options = deterministic, model_mode
            return run.initialize(
                self, inputs, segment_ids, positions, *options, microbatched=microbatched
            )
        return run.run(
            self,
            inputs,
            segment_ids,
            positions,
            logical_partition_spec,
            deterministic,
            model_mode,
            microbatched=microbatched,
        )


class Pipeline(modules.LoopMethods, PipelineBase):
    """Weights are gathered in every iteration or, with `pipeline_fsdp_ag_once`, once a step."""


class CircularPipeline(modules.WindowMethods, PipelineBase):
    """Weights are gathered once per repeat, ahead of it."""


def create_pipeline(
    config: Any, layers: nn.Module, mesh: Any, remat_policy: Any = None
) -> Pipeline | CircularPipeline:
    """`CircularPipeline` if the config has `pipeline_fsdp_ag_per_repeat`, else `Pipeline`.

    Raises:
        ValueError: If the config has a value that is not valid, or asks for what cannot work.
    """
    settings = modules.pipeline_settings(config, mesh, remat_policy)
    kind = CircularPipeline if settings.gather == "repeat" else Pipeline
    return kind(config, layers, mesh, remat_policy)
