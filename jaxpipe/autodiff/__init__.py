"""What all engines share: the contract of a model, and the unpipelined reference."""

from . import _unpipelined as unpipelined
from ._accumulate import accumulate as accumulate
from ._accumulate import add_gradients as add_gradients
from ._fission import Fission as Fission
from ._fission import fission as fission
from ._model import Model as Model
from ._model import Sums as Sums
from ._model import at as at
from ._model import fold as fold
from ._model import joined as joined
from ._model import total as total
from ._policies import OFFLOADED as OFFLOADED
from ._policies import POLICIES as POLICIES
from ._policies import TENSORS as TENSORS
from ._policies import Place as Place
from ._policies import Remat as Remat
from ._policies import check_offload as check_offload
from ._policies import keep as keep
from ._policies import recompute as recompute
from ._policies import remat_by_name as remat_by_name
from ._program import Program as Program
from ._program import program as program
from ._program import vary_as as vary_as
from ._pullback import Pullback as Pullback
from ._pullback import floating as floating
from ._pullback import merge as merge
from ._pullback import pullback as pullback
from ._split import Split as Split
from ._split import split as split

__all__ = [
    "OFFLOADED",
    "POLICIES",
    "TENSORS",
    "Fission",
    "Model",
    "Place",
    "Program",
    "Pullback",
    "Remat",
    "Split",
    "Sums",
    "accumulate",
    "add_gradients",
    "at",
    "check_offload",
    "fission",
    "floating",
    "fold",
    "joined",
    "keep",
    "merge",
    "program",
    "pullback",
    "recompute",
    "remat_by_name",
    "split",
    "total",
    "unpipelined",
    "vary_as",
]
