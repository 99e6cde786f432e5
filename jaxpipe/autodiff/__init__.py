"""Code that all engines share: the contract of a model, and the unpipelined reference."""

from . import _unpipelined as unpipelined
from ._model import Model as Model
from ._model import Sums as Sums
from ._model import combine_losses as combine_losses
from ._model import fold_in_microbatch as fold_in_microbatch
from ._model import index_leading as index_leading
from ._model import total as total
from ._model import with_aux as with_aux
from ._pullback import Pullback as Pullback
from ._pullback import combine as combine
from ._pullback import floating as floating
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
from ._split_backward import SplitBackward as SplitBackward
from ._split_backward import split_backward as split_backward

__all__ = [
    "OFFLOADED",
    "POLICIES",
    "TENSORS",
    "Model",
    "Place",
    "Pullback",
    "Remat",
    "SplitBackward",
    "Sums",
    "check_offload",
    "combine",
    "combine_losses",
    "floating",
    "fold_in_microbatch",
    "index_leading",
    "keep",
    "pullback",
    "recompute",
    "remat_by_name",
    "split_backward",
    "total",
    "unpipelined",
    "with_aux",
]
