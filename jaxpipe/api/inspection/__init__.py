"""What a pipeline says about itself: whether it is exact, and what it needs."""

from ._check import TOLERANCE as TOLERANCE
from ._check import Comparison as Comparison
from ._check import compare as compare
from ._check import require as require
from ._check import run_value_and_grad as run_value_and_grad
from ._inspected import InspectedModel as InspectedModel
from ._memory import MemoryTable as MemoryTable
