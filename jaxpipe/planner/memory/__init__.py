"""The sizes of a model on a device, in bytes, of which engines say the memory of a step."""

from ._sizes import peak_memory as peak_memory
from ._sizes import step_counts as step_counts
from ._sizes import step_sizes as step_sizes
