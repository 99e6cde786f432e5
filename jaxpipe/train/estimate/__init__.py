"""Memory and time of a run, by arithmetic."""

from ._device_flops import peak_tflops as peak_tflops
from ._device_flops import speed_metrics as speed_metrics
from ._device_flops import step_work as step_work
from ._memory_estimate import estimate_memory as estimate_memory
from ._peak_memory import memory_metrics as memory_metrics
from ._state_bytes import state_bytes as state_bytes
from ._timeline import predicted_timeline as predicted_timeline
