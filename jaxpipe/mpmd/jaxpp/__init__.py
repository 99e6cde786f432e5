"""Offers JaxPP's API under its names, for scripts that were written with `jaxpp.api`.

In such a script `import jaxpipe.mpmd.jaxpp as jaxpp` replaces `import jaxpp.api as jaxpp`.
"""

from ... import __version__ as __version__
from ..api._across import cross_mpmd_all_reduce as cross_mpmd_all_reduce
from ..api._across import cross_mpmd_stack as cross_mpmd_stack
from ..api._across import place_with as place_with
from ..api._array import MpmdArray as MpmdArray
from ..api._base_schedule import BaseSchedule as BaseSchedule
from ..api._jit import mpmd_jit_by_yield as mpmd_jit_by_yield
from ..api._jit import mpmd_jit_with_loop as mpmd_jit_with_loop
from ..api._mesh import MpmdMesh as MpmdMesh
from ..api._mesh import MpmdSharding as MpmdSharding
from ..api._reshard import mpmd_to_spmd_reshard as mpmd_to_spmd_reshard
from ..api._reshard import spmd_to_mpmd_reshard as spmd_to_mpmd_reshard
from ..ir._marks import mark_stage_end as mark_stage_end
from ..ir._marks import pipeline_enter_stage as pipeline_enter_stage
from ..ir._reduce import Add as Add
from ..ir._reduce import Concat as Concat
from ..ir._reduce import Max as Max
from ..ir._reduce import treduce as treduce
from ..ir._reduce import treduce_i as treduce_i
from ..profiling._measured import collect_task_times_ms as collect_task_times_ms
from ._schedules import DualPipeV as DualPipeV
from ._schedules import Eager1F1B as Eager1F1B
from ._schedules import GPipe as GPipe
from ._schedules import Interleaved1F1B as Interleaved1F1B
from ._schedules import InterleavedGPipe as InterleavedGPipe
from ._schedules import KimiK2 as KimiK2
from ._schedules import NamedSchedule as NamedSchedule
from ._schedules import Std1F1B as Std1F1B
from ._schedules import ZeroBubble as ZeroBubble
