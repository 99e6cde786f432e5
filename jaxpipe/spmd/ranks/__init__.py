"""Functions of one rank: run on all ranks, with arrays and shardings as they are inside of one."""

from ._on_ranks import AXIS as AXIS
from ._on_ranks import empty as empty
from ._on_ranks import on_ranks as on_ranks
from ._on_ranks import poison as poison
from ._stage_order import stages_on_ranks as stages_on_ranks
from ._stage_order import to_ranks as to_ranks
from ._stage_order import to_stages as to_stages
from ._stage_shardings import at_init as at_init
from ._stage_shardings import in_stage as in_stage
from ._varying import ON_ALL_RANKS as ON_ALL_RANKS
from ._varying import cond as cond
from ._varying import execution_count_hint as execution_count_hint
from ._varying import masked_layer as masked_layer
from ._varying import pvary as pvary
from ._varying import update_if as update_if
from ._varying import zeros as zeros
from ._varying import zeros_like as zeros_like
