"""Estimates the time of a step on devices that are not there: on TPUs by the compiler's figures."""

from ._instruction_costs import COLLECTIVE as COLLECTIVE
from ._instruction_costs import KERNEL_EFFICIENCY as KERNEL_EFFICIENCY
from ._instruction_costs import InstructionCost as InstructionCost
from ._play import instruction_costs as instruction_costs
from ._rates import DeviceRates as DeviceRates
from ._rates import GpuRates as GpuRates
from ._rates import device_rates as device_rates
from ._rates import transfer_seconds as transfer_seconds
from ._step_time import StepTime as StepTime
from ._step_time import estimated_time as estimated_time
from ._step_time import step_time as step_time
