"""Judges a run by its record: its status, and what in it deserves attention."""

from ._findings import Finding as Finding
from ._findings import Status as Status
from ._findings import findings as findings
from ._findings import spikes as spikes
from ._findings import status as status
