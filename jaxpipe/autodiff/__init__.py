"""The contract of a model, the unpipelined reference, and what a backward stores or recomputes."""

from . import _unpipelined as unpipelined
from ._model import StagedModel as StagedModel
from ._rematerialization import POLICIES as POLICIES
from ._rematerialization import TENSORS as TENSORS
from ._rematerialization import Remat as Remat
from ._rematerialization import keep as keep
from ._rematerialization import recompute as recompute
from ._rematerialization import remat_by_name as remat_by_name

__all__ = [
    "POLICIES",
    "TENSORS",
    "Remat",
    "StagedModel",
    "keep",
    "recompute",
    "remat_by_name",
    "unpipelined",
]
