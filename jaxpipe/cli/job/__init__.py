"""The processes of one job: the launcher that starts them, and how they join and end."""

from ..._exit import EXIT_CODE as EXIT_CODE
from ._join import ADDRESS as ADDRESS
from ._join import NUM_PROCESSES as NUM_PROCESSES
from ._join import PROCESS as PROCESS
from ._join import bind_address as bind_address
from ._join import join_processes as join_processes
from ._join import leaving_on_error as leaving_on_error
from ._supervise import Job as Job
from ._supervise import Lifelines as Lifelines
from ._supervise import first_failure as first_failure
from ._supervise import follow_launcher as follow_launcher
from ._supervise import started_processes as started_processes
