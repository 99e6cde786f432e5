"""What all engines share: the contract of a model, and the unpipelined reference."""

from . import _unpipelined as unpipelined
from ._model import Model as Model
from ._model import Sums as Sums
from ._model import at as at
from ._model import fold as fold
from ._model import joined as joined
from ._model import total as total
from ._pullback import Pullback as Pullback
from ._pullback import floating as floating
from ._pullback import merge as merge
from ._pullback import pullback as pullback

__all__ = [
    "Model",
    "Pullback",
    "Sums",
    "at",
    "floating",
    "fold",
    "joined",
    "merge",
    "pullback",
    "total",
    "unpipelined",
]
