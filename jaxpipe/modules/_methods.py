"""MaxText's methods of a pipeline module, each a line over the pure function of the same meaning.

Both rims inherit them. What they need of a rim is declared in `PipelineMethods`. Leaves are global
arrays: weights [R, S, L, ...], activations of an iteration [S, ...], `positions` and `segment_ids`
[M, ...]. A state is the dict of `init_states`. Driven by hand through all iterations it ends with
the outputs of the pipeline's own call; what layers record is dropped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from ..spmd.stepwise import _iteration as iteration
from ..spmd.stepwise import _weight_window as window
from . import _placement as placement
from ._attributes import PipelineAttributes
from ._layers import Layer, settings_stage, without_records
from ._settings import AxisRules, PipelineSettings


class PipelineMethods(PipelineAttributes):
    """What all pipelines have."""

    mesh: Mesh | None
    settings: PipelineSettings
    axis_rules: AxisRules
    layer_function: Callable[..., Layer]
    """`(deterministic, model_mode, instance=None) -> layer`, without records."""
    draw_keys: Callable[[], Any]
    """New [R, S, L] dropout keys, or ()."""
    layer_variables: Callable[[], Any]
    """The [R, S, L, ...] arrays of all layers."""

    def need_circ_storage(self) -> bool:
        """Whether results wait between the last rank and the next repeat on rank 0."""
        return iteration.need_circ_storage(self.settings.counts)

    def iterations_to_complete_first_microbatch_one_repeat(self) -> int:
        """Iterations before the one in which the last rank first works."""
        return iteration.iterations_of_one_repeat(self.settings.counts)

    def iterations_to_complete_first_microbatch(self) -> int:
        """Iterations before the one in which microbatch 0 leaves."""
        return iteration.iterations_of_first_microbatch(self.settings.counts)

    def get_iteration_inputs(self, loop_iteration, state_io, circ_storage, shift) -> Any:
        """What every rank works on: [S, ...]."""
        return iteration.iteration_inputs(
            loop_iteration, state_io, circ_storage, shift, self.settings.counts
        )

    def get_microbatch_and_repeat_ids(self, loop_iteration) -> tuple[jax.Array, jax.Array]:
        """The microbatch and the repeat of every rank, [S] each."""
        return iteration.microbatch_and_repeat_ids(loop_iteration, self.settings.counts)

    def get_pipeline_remat_policy(self) -> Callable:
        """Returns the policy of `jax.checkpoint` for iterations, whatever the config wraps with it.

        It is the one of `remat_policy`, or the argument of that name, and unless that is "custom"
        it also saves "iteration_input" and "decoder_layer_input".
        """
        return self.settings.policy

    def get_main_vmap_func_for_iterations(self) -> Callable:
        """All stages of an iteration, see `run`."""

        def run(
            weights,
            inputs,
            segment_ids=None,
            positions=None,
            deterministic=False,
            model_mode="train",
            rng=(),
        ):
            """[S, ...] outputs from [S, L, ...] weights, [S, ...] inputs and [S, L] keys."""
            stage = self._stage(deterministic, model_mode)
            side = side_of(segment_ids, positions)
            return iteration.run_stages(stage, self.mesh)(weights, inputs, side, rng)

        return run

    def init_states(self, inputs) -> iteration.LoopState:
        """The state before iteration 0, for inputs [M, ...]."""
        return iteration.init_states(inputs, self.draw_keys(), self.settings.counts)

    def _stage(self, deterministic, model_mode, instance=None, gathered=None) -> Callable:
        layer = self.layer_function(deterministic, model_mode, instance)
        stage = without_records(settings_stage(layer, self.settings))
        if gathered is None:
            return self.settings.remat_tick(stage)
        return self.settings.remat_tick(lambda w, *rest: stage(gathered(w), *rest))

    def _gathered(self, names) -> Callable | None:
        return None if names is None else placement.gather_stage(self._specs(names))

    def _specs(self, names) -> Any:
        """Physical specs of [S, ...] leaves, from logical ones of [R, S, ...] leaves."""
        return placement.physical_specs(
            placement.without_repeats(names), self.axis_rules, self.mesh
        )


class LoopMethods(PipelineMethods):
    """What `Pipeline` has: weights are looked up in every iteration."""

    def shard_dim_by_stages(
        self, x, dim, physical_partition_spec=None, is_stage_weight=False
    ) -> jax.Array:
        """`x` with `dim` split over the ranks."""
        return placement.shard_dim_by_stages(
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
        """The weights of repeat `repeat_ids[r]` from rank r's part, without the repeats' dim."""
        taken = iteration.take_repeats(
            weights, repeat_ids, repeat_dim_in_weights, stages_dim_in_weights, self.mesh
        )
        return self._whole(taken, physical_partition_spec)

    def vmap_gather(self, xs, ids, ids_dim) -> Any:
        """Entry `ids[r]` of `ids_dim` for every rank: that dim becomes [S]."""
        return iteration.take_per_rank(xs, ids, ids_dim)

    def get_new_loop_state(self, output, loop_state) -> iteration.LoopState:
        """The state after an iteration in which the ranks made `output` [S, ...]."""
        return iteration.new_loop_state(output, loop_state, self.settings.counts, self.mesh)

    def permute_output_micro_per_stage_dim(self, output) -> Any:
        """`state_io` [S, M / S, ...] after the last iteration, in the order of the inputs' rows."""
        return iteration.permute_output(output, self.settings.counts)

    def get_current_stage_weights(
        self, pipeline_weights, loop_iteration, physical_partition_spec=None
    ) -> Any:
        """The weights every rank works with: [R, S, ...] -> [S, ...]."""
        return self.get_current_repeat_from_stages(
            pipeline_weights, loop_iteration, physical_partition_spec
        )

    def get_current_repeat_from_stages(
        self, weights, loop_iteration, physical_partition_spec=None
    ) -> Any:
        """The weights of every rank's current repeat: [R, S, ...] -> [S, ...]."""
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
    ) -> iteration.LoopState:
        """Every rank works on its microbatch and hands it on.

        `decoder_layer_instance` runs in place of the pipeline's own layer; weights are gathered as
        `logical_partition_spec` says, where it is given.
        """
        gathered = self._gathered(logical_partition_spec)
        stage = self._stage(deterministic, model_mode, decoder_layer_instance, gathered)
        weights = self.get_current_stage_weights(pipeline_weights, loop_state["loop_iteration"])
        side = side_of(segment_ids, positions)
        return iteration.run_one_iteration(
            stage, loop_state, weights, side, self.settings.counts, self.mesh
        )

    @staticmethod
    def get_logical_spec_repeats_removed(full_logical) -> Any:
        """Logical specs without "circular_repeats"."""
        return placement.without_repeats(full_logical)

    def all_gather_over_fsdp(self, variables, logical_partition_spec) -> Any:
        """[R, S, ...] variables, no longer split over fsdp."""
        specs = placement.physical_specs(logical_partition_spec, self.axis_rules, self.mesh)
        return placement.gather_all(variables, specs, self.mesh, ("fsdp", "fsdp_transpose"))

    def _whole(self, weights, specs) -> Any:
        if specs is None:
            return weights
        return placement.gather_all(weights, specs, self.mesh, placement.GATHERED)


class WindowMethods(PipelineMethods):
    """What `CircularPipeline` has: whole weights of two repeats lie in a window, the "bsw"."""

    def init_states(self, inputs, weights=None) -> iteration.LoopState:
        """The state before iteration 0, and its `bsw`: an empty window, [2, S, ...] leaves.

        `weights` are the [R, S, ...] leaves of all layers, by default the module's own.
        """
        weights = self.layer_variables() if weights is None else weights
        return super().init_states(inputs) | {"bsw": window.empty_window(weights)}

    def gather_weights_across_stages_vmap(
        self, weights, repeat_ids, repeat_dim_in_weights=0, stages_dim_in_weights=1
    ) -> Any:
        """The weights of repeat `repeat_ids[r]` from rank r's part, without the repeats' dim."""
        return iteration.take_repeats(
            weights, repeat_ids, repeat_dim_in_weights, stages_dim_in_weights, self.mesh
        )

    def gather_microbatch_inputs_vmap(self, xs, ids, ids_dim) -> Any:
        """Entry `ids[r]` of `ids_dim` for every rank: that dim becomes [S]."""
        return iteration.take_per_rank(xs, ids, ids_dim)

    def advance_circular_buffers(self, output, loop_state) -> iteration.LoopState:
        """The state after an iteration in which the ranks made `output` [S, ...]."""
        return iteration.new_loop_state(output, loop_state, self.settings.counts, self.mesh)

    def realign_output_microbatches(self, output) -> Any:
        """`state_io` [S, M / S, ...] after the last iteration, in the order of the inputs' rows."""
        return iteration.permute_output(output, self.settings.counts)

    def fetch_active_stage_weights(
        self, bsw, loop_iteration, physical_partition_spec=None, is_initializing=None
    ) -> Any:
        """The weights every rank works with, from the window: [2, S, ...] -> [S, ...]."""
        return self.get_current_weights_from_bsw(
            bsw, loop_iteration, physical_partition_spec, is_initializing
        )

    def get_current_weights_from_bsw(
        self, bsw, loop_iteration, physical_partition_spec=None, is_initializing=None
    ) -> Any:
        """The weights every rank works with, from the window: [2, S, ...] -> [S, ...].

        With `is_initializing` those of the first repeat, whatever `loop_iteration` says.
        """
        now = 0 if is_initializing else loop_iteration
        weights = window.from_window(bsw, now, self.settings.counts)
        if physical_partition_spec is None:
            return weights
        return placement.gather_all(weights, physical_partition_spec, self.mesh, placement.GATHERED)

    def from_all_variables_to_repeat_weights(self, weights, loop_iteration) -> Any:
        """All stages of the repeat in which rank 0 is: [R, S, ...] -> [S, ...]."""
        return window.repeat_weights(weights, loop_iteration, self.settings.counts)

    def from_repeat_weights_to_bsw(
        self,
        repeat_weights,
        physical_partition_spec,
        axes_to_gather=placement.GATHERED,
        use_shardmap=False,
    ) -> Any:
        """[S, ...] weights of a repeat, whole along `axes_to_gather`: one half of a window.

        `use_shardmap` gathers by `jax.lax.all_gather`, otherwise a sharding constraint does.
        """
        return placement.gather_block(
            repeat_weights, physical_partition_spec, self.mesh, axes_to_gather, use_shardmap
        )

    def weight_prefetching(self, weights, physical_partition_spec, loop_iteration) -> Any:
        """The window for iteration `loop_iteration + 1`: [R, S, ...] -> [2, S, ...].

        It changes whenever rank 0 enters a repeat, that is before iterations 0, M, 2 M, ...
        """
        gather = partial(
            self.from_repeat_weights_to_bsw, physical_partition_spec=physical_partition_spec
        )
        return window.window_at(weights, loop_iteration + 1, self.settings.counts, gather)

    def run_one_iteration(
        self,
        loop_state,
        bsw,
        positions=None,
        segment_ids=None,
        deterministic=False,
        model_mode="train",
        logical_partition_spec=None,
    ) -> iteration.LoopState:
        """Every rank works on its microbatch, with weights from the window, and hands it on."""
        stage = self._stage(
            deterministic, model_mode, gathered=self._gathered(logical_partition_spec)
        )
        weights = self.fetch_active_stage_weights(bsw, loop_state["loop_iteration"])
        side = side_of(segment_ids, positions)
        return iteration.run_one_iteration(
            stage, loop_state, weights, side, self.settings.counts, self.mesh
        )


def side_of(segment_ids: Any, positions: Any) -> dict[str, Any]:
    """What every stage may read of a microbatch."""
    return {"segment_ids": segment_ids, "positions": positions}
