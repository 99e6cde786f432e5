"""What a pipeline says about itself: whether it is exact, and what it needs."""

from ._check import Reference as Reference
from ._check import compared as compared
from ._check import reference_result as reference_result
from ._check import require as require
from ._check import run as run
from ._comparison import TOLERANCE as TOLERANCE
from ._comparison import Comparison as Comparison
from ._inspected import InspectedModel as InspectedModel
from ._memory import MemoryTable as MemoryTable
