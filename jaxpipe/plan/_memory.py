"""What a compiled program needs on each device."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Memory:
    """Bytes per device.

    Attributes:
        argument_bytes: What the program is given: state and batch.
        output_bytes: What it returns.
        alias_bytes: The part of the output that lies in the space of donated arguments.
        temp_bytes: What it needs in between.
        peak_bytes: The most it needs at any moment.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int


def memory(compiled: Any, platform: str) -> Memory:
    """The memory of a `jax.stages.Compiled`, for devices of `platform`: `tpu`, `gpu` or `cpu`.

    Raises:
        ValueError: If the backend does not tell.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("`compiled` has no memory analysis: its backend does not make one.")
    argument, output = stats.argument_size_in_bytes, stats.output_size_in_bytes
    alias, temp = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    if platform == "cpu" or not peak:  # the peak of XLA:CPU leaves out what is temporary
        peak = argument + output - alias + temp
    return Memory(argument, output, alias, temp, peak)
