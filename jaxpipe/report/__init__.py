"""Shows a run as one HTML page that loads nothing else."""

from ._memory import CompiledMemory as CompiledMemory
from ._page import render as render
from .record import read_run as read_run
