"""Pipelines of many programs: every group of devices runs its own, and they hand on arrays.

The names are JaxPP's where it has them.
"""

from .. import __version__ as __version__
from ._across import cross_mpmd_all_reduce as cross_mpmd_all_reduce
from ._across import cross_mpmd_stack as cross_mpmd_stack
from ._across import place_with as place_with
from ._array import MpmdArray as MpmdArray
from ._compiled import Compiled as Compiled
from ._compiled import Lowered as Lowered
from ._compiled import Traced as Traced
from ._engine import mpmd_value as mpmd_value
from ._engine import mpmd_value_and_grad as mpmd_value_and_grad
from ._jaxpp_schedules import BaseSchedule as BaseSchedule
from ._jaxpp_schedules import DualPipeV as DualPipeV
from ._jaxpp_schedules import Eager1F1B as Eager1F1B
from ._jaxpp_schedules import GPipe as GPipe
from ._jaxpp_schedules import Interleaved1F1B as Interleaved1F1B
from ._jaxpp_schedules import InterleavedGPipe as InterleavedGPipe
from ._jaxpp_schedules import KimiK2 as KimiK2
from ._jaxpp_schedules import NamedSchedule as NamedSchedule
from ._jaxpp_schedules import Std1F1B as Std1F1B
from ._jaxpp_schedules import ZeroBubble as ZeroBubble
from ._jit import MpmdFunction as MpmdFunction
from ._jit import mpmd_jit_by_yield as mpmd_jit_by_yield
from ._jit import mpmd_jit_with_loop as mpmd_jit_with_loop
from ._marks import mark_stage_end as mark_stage_end
from ._marks import pipeline_enter_stage as pipeline_enter_stage
from ._measured import collect_task_times_ms as collect_task_times_ms
from ._measured import timed_step as timed_step
from ._measured import to_timeline as to_timeline
from ._mesh import MpmdMesh as MpmdMesh
from ._mesh import MpmdSharding as MpmdSharding
from ._profile import annotated as annotated
from ._profile import trace_step as trace_step
from ._reduce import Add as Add
from ._reduce import Concat as Concat
from ._reduce import Max as Max
from ._reduce import Op as Op
from ._reduce import treduce as treduce
from ._reduce import treduce_i as treduce_i
from ._reshard import mpmd_to_spmd_reshard as mpmd_to_spmd_reshard
from ._reshard import spmd_to_mpmd_reshard as spmd_to_mpmd_reshard
from ._watchdog import MpmdError as MpmdError
