"""Offers JaxPP's API under its names, for scripts that were written with `jaxpp.api`.

In such a script `import jaxpipe.mpmd.jaxpp as jaxpp` replaces `import jaxpp.api as jaxpp`.
"""

from ... import __version__ as __version__
from ...mpmd.api import BaseSchedule as BaseSchedule
from ...mpmd.api import MpmdArray as MpmdArray
from ...mpmd.api import MpmdMesh as MpmdMesh
from ...mpmd.api import MpmdSharding as MpmdSharding
from ...mpmd.api import add_multi_p as add_multi_p
from ...mpmd.api import cross_mpmd_all_reduce as cross_mpmd_all_reduce
from ...mpmd.api import cross_mpmd_stack as cross_mpmd_stack
from ...mpmd.api import gather_multi_p as gather_multi_p
from ...mpmd.api import mpmd_jit_by_yield as mpmd_jit_by_yield
from ...mpmd.api import mpmd_jit_with_loop as mpmd_jit_with_loop
from ...mpmd.api import mpmd_to_spmd_reshard as mpmd_to_spmd_reshard
from ...mpmd.api import place_with as place_with
from ...mpmd.api import place_with_p as place_with_p
from ...mpmd.api import spmd_to_mpmd_reshard as spmd_to_mpmd_reshard
from ...mpmd.ir import Add as Add
from ...mpmd.ir import Concat as Concat
from ...mpmd.ir import Max as Max
from ...mpmd.ir import mark_stage_end as mark_stage_end
from ...mpmd.ir import pipeline_enter_stage as pipeline_enter_stage
from ...mpmd.ir import treduce as treduce
from ...mpmd.ir import treduce_i as treduce_i
from ...mpmd.profiling import collect_task_times_ms as collect_task_times_ms
from ._schedules import DualPipeV as DualPipeV
from ._schedules import Eager1F1B as Eager1F1B
from ._schedules import GPipe as GPipe
from ._schedules import Interleaved1F1B as Interleaved1F1B
from ._schedules import InterleavedBaseSchedule as InterleavedBaseSchedule
from ._schedules import InterleavedGPipe as InterleavedGPipe
from ._schedules import KimiK2 as KimiK2
from ._schedules import NamedSchedule as NamedSchedule
from ._schedules import SequentialMicrobatchesIterator as SequentialMicrobatchesIterator
from ._schedules import Std1F1B as Std1F1B
from ._schedules import ZBSequentialMicrobatchesIterator as ZBSequentialMicrobatchesIterator
from ._schedules import ZeroBubble as ZeroBubble
