"""Measures the times of tasks, and compares them with the times that a schedule predicts."""

from ._profile import annotated as annotated
from ._profile import collect_task_times_ms as collect_task_times_ms
from ._profile import timed_step as timed_step
from ._profile import to_timeline as to_timeline
from ._profile import trace_step as trace_step
