"""A schedule on a grid of ticks: its buffers, its weight prefetch and its tables."""

from ._tables import PhaseTable as PhaseTable
from ._tables import RankAndChunk as RankAndChunk
from ._weight_prefetch import PREFETCHED as PREFETCHED
from ._weight_prefetch import SHARED_WITH_FORWARD as SHARED_WITH_FORWARD
