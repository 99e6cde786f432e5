"""NNX modules of a pipeline, with the methods and attributes of MaxText's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import linen, nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._frontend import run_batch
from .._method_loop import record_originals
from .._methods import LoopMethods, MethodBatch, PipelineMethods, WindowMethods
from .._settings import AxisRules, pipeline_settings
from .._stages import Stage, from_stored
from .._weight_sharding import reshard_weight, rules_in_stage
from . import _stacked as stacked
from . import _stage as stage
from ._graph_arguments import (
    LoopArguments,
    WindowArguments,
    check_graph,
    outputs_with_state,
    params_of,
    split,
    split_state,
    takes_graph,
)


class _Given:
    """Hashable wrapper of a config; all are equal: settings tell modules apart."""

    def __init__(self, config: Any):
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given)

    def __hash__(self) -> int:
        return hash(_Given)


class NNXPipelineBase(PipelineMethods, nnx.Module):
    """A stack of equal stages that runs as a pipeline.

    Attributes:
        layers: A module with the variables of all stages, [R, S, ...], or [S, ...] with one repeat.
        settings: The settings that the config describes.
        mesh: The mesh, or None.
        remat_policy: The constructor's argument `remat_policy`.
        factory: The function that creates a stage.
    """

    def __init__(
        self,
        config: Any,
        stage_factory: stacked.Factory,
        mesh: Mesh | None,
        remat_policy: Any = None,
        *,
        rngs: nnx.Rngs | None = None,
    ):
        """Creates all stages."""
        if isinstance(stage_factory, nnx.Module | linen.Module) or not callable(stage_factory):
            raise TypeError(
                f"`stage_factory` is of the type {type(stage_factory).__name__}. Give a function "
                "of `rngs` that returns an NNX module."
            )
        self.settings = pipeline_settings(config, mesh, remat_policy)
        self.mesh = mesh
        self.remat_policy = remat_policy
        self.factory = stage_factory
        self._given = _Given(config)
        self.setup(nnx.Rngs(0) if rngs is None else rngs)

    @property
    def config(self) -> Any:
        """Returns the config that the module was created with."""
        return self._given.config

    def setup(self, rngs: nnx.Rngs) -> None:
        """Creates `layers` anew."""
        reshard = partial(reshard_weight, rules=self.axis_rules, mesh=self.mesh)
        init_stages = self.get_vmap_func_for_init()
        self.layers = stacked.stacked_module(
            self.factory, init_stages, rngs, self.settings.stacked, reshard
        )

    @property
    def axis_rules(self) -> AxisRules:
        """Returns the config's logical axis rules, or else Flax's in context, or else jaxpipe's."""
        return self.settings.rules_or(get_logical_axis_rules())

    def stage_function(
        self,
        deterministic: bool,
        model_mode: str,
        instance: nnx.Module | None = None,
        records: bool = False,
    ) -> Stage:
        """Returns a stage, or `instance`, as a pure function.

        With `records` it returns the values that it sows.
        """
        rules = rules_in_stage(self.settings.rules)
        layers = self.layers if instance is None else instance
        names = [*self.settings.stacked] if instance is None else []
        options = deterministic, model_mode
        return stage.stage_function(layers, names, rules, records, *options)

    def draw_keys(self) -> Any:
        """Returns new [R, S] keys of every random stream; every call draws other keys."""
        return from_stored(stage.draw_keys(self.layers), self.settings)

    def stage_variables(self) -> dict[str, jax.Array]:
        """Returns the arrays of all stages, by path.

        The methods of MaxText call these arrays weights.
        """
        return stage.weights_of(_weight_state(self.layers))

    def get_weight_sharding(self, *init_args) -> dict[str, Any]:
        """Returns logical specs of the arrays of all stages, by path, whatever `init_args` are."""
        del init_args
        return stacked.logical_specs(_weight_state(self.layers), [*self.settings.stacked])

    def get_vmap_func_for_init(self) -> Callable:
        """Returns the function that initializes all stages of a repeat.

        Its arguments are [S] keys by random stream. It returns a state with [S, ...] leaves.
        """
        return stacked.init_stages(self.factory)

    def get_main_vmap_func_for_iterations(self) -> Callable:
        """Returns a function that runs all stages of one iteration.

        Returns:
            A function of MaxText's arguments: the graph and the [S, ...] state of `layers`, inputs,
            `segment_ids` and `positions`, [S, ...] all, `deterministic` and `model_mode`. It
            returns [S, ...] outputs and the state. In an iteration the first two arguments are a
            `StageCall` and the weights; hand them on as they are.
        """
        run = super().get_main_vmap_func_for_iterations()

        def run_state(graph, state, *arguments, **more):
            """Returns [S, ...] outputs and the state."""
            if not isinstance(graph, nnx.GraphDef):
                return run(graph, state, *arguments, **more), state
            check_graph(graph, self.layers)
            return run(None, split_state(state)[0], *arguments, **more), state

        return run_state

    def _outputs_of(self, result: Any, weights: Any) -> Any:
        return self._first(result, weights, "The function of `get_main_vmap_func_for_iterations`")

    def _first(self, result: Any, given: Any, name: str) -> Any:
        """Returns the first of (outputs, state) if the state is the given one."""
        return outputs_with_state(result, given, name, params_of(self.layers))

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
        """Runs a batch through all stages, and stores the values that they sow in `layers`."""
        layers, options = self.layers, (deterministic, model_mode)
        counts = jax.tree.map(lambda count: count, nnx.state(layers, nnx.RngCount))
        arrays, names = (inputs, segment_ids, positions), logical_partition_spec
        overwritten = stage.overwritten_in(_weight_state(layers))
        ys, sown = run_batch(self, arrays, options, names, overwritten, microbatched)
        if deterministic:  # its keys are of no use
            nnx.update(layers, counts)
        if jax.tree.leaves(sown):
            stage.store(layers, sown)
        return ys


@record_originals
class NNXPipeline(LoopMethods, NNXPipelineBase):
    """A pipeline that gathers weights in every iteration.

    With `pipeline_fsdp_ag_once` it gathers them once per step instead.
    """

    def run_one_iteration(self, loop_state, pipeline_weights, *arguments, **more) -> Any:
        """Runs every rank on its current microbatch and sends the outputs to the next ranks.

        The arguments are those of the Linen module, which returns the loop state, or those of
        MaxText's NNX module: in place of the weights a graph and a state, such as those of
        `nnx.split(pipeline.layers)`, then `positions`, `segment_ids`, `deterministic`,
        `model_mode`, and `logical_partition_spec`. It then returns the loop state and the state.
        """
        if not isinstance(pipeline_weights, nnx.GraphDef):
            return super().run_one_iteration(loop_state, pipeline_weights, *arguments, **more)
        check_graph(pipeline_weights, self.layers)
        call = LoopArguments(*arguments, **more)
        state, names = call.pipeline_weights_state, call.logical_partition_spec
        weights, _, _ = split_state(state)
        return super().run_one_iteration(loop_state, weights, *call[1:5], None, names), state

    def iterate(self, loop_state, weights, batch: MethodBatch, names) -> Any:
        """Calls `run_one_iteration` with the arguments that it has where it is overridden."""
        if not takes_graph(self.run_one_iteration):
            return super().iterate(loop_state, weights, batch, names)
        graph, state = split(self.layers, weights)
        result = self.run_one_iteration(loop_state, graph, state, *batch, names)
        return self._first(result, state, "`run_one_iteration`")


@record_originals
class NNXCircularPipeline(WindowMethods, NNXPipelineBase):
    """A pipeline that gathers the weights of each repeat once, before the repeat starts."""

    def run_one_iteration(self, loop_state, bsw, *arguments, **more) -> Any:
        """Runs every rank once, with weights of `bsw`, and sends outputs to the next ranks.

        The arguments are those of the Linen module, which returns the loop state, or those of
        MaxText's NNX module: a graph, sown values and random state, such as those of
        `nnx.split(pipeline.layers)`, then `positions`, `segment_ids`, `deterministic`,
        `model_mode`, and `logical_partition_spec`. It then returns the loop state, and sown values
        and random state as one.
        """
        if not arguments or not isinstance(arguments[0], nnx.GraphDef):
            return super().run_one_iteration(loop_state, bsw, *arguments, **more)
        check_graph(arguments[0], self.layers)
        call = WindowArguments(*arguments[1:], **more)
        loop_state = super().run_one_iteration(loop_state, bsw, *call[2:])
        return loop_state, nnx.merge_state(call.layers_metrics, call.current_layer_mutables)

    def iterate(self, loop_state, bsw, batch: MethodBatch) -> Any:
        """Calls `run_one_iteration` with the arguments that it has where it is overridden."""
        if not takes_graph(self.run_one_iteration):
            return super().iterate(loop_state, bsw, batch)
        graph, state = nnx.split(self.layers)
        _, sown, random = split_state(state)
        result = self.run_one_iteration(loop_state, bsw, graph, sown, random, *batch, None)
        return self._first(result, nnx.merge_state(sown, random), "`run_one_iteration`")


def create_nnx_pipeline(
    config: Any,
    stage_factory: stacked.Factory,
    mesh: Mesh | None,
    remat_policy: Any = None,
    *,
    rngs: nnx.Rngs | None = None,
) -> NNXPipeline | NNXCircularPipeline:
    """Returns a `CircularPipeline` if `pipeline_fsdp_ag_per_repeat` is set, else a `Pipeline`.

    Args:
        config: Any object with MaxText's fields, which docs/flax.md lists.
        stage_factory: `rngs -> module`, which makes a stage. The module's call is `(inputs,
            segment_ids, positions, deterministic, model_mode)` and returns outputs like inputs, or
            (outputs, None).
        mesh: A mesh with the axis "stage", or None: then one device runs all ranks.
        remat_policy: A policy of `jax.checkpoint` that replaces the config's.
        rngs: Streams of keys for the stages. Default: seed 0.

    Returns:
        The NNX module, with all stages initialized.

    Raises:
        ValueError: If the config has an invalid value, or fields that contradict each other or
            `mesh`.
        TypeError: If `stage_factory` is no function.
    """
    settings = pipeline_settings(config, mesh, remat_policy)
    kind = NNXCircularPipeline if settings.gather == "repeat" else NNXPipeline
    return kind(config, stage_factory, mesh, remat_policy, rngs=rngs)


def create_pipeline(
    config: Any,
    layers: stacked.Factory,
    mesh: Mesh | None,
    remat_policy: Any = None,
    *,
    rngs: nnx.Rngs | None = None,
) -> NNXPipeline | NNXCircularPipeline:
    """Calls `create_nnx_pipeline`, by the name and the arguments that Linen's has.

    Args:
        config: Any object with MaxText's fields, which docs/flax.md lists.
        layers: `rngs -> module`, which makes a stage.
        mesh: A mesh with the axis "stage", or None.
        remat_policy: A policy of `jax.checkpoint` that replaces the config's.
        rngs: Streams of keys for the stages. Default: seed 0.

    Returns:
        The NNX module, with all stages initialized.
    """
    return create_nnx_pipeline(config, layers, mesh, remat_policy, rngs=rngs)


def _weight_state(layers: nnx.Module) -> PyTree:
    """Returns all variables except random state and sown values."""
    return nnx.state(stage.without_sown(layers), nnx.Not(nnx.RngState))
