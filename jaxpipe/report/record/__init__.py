"""Reads the folder of a run: its settings, its metrics over steps, its starts and checkpoints."""

from ._run import RunRecord as RunRecord
from ._run import SavedStep as SavedStep
from ._run import read_run as read_run
from ._series import MAX_POINTS as MAX_POINTS
from ._series import Points as Points
from ._series import Series as Series
from ._series import points as points
