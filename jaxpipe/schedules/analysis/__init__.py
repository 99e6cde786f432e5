"""Time and memory of a schedule: simulation, measures, bounds, and search for better orders."""

from ._measure import busy_times as busy_times
from ._measure import parallelogram_bubble as parallelogram_bubble
from ._measure import rectangular_bubble as rectangular_bubble
from ._simulate import TimedStep as TimedStep
from ._simulate import duration as duration
