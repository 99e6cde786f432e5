"""MPMD pipelines: every group of devices runs its own programs, and groups send each other arrays.

Functions and classes that JaxPP also has keep JaxPP's names.
"""

from .. import __version__ as __version__
from ._engine import mpmd_value as mpmd_value
from ._engine import mpmd_value_and_grad as mpmd_value_and_grad
from .api._across import cross_mpmd_all_reduce as cross_mpmd_all_reduce
from .api._across import cross_mpmd_stack as cross_mpmd_stack
from .api._across import place_with as place_with
from .api._array import MpmdArray as MpmdArray
from .api._jit import MpmdFunction as MpmdFunction
from .api._jit import mpmd_jit_by_yield as mpmd_jit_by_yield
from .api._jit import mpmd_jit_with_loop as mpmd_jit_with_loop
from .api._mesh import MpmdMesh as MpmdMesh
from .api._mesh import MpmdSharding as MpmdSharding
from .api._reshard import mpmd_to_spmd_reshard as mpmd_to_spmd_reshard
from .api._reshard import spmd_to_mpmd_reshard as spmd_to_mpmd_reshard
from .api._stages import Compiled as Compiled
from .api._stages import Lowered as Lowered
from .api._stages import Traced as Traced
from .ir._marks import mark_stage_end as mark_stage_end
from .ir._marks import pipeline_enter_stage as pipeline_enter_stage
from .ir._reduce import Add as Add
from .ir._reduce import Concat as Concat
from .ir._reduce import Max as Max
from .ir._reduce import ReduceOp as ReduceOp
from .ir._reduce import treduce as treduce
from .ir._reduce import treduce_i as treduce_i
from .jaxpp._schedules import BaseSchedule as BaseSchedule
from .jaxpp._schedules import DualPipeV as DualPipeV
from .jaxpp._schedules import Eager1F1B as Eager1F1B
from .jaxpp._schedules import GPipe as GPipe
from .jaxpp._schedules import Interleaved1F1B as Interleaved1F1B
from .jaxpp._schedules import InterleavedGPipe as InterleavedGPipe
from .jaxpp._schedules import KimiK2 as KimiK2
from .jaxpp._schedules import NamedSchedule as NamedSchedule
from .jaxpp._schedules import Std1F1B as Std1F1B
from .jaxpp._schedules import ZeroBubble as ZeroBubble
from .profiling._measured import collect_task_times_ms as collect_task_times_ms
from .profiling._measured import timed_step as timed_step
from .profiling._measured import to_timeline as to_timeline
from .profiling._profile import annotated as annotated
from .profiling._profile import trace_step as trace_step
from .runtime._watchdog import MpmdError as MpmdError
