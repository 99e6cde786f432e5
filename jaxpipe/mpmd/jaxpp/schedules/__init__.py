"""The names of `jaxpp.schedules`, with which schedules of one's own are written."""

from ....compat.jaxpp import DualPipeV as DualPipeV
from ....compat.jaxpp import Eager1F1B as Eager1F1B
from ....compat.jaxpp import GPipe as GPipe
from ....compat.jaxpp import Interleaved1F1B as Interleaved1F1B
from ....compat.jaxpp import InterleavedBaseSchedule as InterleavedBaseSchedule
from ....compat.jaxpp import InterleavedGPipe as InterleavedGPipe
from ....compat.jaxpp import KimiK2 as KimiK2
from ....compat.jaxpp import SequentialMicrobatchesIterator as SequentialMicrobatchesIterator
from ....compat.jaxpp import Std1F1B as Std1F1B
from ....compat.jaxpp import ZBSequentialMicrobatchesIterator as ZBSequentialMicrobatchesIterator
from ....compat.jaxpp import ZeroBubble as ZeroBubble
from ...api import BaseSchedule as BaseSchedule
from ...api import FusedTask as FusedTask
from ...api import ScheduleTasks as ScheduleTasks
from ...api import Task as Task
from ...api import TaskType as TaskType
