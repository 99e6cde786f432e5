"""MPMD pipelines: every group of devices runs its own programs, and groups send each other arrays.

Functions and classes that JaxPP also has keep JaxPP's names; `jaxpipe.mpmd.jaxpp` has all of
JaxPP's API, and `jaxpipe.mpmd.NAME` finds each of its names too. `jaxpipe.mpmd.profiling` measures
the tasks of a step.
"""

import importlib
import typing

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

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Returns what `jaxpipe.mpmd.jaxpp` has under a name, for scripts written for JaxPP."""
        if not name.startswith("_"):
            jaxpp = importlib.import_module(f"{__name__}.jaxpp")
            if hasattr(jaxpp, name):
                return getattr(jaxpp, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
