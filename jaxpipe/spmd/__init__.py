"""Pipelines in one XLA program: `jax.shard_map` over the axis `stage`, the other axes automatic."""

from ._circular import Remat as Remat
from ._circular import check_circular as check_circular
from ._circular import num_ticks as num_ticks
from ._circular_engine import circular as circular
from ._circular_engine import circular_value_and_grad as circular_value_and_grad
from ._circular_engine import keep as keep
from ._circular_engine import recompute as recompute
from ._ranks import on_ranks as on_ranks

# isort: split
# What the rims, `jaxpipe.linen` and `jaxpipe.nnx`, are made of.
from ._iteration import Counts as Counts
from ._iteration import init_states as init_states
from ._iteration import iteration_inputs as iteration_inputs
from ._iteration import iterations_of_first_microbatch as iterations_of_first_microbatch
from ._iteration import iterations_of_one_repeat as iterations_of_one_repeat
from ._iteration import microbatch_and_repeat_ids as microbatch_and_repeat_ids
from ._iteration import need_circ_storage as need_circ_storage
from ._iteration import new_loop_state as new_loop_state
from ._iteration import permute_output as permute_output
from ._iteration import rotate as rotate
from ._iteration import run_one_iteration as run_one_iteration
from ._iteration import run_stages as run_stages
from ._iteration import take_per_rank as take_per_rank
from ._iteration import take_repeats as take_repeats
from ._iteration_window import empty_window as empty_window
from ._iteration_window import from_window as from_window
from ._iteration_window import repeat_weights as repeat_weights
from ._iteration_window import window_at as window_at
from ._layers import Layer as Layer
from ._layers import from_microbatches as from_microbatches
from ._layers import layer_keys as layer_keys
from ._layers import pipeline_layers as pipeline_layers
from ._layers import to_microbatches as to_microbatches
from ._methods import LoopMethods as LoopMethods
from ._methods import PipelineMethods as PipelineMethods
from ._methods import WindowMethods as WindowMethods
from ._methods import side_of as side_of
from ._placement import GATHERED as GATHERED
from ._placement import STACKED as STACKED
from ._placement import describe_placement as describe_placement
from ._placement import gather_all as gather_all
from ._placement import gather_block as gather_block
from ._placement import gather_stage as gather_stage
from ._placement import physical_spec as physical_spec
from ._placement import physical_specs as physical_specs
from ._placement import place as place
from ._placement import place_microbatches as place_microbatches
from ._placement import shard_dim_by_stages as shard_dim_by_stages
from ._placement import without_axes as without_axes
from ._placement import without_repeats as without_repeats
from ._settings import AxisRules as AxisRules
from ._settings import PipelineSettings as PipelineSettings
from ._settings import axis_rules as axis_rules
from ._settings import pipeline_settings as pipeline_settings
from ._unrolled import circular_unrolled as circular_unrolled
