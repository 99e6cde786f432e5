"""The time of a step by arithmetic: the model's work, and what engines do beside it."""

from ._step_time import PredictedTime as PredictedTime
from ._step_time import least_seconds as least_seconds
from ._step_time import rough_seconds as rough_seconds
from ._step_time import step_time as step_time
