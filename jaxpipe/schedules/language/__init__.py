"""The language of schedules: actions, the order of each rank, dependencies, and the check."""

from ._action import ScheduleStep as ScheduleStep
from ._action import actions_of as actions_of
from ._action import parse_action as parse_action
from ._action import parse_step as parse_step
from ._dependencies import dependencies as dependencies
from ._dependencies import outputs as outputs
from ._dependencies import topological_order as topological_order
from ._placement import PLACEMENTS as PLACEMENTS
from ._placement import rank_of_each_stage as rank_of_each_stage
from ._schedule import check_carried_state as check_carried_state
from ._schedule import describe as describe
from ._schedule import enumerate_actions as enumerate_actions
from ._schedule import forward_only as forward_only
from ._schedule import num_copies as num_copies
from ._schedule import num_slices as num_slices
from ._schedule import owners as owners
from ._schedule import rank_by_microbatch as rank_by_microbatch
from ._schedule import ranks_by_stage as ranks_by_stage
from ._schedule import ranks_of_stage as ranks_of_stage
from ._schedule import splits_backwards as splits_backwards
from ._schedule import stages_of_rank as stages_of_rank
from ._schedule import stored_stages as stored_stages
from ._schedule import without_fused_pairs as without_fused_pairs
