"""Reads the text of a compiled program: its collectives, and how often its loops execute them."""

from ._audit import Audit as Audit
from ._audit import CollectiveSite as CollectiveSite
from ._audit import CollectiveTotals as CollectiveTotals
from ._audit import WhileLoop as WhileLoop
from ._audit import add_up as add_up
from ._audit import audit as audit
from ._audit import totals as totals
from ._audit import uncounted_loops as uncounted_loops
from ._collectives import device_groups as device_groups
from ._collectives import gpu_hosts as gpu_hosts
