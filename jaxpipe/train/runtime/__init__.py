"""Processes, signals, folders and files of a run."""

from ._stop import RunError as RunError
from ._stop import TerminatedError as TerminatedError
from ._stop import bad_step_reason as bad_step_reason
