"""Pipelines in one XLA program: `jax.shard_map` over the axis `stage`, the other axes automatic."""

from ..autodiff import Remat as Remat
from ..autodiff import keep as keep
from ..autodiff import recompute as recompute
from ._layer_mask import if_present as if_present
from ._ranks import on_ranks as on_ranks
from ._stage_order import stages_on_ranks as stages_on_ranks
from ._stage_order import to_ranks as to_ranks
from ._stage_order import to_stages as to_stages
from ._weight_gather import Gather as Gather
from ._weight_gather import gather_in_layers as gather_in_layers
from ._weight_gather import gather_weights as gather_weights
from ._weight_gather import layer_gather as layer_gather
from .circular_engine._engine import circular as circular
from .circular_engine._engine import circular_value as circular_value
from .circular_engine._engine import circular_value_and_grad as circular_value_and_grad
from .circular_engine._shape import check_circular as check_circular
from .circular_engine._shape import num_ticks as num_ticks
from .scheduled_engine._engine import scheduled_value as scheduled_value
from .scheduled_engine._engine import scheduled_value_and_grad as scheduled_value_and_grad

# isort: split
# Building blocks of the frontends `jaxpipe.linen` and `jaxpipe.nnx`.
from ._stage_shardings import at_init as at_init
from .circular_engine._unrolled import circular_unrolled as circular_unrolled
from .stepwise._iteration import Counts as Counts
from .stepwise._iteration import init_states as init_states
from .stepwise._iteration import iteration_inputs as iteration_inputs
from .stepwise._iteration import iterations_of_first_microbatch as iterations_of_first_microbatch
from .stepwise._iteration import iterations_of_one_repeat as iterations_of_one_repeat
from .stepwise._iteration import microbatch_and_repeat_ids as microbatch_and_repeat_ids
from .stepwise._iteration import need_circ_storage as need_circ_storage
from .stepwise._iteration import new_loop_state as new_loop_state
from .stepwise._iteration import permute_output as permute_output
from .stepwise._iteration import rotate as rotate
from .stepwise._iteration import run_one_iteration as run_one_iteration
from .stepwise._iteration import run_stages as run_stages
from .stepwise._iteration import take_per_rank as take_per_rank
from .stepwise._iteration import take_repeats as take_repeats
from .stepwise._weight_window import empty_window as empty_window
from .stepwise._weight_window import from_window as from_window
from .stepwise._weight_window import repeat_weights as repeat_weights
from .stepwise._weight_window import window_at as window_at
