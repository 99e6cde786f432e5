"""Lets Orbax measure its deadlines by a clock that nobody sets."""

import sys
import time
from types import ModuleType

# Orbax (0.11.20 to 0.12.8) computes how long it still waits for a write from `time.time()`. If the
# clock of the machine is set meanwhile, a save of a moment has "timed out after 0.00 seconds". It
# cannot be tried again: threads of the first attempt still write, and other processes wait for it.
_MODULES = (
    "orbax.checkpoint._src.checkpointers.async_checkpointer",
    "orbax.checkpoint._src.futures.future",
    "orbax.checkpoint._src.futures.signaling_client",
)
"""Modules of Orbax that compute deadlines by `time.time`."""

_OFFSET = time.time() - time.monotonic()
"""Seconds to the wall clock of this moment: Orbax also subtracts times that others have taken."""


class _SteadyTime(ModuleType):
    """The module `time`, whose `time` only goes forward, one second a second."""

    def __init__(self) -> None:
        super().__init__("time")
        vars(self).update(vars(time))
        self.time = lambda: _OFFSET + time.monotonic()


def use_steady_clock() -> None:
    """Gives the modules of Orbax that compute deadlines a clock that cannot jump."""
    steady = _SteadyTime()
    for name in _MODULES:
        if isinstance(module := sys.modules.get(name), ModuleType) and "time" in vars(module):
            vars(module)["time"] = steady
