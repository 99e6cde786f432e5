"""Schedules as text, CSV, pictures and traces."""

from ._text import time_unit as time_unit
