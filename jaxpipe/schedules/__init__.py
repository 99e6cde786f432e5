"""Pipeline schedules: the order of actions on every rank, checked, timed and drawn, without JAX.

Sub-packages hold the parts: `language` (actions, schedules, dependencies), `builders` (a family of
schedules a file), `analysis` (time, memory, search), `lock_step` (schedules on a grid of ticks) and
`io` (text, CSV, SVG, Perfetto).
"""

import typing

from .. import _lazy
from .io import _svg as _svg  # registers how schedules and timelines are drawn

if typing.TYPE_CHECKING:
    from .analysis._measure import activation_bytes as activation_bytes
    from .analysis._measure import bubble_fraction as bubble_fraction
    from .analysis._measure import makespan as makespan
    from .analysis._measure import peak_activations as peak_activations
    from .analysis._simulate import Costs as Costs
    from .analysis._simulate import Timeline as Timeline
    from .analysis._simulate import simulate as simulate
    from .analysis.search._search import search as search
    from .builders._registry import FAMILIES as FAMILIES
    from .builders._registry import build as build
    from .io._csv import from_csv as from_csv
    from .io._csv import read_csv as read_csv
    from .io._csv import to_csv as to_csv
    from .io._csv import write_csv as write_csv
    from .io._perfetto import to_perfetto as to_perfetto
    from .io._svg import to_svg as to_svg
    from .io._text import to_text as to_text
    from .language._action import Action as Action
    from .language._action import FusedPair as FusedPair
    from .language._action import Op as Op
    from .language._check import check as check
    from .language._dependencies import ScheduleError as ScheduleError
    from .language._schedule import Schedule as Schedule
    from .language._schedule import num_ranks as num_ranks
    from .language._schedule import parse as parse
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
