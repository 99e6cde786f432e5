"""What all engines share: the contract of a model, and the unpipelined reference."""

from . import _unpipelined as unpipelined
from ._model import Model as Model
from ._model import Sums as Sums
from ._model import at as at
from ._model import fold as fold
from ._model import joined as joined
from ._model import total as total

__all__ = ["Model", "Sums", "at", "fold", "joined", "total", "unpipelined"]
