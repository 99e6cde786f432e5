"""What all engines share: the contract of a model, and the unpipelined reference."""

from . import _unpipelined as unpipelined
from ._model import Model as Model
from ._model import Sums as Sums
from ._model import at as at
from ._model import fold as fold
from ._model import joined as joined
from ._model import total as total
from ._model import with_aux as with_aux
from ._pullback import Pullback as Pullback
from ._pullback import floating as floating
from ._pullback import merge as merge
from ._pullback import pullback as pullback
from ._rematerialization import OFFLOADED as OFFLOADED
from ._rematerialization import POLICIES as POLICIES
from ._rematerialization import TENSORS as TENSORS
from ._rematerialization import Place as Place
from ._rematerialization import Remat as Remat
from ._rematerialization import check_offload as check_offload
from ._rematerialization import keep as keep
from ._rematerialization import kept_names as kept_names
from ._rematerialization import recompute as recompute
from ._rematerialization import remat_by_name as remat_by_name
from ._split_backward import Split as Split
from ._split_backward import split as split

__all__ = [
    "OFFLOADED",
    "POLICIES",
    "TENSORS",
    "Model",
    "Place",
    "Pullback",
    "Remat",
    "Split",
    "Sums",
    "at",
    "check_offload",
    "floating",
    "fold",
    "joined",
    "keep",
    "merge",
    "pullback",
    "recompute",
    "remat_by_name",
    "split",
    "total",
    "unpipelined",
    "with_aux",
]
