"""Processes, signals, folders and files of a run."""

from ._reading import is_folder as is_folder
from ._reading import list_names as list_names
from ._run_lock import LOCK_FILE as LOCK_FILE
from ._run_lock import locked_run_folder as locked_run_folder
from ._step_watch import FIRST_SECONDS as FIRST_SECONDS
from ._step_watch import LOST_SECONDS as LOST_SECONDS
from ._step_watch import Position as Position
from ._step_watch import ProcessLedger as ProcessLedger
from ._step_watch import StepWatch as StepWatch
from ._step_watch import may_be_caused_by_peer as may_be_caused_by_peer
from ._stop import RunError as RunError
from ._stop import StopRequests as StopRequests
from ._stop import TerminatedError as TerminatedError
from ._stop import bad_step_reason as bad_step_reason
from ._stop import check_step as check_step
