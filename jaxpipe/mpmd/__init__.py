"""Pipelines of many programs: every group of devices runs its own, and they hand on arrays.

The names are JaxPP's where it has them.
"""

from ._array import MpmdArray as MpmdArray
from ._array import MpmdMesh as MpmdMesh
from ._array import MpmdSharding as MpmdSharding
from ._engine import mpmd_value_and_grad as mpmd_value_and_grad
from ._jaxpp_schedules import DualPipeV as DualPipeV
from ._jaxpp_schedules import Eager1F1B as Eager1F1B
from ._jaxpp_schedules import GPipe as GPipe
from ._jaxpp_schedules import Interleaved1F1B as Interleaved1F1B
from ._jaxpp_schedules import InterleavedGPipe as InterleavedGPipe
from ._jaxpp_schedules import KimiK2 as KimiK2
from ._jaxpp_schedules import Std1F1B as Std1F1B
from ._jaxpp_schedules import ZeroBubble as ZeroBubble
from ._jit import Compiled as Compiled
from ._jit import Lowered as Lowered
from ._jit import MpmdFunction as MpmdFunction
from ._jit import Traced as Traced
from ._jit import mpmd_jit_with_loop as mpmd_jit_with_loop
from ._marks import mark_stage_end as mark_stage_end
from ._marks import pipeline_enter_stage as pipeline_enter_stage
from ._reduce import Add as Add
from ._reduce import Concat as Concat
from ._reduce import Max as Max
from ._reduce import treduce as treduce
from ._reduce import treduce_i as treduce_i
