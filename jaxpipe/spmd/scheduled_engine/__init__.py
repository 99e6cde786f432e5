"""Engine that runs any schedule, forward and backward, in one loop over ticks."""

from ._engine import scheduled_value as scheduled_value
from ._engine import scheduled_value_and_grad as scheduled_value_and_grad
