"""Engine that runs any schedule, forward and backward, in loops over ticks."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._engine import scheduled_value as scheduled_value
    from ._engine import scheduled_value_and_grad as scheduled_value_and_grad
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
