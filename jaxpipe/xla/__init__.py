"""Finds out what a compiled step needs and communicates, without the hardware it is for."""

import typing

from .. import _lazy

if typing.TYPE_CHECKING:
    from ._topology import compile_only_devices as compile_only_devices
    from ._topology import topology_devices as topology_devices
    from .compile_report import memory as memory
    from .hlo import audit as audit
    from .hlo import totals as totals
    from .hlo import uncounted_loops as uncounted_loops
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
