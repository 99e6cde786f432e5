"""Judges a run by its record: its status, and what in it deserves attention."""

from ._findings import Finding as Finding
from ._findings import findings as findings
from ._findings import spikes as spikes
from ._status import Status as Status
from ._status import status as status
