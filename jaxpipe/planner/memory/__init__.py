"""The memory of a device during a step, by kind, by arithmetic."""

from ._engine_memory import PeakMemory as PeakMemory
from ._engine_memory import memory as memory
from ._engine_memory import stage_residual_bytes as stage_residual_bytes
from ._engine_memory import wgrad_bytes as wgrad_bytes
from ._experts import expert_chunks as expert_chunks
