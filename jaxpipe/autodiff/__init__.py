"""The contract of a model, the unpipelined reference, and what a backward stores or recomputes."""

from . import _unpipelined as unpipelined
from .backward import POLICIES as POLICIES
from .backward import TENSORS as TENSORS
from .backward import Remat as Remat
from .backward import keep as keep
from .backward import recompute as recompute
from .backward import remat_by_name as remat_by_name
from .staged_model import StagedModel as StagedModel

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
