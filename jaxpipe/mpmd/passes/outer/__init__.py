"""The passes over the equations outside of loops."""

from ._assign_ranks import assign_ranks as assign_ranks
from ._outer_fragments import outer_fragments as outer_fragments
from ._propagate_shardings import propagate_shardings as propagate_shardings
from ._separate_outputs import separate_outputs as separate_outputs
