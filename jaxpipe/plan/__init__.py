"""Ahead of time: what a compiled step needs and communicates, without the hardware it is for."""

from ._audit import Audit as Audit
from ._audit import Loop as Loop
from ._audit import Site as Site
from ._audit import Total as Total
from ._audit import audit as audit
from ._audit import total as total
from ._audit import totals as totals
from ._audit import uncounted_loops as uncounted_loops
from ._collectives import KINDS as KINDS
from ._memory import Memory as Memory
from ._memory import memory as memory
from ._report import Report as Report
from ._report import report_json as report_json
from ._report import report_text as report_text
from ._report import versions as versions
from ._topology import tpu_topology as tpu_topology
