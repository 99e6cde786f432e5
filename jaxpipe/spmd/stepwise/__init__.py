"""The circular pipeline, one iteration per call: the caller writes the loop."""

from ..circular_engine import PipelineShape as PipelineShape
from ._iteration import LoopState as LoopState
from ._iteration import empty_window as empty_window
from ._iteration import from_window as from_window
from ._iteration import init_states as init_states
from ._iteration import iteration_inputs as iteration_inputs
from ._iteration import iterations_of_first_microbatch as iterations_of_first_microbatch
from ._iteration import iterations_of_one_repeat as iterations_of_one_repeat
from ._iteration import keys_of_iteration as keys_of_iteration
from ._iteration import microbatch_and_repeat_ids as microbatch_and_repeat_ids
from ._iteration import need_circ_storage as need_circ_storage
from ._iteration import new_loop_state as new_loop_state
from ._iteration import permute_output as permute_output
from ._iteration import repeat_of_rank_0 as repeat_of_rank_0
from ._iteration import run_stages as run_stages
from ._iteration import take_per_rank as take_per_rank
from ._iteration import take_repeats as take_repeats
from ._iteration import window_at as window_at
