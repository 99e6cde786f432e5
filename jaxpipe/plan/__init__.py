"""Finds out what a compiled step needs and communicates, without the hardware it is for."""

from ._audit import audit as audit
from ._audit import totals as totals
from ._audit import uncounted_loops as uncounted_loops
from ._memory import memory as memory
from ._topology import tpu_topology as tpu_topology
