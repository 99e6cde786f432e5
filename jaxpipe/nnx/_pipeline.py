"""The NNX modules: what they do is in `_run`, and in methods that `jaxpipe.spmd` lends them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import Mesh

from .. import modules
from . import _layer as layer
from . import _run as run
from . import _stacked as stacked


class _Given:
    """A config, which may not be hashable, in a module whose attributes must be.

    All instances are equal: modules are compared by the settings that are read from the config.
    """

    def __init__(self, config: Any):
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given)

    def __hash__(self) -> int:
        return hash(_Given)


class PipelineBase(modules.PipelineMethods, nnx.Module):
    """A stack of equal layers, spread over the ranks of a pipeline.

    Attributes:
        layers: A module with the variables of all layers, [R, S, L, ...].
        settings: What the config says.
        mesh: The mesh, or None.
        remat_policy: The argument of that name.
        name: The argument of that name.
        factory: What makes a layer.
    """

    def __init__(
        self,
        config: Any,
        layers: stacked.Factory,
        mesh: Mesh | None,
        remat_policy: Any = None,
        *,
        rngs: nnx.Rngs | None = None,
        name: str | None = None,
    ):
        """Makes all layers.

        Args:
            config: Any object with the fields of `jaxpipe.modules.pipeline_settings`.
            layers: `rngs -> module`. The module's call is `(inputs, segment_ids, positions,
                deterministic, model_mode)` and returns outputs like inputs, or (outputs, None).
            mesh: A mesh with the axis "stage", or None: one device plays all ranks.
            remat_policy: A policy of `jax.checkpoint`, in place of the config's.
            rngs: Streams of keys for the layers. Default: seed 0.
            name: A name for the module, which nothing reads.

        Raises:
            ValueError: If the config has a value that is not valid, or asks for what cannot work.
        """
        self.settings = modules.pipeline_settings(config, mesh, remat_policy)
        self.mesh = mesh
        self.remat_policy = remat_policy
        self.name = name
        self.factory = layers
        self._given = _Given(config)
        self.setup(nnx.Rngs(0) if rngs is None else rngs)

    @property
    def config(self) -> Any:
        """The argument of that name."""
        return self._given.config

    def setup(self, rngs: nnx.Rngs) -> None:
        """Makes `layers` anew."""
        place = partial(modules.place_weight, rules=self.axis_rules, mesh=self.mesh)
        self.layers = stacked.stacked_module(self.factory, rngs, self.settings.dims, place)

    @property
    def axis_rules(self) -> modules.AxisRules:
        """The config's logical axis rules, else those in Flax's context, else jaxpipe's."""
        return self.settings.rules_or(get_logical_axis_rules())

    def layer_function(
        self, deterministic: bool, model_mode: str, instance: nnx.Module | None = None
    ) -> modules.Layer:
        """A layer, or `instance`, as a pure function that records nothing."""
        rules = modules.rules_in_stage(self.settings.rules)
        layers = self.layers if instance is None else instance
        return layer.layer_function(layers, rules, False, deterministic, model_mode)

    def draw_keys(self) -> Any:
        """[R, S, L] keys of every stream of random numbers; the next call gives others."""
        return layer.draw_keys(self.layers, advance=True)

    def layer_variables(self) -> dict[str, jax.Array]:
        """The [R, S, L, ...] arrays of all layers, by path: what the methods call weights."""
        return layer.weights_of(run.weight_state(self.layers))

    def get_weight_sharding(self, *init_args) -> dict[str, Any]:
        """Logical specs of the [R, S, L, ...] arrays, by path, whatever the arguments of a call."""
        del init_args
        return stacked.logical_specs(run.weight_state(self.layers))

    def get_vmap_func_for_init(self) -> Callable:
        """`keys [S, L] by stream -> state` with [S, L, ...] leaves."""
        return stacked.init_stages(self.factory)

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
            logical_partition_spec: As of `get_weight_sharding`, in place of the variables' names.
            microbatched: Arrays are [microbatches, rows, ...] instead, in and out: nothing is
                moved to split a batch.

        Returns:
            Outputs like `inputs`. What layers sow is in the variables of `layers` afterwards.

        Raises:
            ValueError: If counts do not divide, or a layer changes its variables.
        """
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
    config: Any,
    layers: stacked.Factory,
    mesh: Mesh | None,
    remat_policy: Any = None,
    *,
    rngs: nnx.Rngs | None = None,
    name: str | None = None,
) -> Pipeline | CircularPipeline:
    """`CircularPipeline` if the config has `pipeline_fsdp_ag_per_repeat`, else `Pipeline`.

    Arguments are those of `PipelineBase`.
    """
    settings = modules.pipeline_settings(config, mesh, remat_policy)
    kind = CircularPipeline if settings.gather == "repeat" else Pipeline
    return kind(config, layers, mesh, remat_policy, rngs=rngs, name=name)
