"""A run as one page of HTML that needs nothing else."""

from ._memory import Compiled as Compiled
from ._page import render as render
from ._run import Run as Run
from ._run import num_devices as num_devices
from ._run import read_run as read_run
