"""Reads the memory that a compiled program needs on each device."""

from dataclasses import dataclass
from typing import Any

_HOST_PARTS = "argument", "output", "temp"


@dataclass(frozen=True)
class Memory:
    """The memory of a compiled program in bytes per device."""

    argument_bytes: int  # its arguments: state and batch
    output_bytes: int
    alias_bytes: int  # the part of the results that reuses the buffers of donated arguments
    temp_bytes: int
    peak_bytes: int  # the most that is allocated at one time
    host_bytes: int = 0  # what the device keeps in its host's memory


def memory(compiled: Any, platform: str) -> Memory:
    """Returns the memory that a compiled program needs on each device.

    Args:
        compiled: A `jax.stages.Compiled`, of any number of devices.
        platform: The platform of its devices: `tpu`, `gpu` or `cpu`.

    Returns:
        Bytes per device.

    Raises:
        ValueError: If the backend has no memory analysis.

    Example:
        >>> import jax
        >>> x = jax.ShapeDtypeStruct((1024,), "float32")
        >>> compiled = jax.jit(lambda x: x * 2).lower(x).compile()
        >>> memory(compiled, "cpu").argument_bytes
        4096
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("`compiled` has no memory analysis: its backend does not make one.")
    argument, output = stats.argument_size_in_bytes, stats.output_size_in_bytes
    alias, temp = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    host = sum(getattr(stats, f"host_{part}_size_in_bytes", 0) for part in _HOST_PARTS)
    allocated = argument + output - alias + temp
    if platform == "cpu" or not peak:  # the peak of XLA:CPU leaves out temporary buffers
        peak = allocated
    elif host:  # that of XLA:TPU counts the host's memory too (libtpu 0.0.48.1)
        peak = min(peak, allocated)
    return Memory(
        argument_bytes=argument,
        output_bytes=output,
        alias_bytes=alias,
        temp_bytes=temp,
        peak_bytes=peak,
        host_bytes=host,
    )
