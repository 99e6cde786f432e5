"""A schedule on a grid of ticks: its buffers, its weight prefetch and its tables."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._copies import CopyRound as CopyRound
    from ._copies import RankAndChunk as RankAndChunk
    from ._copies import WeightCopies as WeightCopies
    from ._copies import rank_and_chunk_by_stage as rank_and_chunk_by_stage
    from ._grid_search import Grid as Grid
    from ._grid_search import candidate_lags as candidate_lags
    from ._grid_search import candidate_spares as candidate_spares
    from ._grid_search import fill_grid as fill_grid
    from ._grid_search import rank_orders as rank_orders
    from ._grid_search import ticks_from_grid as ticks_from_grid
    from ._grid_search import to_lock_step as to_lock_step
    from ._loops import middle_chunk as middle_chunk
    from ._loops import tick_loops as tick_loops
    from ._tables import PhaseTable as PhaseTable
    from ._tables import TickTables as TickTables
    from ._tables import buffer_slots as buffer_slots
    from ._tables import tick_tables as tick_tables
    from ._ticks import Ticks as Ticks
    from ._ticks import check_no_slices as check_no_slices
    from ._ticks import check_ticks as check_ticks
    from ._ticks import enumerate_ticks as enumerate_ticks
    from ._ticks import has_forwards_first as has_forwards_first
    from ._ticks import num_ticks as num_ticks
    from ._ticks import simulate_ticks as simulate_ticks
    from ._ticks import slices_as_microbatches as slices_as_microbatches
    from ._weight_prefetch import PREFETCHED as PREFETCHED
    from ._weight_prefetch import SHARED_WITH_FORWARD as SHARED_WITH_FORWARD
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
