"""Offers schedules and equations under JaxPP's names."""

from ._schedules import FusedTask as FusedTask
from ._schedules import as_schedule as as_schedule
from ._schedules import tasks_of as tasks_of
