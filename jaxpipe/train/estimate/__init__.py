"""Memory and time of a run, by arithmetic."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._memory_estimate import estimate_memory as estimate_memory
    from ._planned_model import state_bytes as state_bytes
    from ._step_metrics import memory_metrics as memory_metrics
    from ._step_metrics import peak_tflops as peak_tflops
    from ._step_metrics import speed_metrics as speed_metrics
    from ._step_metrics import step_work as step_work
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
