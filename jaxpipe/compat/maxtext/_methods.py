"""Methods of MaxText's pipeline modules, each a thin wrapper of a pure function.

The pipeline modules of both Flax frontends (Linen and NNX) inherit these methods. `PipelineMethods`
declares the attributes that a frontend must provide. S ranks, R repeats, M microbatches. All leaves
are global arrays: weights are [R, S, ...], or [S, ...] if R is 1, activations of an iteration
[S, ...], `positions` and `segment_ids` [M, ...]. A loop state is the dict that `init_states`
returns. A caller that runs all iterations by hand obtains the outputs of the pipeline's own call.
Values that stages sow are dropped, unless the activations are `ActivationInFlight`.

The methods call each other. If a subclass overrides one, the pipeline's call runs them, see
`_method_loop`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ...sharding import GATHERED_AXES
from ...spmd import stepwise
from ...spmd.ranks import AXIS
from ...spmd.weight_gather import Gather, gather_by_specs, unsharded_specs, weight_gather
from . import _weight_sharding as weight_sharding
from ._settings import AxisRules, PipelineSettings
from ._stages import (
    ActivationInFlight,
    Stage,
    from_stored,
    of_layers,
    with_records,
    without_records,
)


class StageCall(NamedTuple):
    """What the stages of an iteration run, besides weights, inputs and options.

    Attributes:
        instance: A stage to run in place of the pipeline's own, or None.
        keys: [S] dropout keys by random stream, or ().
        logical_partition_spec: Logical specs by which weights are gathered, or None.
    """

    instance: Any = None
    keys: Any = ()
    logical_partition_spec: Any = None


class MethodBatch(NamedTuple):
    """Arguments of `run_one_iteration` behind the loop state and the weights."""

    positions: Any
    segment_ids: Any
    deterministic: Any
    model_mode: Any


class PipelineAttributes:
    """Sizes, axis names, specs and shardings that MaxText's `setup` calculates.

    Specs are physical: they name mesh axes. Shardings are None unless the mesh has explicit axes.
    """

    mesh: Mesh | None
    settings: PipelineSettings
    axis_rules: AxisRules
    batch_axis_name = "activation_batch"
    seq_len_axis_name = "activation_length"

    @property
    def num_stages(self) -> int:
        """Returns the number of ranks of the pipeline."""
        return self.settings.pipeline_shape.num_ranks

    @property
    def forwarding_delay(self) -> int:
        """Returns the iterations of a hand-over: 2 if it is delayed, else 1."""
        return self.settings.pipeline_shape.forwarding_delay

    @property
    def pipeline_microbatch_size(self) -> int | None:
        """Returns the rows of a microbatch, or None if the config does not set the batch size."""
        rows = self.settings.batch_size
        return None if rows is None else rows // self.settings.pipeline_shape.num_microbatches

    @property
    def microbatches_per_stage(self) -> int:
        """Returns the number of microbatches that a rank stores in `state_io`."""
        return self.settings.pipeline_shape.microbatches_per_rank

    @property
    def use_circ_storage(self) -> bool:
        """Returns whether outputs of the last rank must wait until rank 0 starts a new repeat."""
        return stepwise.need_circ_storage(self.settings.pipeline_shape)

    @property
    def spmd_axis_name(self) -> str | None:
        """Returns the mesh axis of the ranks, or None if the mesh has explicit axes."""
        return None if self._is_explicit else AXIS

    @property
    def stages_in_logical(self) -> tuple[str | None, ...]:
        """Returns the logical axes of the ranks' inputs [ranks, rows, sequence, embed]."""
        return ("activation_stage", *self._activation)

    @property
    def stages_in_spec(self) -> PartitionSpec:
        """Returns the physical spec of the ranks' inputs [ranks, rows, sequence, embed]."""
        return self._spec(self.stages_in_logical)

    @property
    def stages_in_sharding(self) -> NamedSharding | None:
        """Returns `stages_in_spec` as a sharding."""
        return self._sharding(self.stages_in_logical)

    @property
    def state_io_logical(self) -> tuple[str | None, ...]:
        """Returns the logical axes of `state_io` [ranks, microbatches, rows, sequence, embed]."""
        return ("activation_stage", None, *self._activation)

    @property
    def state_io_spec(self) -> PartitionSpec:
        """Returns the physical spec of `state_io`."""
        return self._spec(self.state_io_logical)

    @property
    def state_io_sharding(self) -> NamedSharding | None:
        """Returns `state_io_spec` as a sharding."""
        return self._sharding(self.state_io_logical)

    @property
    def input_sharding(self) -> NamedSharding | None:
        """Returns the sharding of the inputs [microbatches, rows, sequence, embed]."""
        return self._sharding((None, *self._activation))

    @property
    def output_sharding(self) -> NamedSharding | None:
        """Returns the sharding of the outputs [rows, sequence, embed]."""
        return self._sharding(self._activation)

    @property
    def _activation(self) -> tuple[str, str, str]:
        return self.batch_axis_name, self.seq_len_axis_name, "activation_embed"

    @property
    def _is_explicit(self) -> bool:
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    def _spec(self, names: tuple[str | None, ...]) -> PartitionSpec:
        axes: Any = () if self.mesh is None else self.mesh.axis_names
        return weight_sharding.physical_spec(PartitionSpec(*names), self.axis_rules, axes)

    def _sharding(self, names: tuple[str | None, ...]) -> NamedSharding | None:
        if self.mesh is None or not self._is_explicit:
            return None
        return NamedSharding(self.mesh, self._spec(names))


class PipelineMethods(PipelineAttributes):
    """Methods that `Pipeline` and `CircularPipeline` share."""

    stage_function: Callable[..., Stage]
    """Function `(deterministic, model_mode, instance=None, records=False) -> stage`.

    The stage returns the values that it sows if `records` is True, otherwise none.
    """
    draw_keys: Callable[[], Any]
    """Function that returns new [R, S] dropout keys, or () if stages draw none."""
    stage_variables: Callable[[], Any]
    """Function that returns the arrays of all stages."""
    get_weight_sharding: Callable[..., Any]
    """Function that returns the logical specs of these arrays."""

    def need_circ_storage(self) -> bool:
        """Returns whether outputs of the last rank must wait until rank 0 starts a new repeat."""
        return stepwise.need_circ_storage(self.settings.pipeline_shape)

    def iterations_to_complete_first_microbatch_one_repeat(self) -> int:
        """Returns the number of iterations before the last rank's first one with a microbatch."""
        return stepwise.iterations_of_one_repeat(self.settings.pipeline_shape)

    def iterations_to_complete_first_microbatch(self) -> int:
        """Returns the number of iterations before the one that completes microbatch 0."""
        shape = self.settings.pipeline_shape
        of_one_repeat = self.iterations_to_complete_first_microbatch_one_repeat()
        return shape.num_microbatches * (shape.num_repeats - 1) + of_one_repeat

    def get_iteration_inputs(self, loop_iteration, state_io, circ_storage, shift) -> Any:
        """Returns the [S, ...] inputs that the ranks process in one iteration."""
        return stepwise.iteration_inputs(
            loop_iteration, state_io, circ_storage, shift, self.settings.pipeline_shape, self.mesh
        )

    def get_microbatch_and_repeat_ids(self, loop_iteration) -> tuple[jax.Array, jax.Array]:
        """Returns the microbatch and the repeat that each rank processes, [S] each."""
        return stepwise.microbatch_and_repeat_ids(loop_iteration, self.settings.pipeline_shape)

    def get_pipeline_remat_policy(self) -> Callable:
        """Returns the `jax.checkpoint` policy of the argument `remat_policy` or of the config.

        Unless the config's policy is "custom", it also saves "iteration_input" and
        "decoder_layer_input". It does not depend on whether the config wraps iterations or layers.
        """
        return self.settings.policy

    def get_main_vmap_func_for_iterations(self) -> Callable:
        """Returns a function that runs all stages of one iteration.

        Returns:
            A function of MaxText's arguments: a stage to run in place of the pipeline's own, or
            None, then weights, inputs, `segment_ids` and `positions`, [S, ...] all, and
            `deterministic` and `model_mode`. It returns [S, ...] outputs. In an iteration the
            first argument is a `StageCall`; hand it on as it is.
        """

        def run(
            body_instance,
            weights,
            stages_inputs,
            stages_segment_ids=None,
            stages_positions=None,
            deterministic=False,
            model_mode="train",
        ):
            """Returns [S, ...] outputs of [S, ...] weights and inputs."""
            is_call = isinstance(body_instance, StageCall)
            call = body_instance if is_call else StageCall(body_instance)
            records = isinstance(stages_inputs, ActivationInFlight)
            stage = self.stage_function(deterministic, model_mode, call.instance, records)
            stage = self.settings.remat_stage(of_layers(stage))
            stage = self._remat_gathered(
                with_records(stage) if records else without_records(stage),
                call.logical_partition_spec,
            )
            batch_inputs = to_batch_inputs(stages_segment_ids, stages_positions)
            run = stepwise.run_stages(stage, self.mesh)
            return run(weights, stages_inputs, batch_inputs, call.keys)

        return run

    def init_states(self, inputs) -> stepwise.LoopState:
        """Returns the loop state before iteration 0 for inputs [M, ...]."""
        shape = self.settings.pipeline_shape
        state = stepwise.init_states(inputs, self.draw_keys(), shape, self.need_circ_storage())
        return state | {"state_io": self._sharded(state["state_io"], 0)}

    def shard_dim_by_stages(
        self, x, dim, physical_partition_spec=None, is_stage_weight=False
    ) -> jax.Array:
        """Returns `x` with dim `dim` sharded over the mesh axis `stage`."""
        return weight_sharding.shard_dim_by_stages(
            x, dim, physical_partition_spec, self.mesh, is_weight=is_stage_weight
        )

    def vmap_parallel_gather(
        self,
        weights,
        physical_partition_spec,
        repeat_ids,
        repeat_dim_in_weights,
        stages_dim_in_weights,
    ) -> Any:
        """Returns the weights of repeat `repeat_ids[r]` from each rank r; with specs, gathered."""
        dims = repeat_dim_in_weights, stages_dim_in_weights
        taken = stepwise.take_repeats(weights, repeat_ids, *dims, self.mesh)
        stages_dim = stages_dim_in_weights - (repeat_dim_in_weights < stages_dim_in_weights)
        return self._sharded(taken, stages_dim, physical_partition_spec)

    def vmap_gather(self, xs, ids, ids_dim) -> Any:
        """Returns entry `ids[r]` of dim `ids_dim` for every rank r: that dim becomes [S]."""
        return self._sharded(stepwise.take_per_rank(xs, ids, ids_dim), ids_dim)

    def get_new_loop_state(self, output, loop_state) -> stepwise.LoopState:
        """Returns the loop state after an iteration in which the ranks made `output` [S, ...]."""
        return stepwise.new_loop_state(output, loop_state, self.settings.pipeline_shape, self.mesh)

    def permute_output_micro_per_stage_dim(self, output) -> Any:
        """Reorders the final `state_io` [S, M / S, ...] to the order of the rows of the inputs."""
        first = self.iterations_to_complete_first_microbatch()
        return stepwise.permute_output(output, self.settings.pipeline_shape, first)

    def realign_output_microbatches(self, output) -> Any:
        """Reorders the final `state_io` [S, M / S, ...] to the order of the rows of the inputs."""
        return self.permute_output_micro_per_stage_dim(output)

    def all_gather_over_fsdp(self, variables, logical_partition_spec) -> Any:
        """Returns variables that are no longer sharded over fsdp and fsdp_transpose."""
        specs = weight_sharding.physical_specs(logical_partition_spec, self.axis_rules, self.mesh)
        axes = "fsdp", "fsdp_transpose"
        return weight_sharding.unshard_arrays(variables, specs, self.mesh, axes)

    def _remat_gathered(self, stage, names) -> Callable:
        """Returns `stage` with remat, which gathers its weights if logical specs are given."""
        if names is None:
            return self.settings.remat_tick(stage)
        specs = weight_sharding.without_dims(self.specs_without_repeats(names), 1)
        gather = gather_by_specs(specs, unsharded_specs(specs))
        return self.settings.remat_tick(lambda w, *rest: stage(gather.unshard(w), *rest))

    def specs_without_repeats(self, names) -> Any:
        """Returns physical specs of [S, ...] leaves from logical specs of all stages' weights."""
        names = self.get_logical_spec_repeats_removed(names)
        return weight_sharding.physical_specs(names, self.axis_rules, self.mesh)

    @staticmethod
    def get_logical_spec_repeats_removed(full_logical) -> Any:
        """Returns the logical specs without the name "circular_repeats"."""
        return weight_sharding.without_repeats(full_logical)

    def _run_iteration(
        self, loop_state, weights, batch, options, call, *, take, advance
    ) -> stepwise.LoopState:
        """Runs all ranks once, on `batch`: [M, ...] segment ids and positions.

        `take` takes the ranks' entries of an array of it, and `advance` makes the new loop state.
        """
        t, keys = loop_state["loop_iteration"], loop_state["keys"]
        microbatches, repeats = self.get_microbatch_and_repeat_ids(t)
        x = self.get_iteration_inputs(
            t, loop_state["state_io"], loop_state["circ_storage"], loop_state["shift"]
        )
        batch = jax.tree.map(lambda leaf: take(leaf, microbatches, 0), batch)
        call = call._replace(
            keys=stepwise.keys_of_iteration(keys, microbatches, repeats, self.mesh)
        )
        run = self.get_main_vmap_func_for_iterations()
        result = run(call, weights, x, *batch, *options)
        return advance(self._outputs_of(result, weights), loop_state)

    def _outputs_of(self, result, weights) -> Any:
        """Returns the outputs of what the function of all stages returns for these weights."""
        del weights
        return result

    def _sharded(self, tree, dim, specs=None) -> Any:
        """Returns `shard_dim_by_stages` of every leaf; leaves with specs are weights in use."""
        if specs is None:
            return jax.tree.map(lambda x: self.shard_dim_by_stages(x, dim), tree)
        shard = partial(self.shard_dim_by_stages, dim=dim, is_stage_weight=True)
        return jax.tree.map(lambda x, spec: shard(x, physical_partition_spec=spec), tree, specs)


class LoopMethods(PipelineMethods):
    """Methods of `Pipeline`, which looks up weights of the current repeat in every iteration."""

    def get_current_stage_weights(
        self, pipeline_weights, loop_iteration, physical_partition_spec=None
    ) -> Any:
        """Returns the [S, ...] weights of each rank's current repeat."""
        if self.settings.dims[0] == 1:
            return pipeline_weights
        return self.get_current_repeat_from_stages(
            pipeline_weights, loop_iteration, physical_partition_spec
        )

    def get_current_repeat_from_stages(
        self, weights, loop_iteration, physical_partition_spec=None
    ) -> Any:
        """Returns the [S, ...] weights of each rank's current repeat, from [R, S, ...] leaves."""
        _, repeats = self.get_microbatch_and_repeat_ids(loop_iteration)
        return self.vmap_parallel_gather(weights, physical_partition_spec, repeats, 0, 1)

    def run_one_iteration(
        self,
        loop_state,
        pipeline_weights,
        positions=None,
        segment_ids=None,
        deterministic=False,
        model_mode="train",
        decoder_layer_instance=None,
        logical_partition_spec=None,
    ) -> stepwise.LoopState:
        """Runs every rank on its current microbatch and sends the outputs to the next ranks.

        `decoder_layer_instance`, if given, runs in place of the pipeline's own stage. If
        `logical_partition_spec` is given, weights are gathered over fsdp, context and expert by
        these specs.
        """
        return self._run_iteration(
            loop_state,
            self.get_current_stage_weights(pipeline_weights, loop_state["loop_iteration"]),
            (segment_ids, positions),
            (deterministic, model_mode),
            StageCall(decoder_layer_instance, logical_partition_spec=logical_partition_spec),
            take=self.vmap_gather,
            advance=self.get_new_loop_state,
        )

    def iterate(self, loop_state, weights, batch: MethodBatch, names) -> Any:
        """Calls `run_one_iteration` with the arguments that it has where it is overridden."""
        return self.run_one_iteration(loop_state, weights, *batch, None, names)


class WindowMethods(PipelineMethods):
    """Methods of `CircularPipeline`, which keeps weights of two repeats in a window, `bsw`."""

    def init_states(self, inputs, weights=None) -> stepwise.LoopState:
        """Returns the loop state before iteration 0, with an empty window [2, S, ...] `bsw`."""
        weights = self.stage_variables() if weights is None else weights
        window = stepwise.empty_window(from_stored(weights, self.settings))
        return super().init_states(inputs) | {"bsw": window}

    def gather_weights_across_stages_vmap(
        self, weights, repeat_ids, repeat_dim_in_weights=0, stages_dim_in_weights=1
    ) -> Any:
        """Returns the weights of repeat `repeat_ids[r]` from the shard of each rank r."""
        dims = repeat_dim_in_weights, stages_dim_in_weights
        return self.vmap_parallel_gather(weights, None, repeat_ids, *dims)

    def gather_microbatch_inputs_vmap(self, xs, ids, ids_dim) -> Any:
        """Returns entry `ids[r]` of dim `ids_dim` for every rank r: that dim becomes [S]."""
        return self.vmap_gather(xs, ids, ids_dim)

    def advance_circular_buffers(self, output, loop_state) -> stepwise.LoopState:
        """Returns the loop state after an iteration in which the ranks made `output` [S, ...]."""
        return self.get_new_loop_state(output, loop_state)

    def fetch_active_stage_weights(
        self, bsw, loop_iteration, physical_partition_spec=None, is_initializing=None
    ) -> Any:
        """Returns the [S, ...] weights of each rank's current repeat, from [2, S, ...] windows."""
        return self.get_current_weights_from_bsw(
            bsw, loop_iteration, physical_partition_spec, is_initializing
        )

    def get_current_weights_from_bsw(
        self, bsw, loop_iteration, physical_partition_spec=None, is_initializing=None
    ) -> Any:
        """Returns the [S, ...] weights of each rank's current repeat, from [2, S, ...] windows.

        With `is_initializing` it returns the weights of the first repeat and ignores
        `loop_iteration`. If specs are given, the weights are gathered over fsdp, context and
        expert.
        """
        _, repeats = self.get_microbatch_and_repeat_ids(0 if is_initializing else loop_iteration)
        weights = stepwise.from_window(bsw, repeats)
        if physical_partition_spec is None:
            return weights
        return weight_sharding.unshard_arrays(weights, physical_partition_spec, self.mesh)

    def from_all_variables_to_repeat_weights(self, weights, loop_iteration) -> Any:
        """Returns the [S, ...] weights of rank 0's current repeat, for all stages."""
        if self.settings.dims[0] == 1:
            return weights
        repeats = stepwise.repeat_of_rank_0(loop_iteration, self.settings.pipeline_shape)
        return self.gather_weights_across_stages_vmap(weights, repeats, 0, 1)

    def from_repeat_weights_to_bsw(
        self,
        repeat_weights,
        physical_partition_spec,
        axes_to_gather=GATHERED_AXES,
        use_shardmap=False,
    ) -> Any:
        """Returns one half of a window: a repeat's [S, ...] weights, over `axes_to_gather`.

        Without specs they stay as they are sharded.
        """
        if physical_partition_spec is None:
            return repeat_weights
        return weight_sharding.unshard_arrays(
            repeat_weights, physical_partition_spec, self.mesh, axes_to_gather, use_shardmap
        )

    def weight_prefetching(self, weights, physical_partition_spec, loop_iteration) -> Any:
        """Returns the [2, S, ...] window for iteration `loop_iteration + 1`.

        The window changes whenever rank 0 starts a repeat: before iterations 0, M, 2 M, and so on.
        `weights` are those of all stages.
        """
        specs, read = physical_partition_spec, self.from_all_variables_to_repeat_weights
        gather = Gather("repeat", unshard=lambda w: self.from_repeat_weights_to_bsw(w, specs))
        held = weight_gather(gather, weights, read=read)
        return stepwise.window_at(held, loop_iteration + 1, self.settings.pipeline_shape)

    def run_one_iteration(
        self,
        loop_state,
        bsw,
        positions=None,
        segment_ids=None,
        deterministic=False,
        model_mode="train",
        logical_partition_spec=None,
    ) -> stepwise.LoopState:
        """Runs every rank once, with weights of `bsw`, and sends outputs to the next ranks."""
        return self._run_iteration(
            loop_state,
            self.fetch_active_stage_weights(bsw, loop_state["loop_iteration"]),
            (segment_ids, positions),
            (deterministic, model_mode),
            StageCall(logical_partition_spec=logical_partition_spec),
            take=self.gather_microbatch_inputs_vmap,
            advance=self.advance_circular_buffers,
        )

    def iterate(self, loop_state, bsw, batch: MethodBatch) -> Any:
        """Calls `run_one_iteration` with the arguments that it has where it is overridden."""
        return self.run_one_iteration(loop_state, bsw, *batch, None)


def to_batch_inputs(segment_ids: Any, positions: Any) -> dict[str, Any]:
    """Returns the inputs that every stage may read of a microbatch, by name."""
    return {"segment_ids": segment_ids, "positions": positions}
