"""The user interface: meshes, arrays, and compiled functions with pipelined loops."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from .._engine import mpmd_value as mpmd_value
    from .._engine import mpmd_value_and_grad as mpmd_value_and_grad
    from ..ir._marks import is_tracing as is_tracing
    from ._across import add_multi_p as add_multi_p
    from ._across import cross_mpmd_all_reduce as cross_mpmd_all_reduce
    from ._across import cross_mpmd_stack as cross_mpmd_stack
    from ._across import gather_multi_p as gather_multi_p
    from ._across import place_with as place_with
    from ._across import place_with_p as place_with_p
    from ._array import MpmdArray as MpmdArray
    from ._array import init_on_ranks as init_on_ranks
    from ._in_group import sharding_in_group as sharding_in_group
    from ._jit import mpmd_jit_by_yield as mpmd_jit_by_yield
    from ._jit import mpmd_jit_with_loop as mpmd_jit_with_loop
    from ._mesh import MpmdMesh as MpmdMesh
    from ._mesh import MpmdSharding as MpmdSharding
    from ._reshard import mpmd_to_spmd_reshard as mpmd_to_spmd_reshard
    from ._reshard import spmd_to_mpmd_reshard as spmd_to_mpmd_reshard
    from ._tasks import BaseSchedule as BaseSchedule
    from ._tasks import FusedTask as FusedTask
    from ._tasks import ScheduleTasks as ScheduleTasks
    from ._tasks import Task as Task
    from ._tasks import TaskType as TaskType
    from ._tasks import as_schedule as as_schedule
    from ._tasks import require_positive as require_positive
    from ._tasks import schedule_of as schedule_of
    from ._tasks import tasks_of as tasks_of
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
