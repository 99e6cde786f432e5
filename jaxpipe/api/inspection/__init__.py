"""What a pipeline says about itself: whether it is exact, and what it needs."""

import typing

from ... import _lazy
from .._layouts import counts_by_cost as counts_by_cost
from .._layouts import one_of_each_kind as one_of_each_kind
from .._packed_x import layer_with_weights as layer_with_weights
from .._packed_x import x_of_layers as x_of_layers
from .._params import NumLayers as NumLayers
from .._params import check_groups as check_groups
from .._specs import param_specs as param_specs

if typing.TYPE_CHECKING:
    from ._check import Reference as Reference
    from ._check import compared as compared
    from ._check import reference_result as reference_result
    from ._check import require as require
    from ._check import run as run
    from ._comparison import TOLERANCE as TOLERANCE
    from ._comparison import CheckedStep as CheckedStep
    from ._comparison import Comparison as Comparison
    from ._inspected import InspectedModel as InspectedModel
    from ._memory import MemoryTable as MemoryTable
    from ._memory import residual_bytes as residual_bytes
    from ._memory import wgrad_residual_bytes as wgrad_residual_bytes
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
