"""Row analysis: whether a function of a batch is the same function of each of its rows."""

from ._compare import compare as compare
from ._one_step import relations_of as relations_of
from ._relations import MEAN as MEAN
from ._relations import Mixed as Mixed
from ._relations import MixesRowsError as MixesRowsError
from ._relations import Relation as Relation
from ._relations import RowIds as RowIds
from ._relations import Rows as Rows
from ._relations import Sum as Sum
from ._relations import Whole as Whole
from ._relations import Zero as Zero
from ._relations import is_within as is_within
from ._relations import join as join
from ._relations import row_dim as row_dim
from ._step import Step as Step
from ._step import described as described
