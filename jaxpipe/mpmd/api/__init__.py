"""The user interface: meshes, arrays, and compiled functions with pipelined loops."""

from .._engine import mpmd_value as mpmd_value
from .._engine import mpmd_value_and_grad as mpmd_value_and_grad
from ..ir._marks import is_tracing as is_tracing
from ._base_schedule import FusedTask as FusedTask
from ._base_schedule import as_schedule as as_schedule
from ._base_schedule import tasks_of as tasks_of
from ._jit import sharding_in_group as sharding_in_group
