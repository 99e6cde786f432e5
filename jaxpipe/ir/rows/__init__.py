"""Finds out whether a function of a batch is the same function of each of its rows."""

from ._control import compare as compare
from ._draws import Draws as Draws
from ._draws import can_draw_own as can_draw_own
from ._draws import draws_by_other_keys as draws_by_other_keys
from ._draws import with_own_draws as with_own_draws
from ._relations import MEAN as MEAN
from ._relations import EquationPair as EquationPair
from ._relations import FirstRow as FirstRow
from ._relations import Mixed as Mixed
from ._relations import MixesRowsError as MixesRowsError
from ._relations import Relation as Relation
from ._relations import RowIds as RowIds
from ._relations import Rows as Rows
from ._relations import Sum as Sum
from ._relations import Whole as Whole
from ._relations import Zero as Zero
from ._relations import described as described
from ._relations import is_within as is_within
from ._relations import join as join
from ._relations import row_dim as row_dim
from ._same_programs import is_same as is_same
from ._walk import relations_of as relations_of
from ._walk import source_line as source_line
