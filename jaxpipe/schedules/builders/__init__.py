"""Builders of schedules, one family of papers a file, and the registry that names them."""

from ._controlled_memory import v_half as v_half
from ._controlled_memory import v_min as v_min
from ._dualpipe import dualpipe as dualpipe
from ._dualpipe import dualpipev as dualpipev
from ._interleaved import grouped_interleaved as grouped_interleaved
from ._interleaved import interleaved_gpipe as interleaved_gpipe
from ._interleaved import interleaved_one_f_one_b as interleaved_one_f_one_b
from ._interleaved import interleaved_zero_bubble as interleaved_zero_bubble
from ._interleaved import kimi_k2 as kimi_k2
from ._looped_bfs import circular as circular
from ._looped_bfs import circular_ticks as circular_ticks
from ._looped_bfs import gpipe as gpipe
from ._looped_bfs import looped_bfs as looped_bfs
from ._one_f_one_b import eager_one_f_one_b as eager_one_f_one_b
from ._one_f_one_b import one_f_one_b as one_f_one_b
from ._one_f_one_b import seq1f1b as seq1f1b
from ._registry import family_of_1f1b as family_of_1f1b
from ._registry import get_family as get_family
from ._require import require_positive as require_positive
from ._zero_bubble import zbv as zbv
from ._zero_bubble import zero_bubble_h1 as zero_bubble_h1
from ._zero_bubble import zero_bubble_h2 as zero_bubble_h2
