"""MPMD pipelines: every group of devices runs its own programs, and groups send each other arrays.

Functions and classes that JaxPP also has keep JaxPP's names; all of JaxPP's names are here, and
`jaxpipe.mpmd.jaxpp` has these alone. `jaxpipe.mpmd.profiling` measures the tasks of a step.
"""

import typing

from .. import _lazy

if typing.TYPE_CHECKING:
    from ..compat.jaxpp import BaseSchedule as BaseSchedule
    from ..compat.jaxpp import DualPipeV as DualPipeV
    from ..compat.jaxpp import Eager1F1B as Eager1F1B
    from ..compat.jaxpp import GPipe as GPipe
    from ..compat.jaxpp import Interleaved1F1B as Interleaved1F1B
    from ..compat.jaxpp import InterleavedGPipe as InterleavedGPipe
    from ..compat.jaxpp import KimiK2 as KimiK2
    from ..compat.jaxpp import NamedSchedule as NamedSchedule
    from ..compat.jaxpp import Std1F1B as Std1F1B
    from ..compat.jaxpp import ZeroBubble as ZeroBubble
    from ..compat.jaxpp import collect_task_times_ms as collect_task_times_ms
    from ..compat.jaxpp import pipeline_enter_stage as pipeline_enter_stage
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
    from .ir._reduce import Add as Add
    from .ir._reduce import Concat as Concat
    from .ir._reduce import Max as Max
    from .ir._reduce import ReduceOp as ReduceOp
    from .ir._reduce import treduce as treduce
    from .ir._reduce import treduce_i as treduce_i
    from .runtime._watchdog import MpmdError as MpmdError
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
