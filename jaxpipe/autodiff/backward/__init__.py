"""The backward of a stage as a program of its own or two, and what it stores or recomputes."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._pullback import Pullback as Pullback
    from ._pullback import combine as combine
    from ._pullback import floating as floating
    from ._pullback import pullback as pullback
    from ._rematerialization import OFFLOADED as OFFLOADED
    from ._rematerialization import POLICIES as POLICIES
    from ._rematerialization import SUM_OVER_CHANNELS as SUM_OVER_CHANNELS
    from ._rematerialization import SUM_OVER_DEVICES as SUM_OVER_DEVICES
    from ._rematerialization import TENSORS as TENSORS
    from ._rematerialization import Location as Location
    from ._rematerialization import Remat as Remat
    from ._rematerialization import apart as apart
    from ._rematerialization import check_offload as check_offload
    from ._rematerialization import keep as keep
    from ._rematerialization import recompute as recompute
    from ._rematerialization import remat_by_name as remat_by_name
    from ._rematerialization import saved_names as saved_names
    from ._split_backward import SplitBackward as SplitBackward
    from ._split_backward import split_backward as split_backward
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
