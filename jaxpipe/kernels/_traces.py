"""What `attention` is told of the trace that it is part of."""

from contextlib import AbstractContextManager
from typing import Any

import jax

# Contexts that JAX keeps traces apart by: a function of the user may be jitted.
_is_read: Any = jax.make_user_context(False)
_vmap_axes: Any = jax.make_user_context(())


def trace_to_read() -> AbstractContextManager[None]:
    """Traces attention as its formula, for programs that are read and never run.

    What a kernel computes cannot be read: how it treats rows, or its operations.

    Returns:
        The context of the trace.
    """
    return _is_read(True)


def is_trace_to_read() -> bool:
    """Returns whether the trace is read and never run."""
    return _is_read.value


def vmap_over_devices(axes: tuple[str, ...]) -> AbstractContextManager[None]:
    """Says that what is traced is under a `jax.vmap`, of an entry for every device of these axes.

    Kernels run on the shards of devices, which `jax.vmap` alone would give all entries.

    Args:
        axes: The axes of the mesh.

    Returns:
        The context of the trace.
    """
    return _vmap_axes(axes)


def axes_of_vmap() -> tuple[str, ...]:
    """Returns the axes over whose devices a surrounding `jax.vmap` goes; () if there is none."""
    return _vmap_axes.value
