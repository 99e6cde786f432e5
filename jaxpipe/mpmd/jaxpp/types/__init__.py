"""The names of `jaxpp.types` that scripts import."""

from ...api import MpmdSharding as MpmdSharding
from ...api import TaskType as TaskType
