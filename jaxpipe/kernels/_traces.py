"""What `attention` is told of the trace that it is part of."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

# Contexts that JAX keeps traces apart by: a function of the user may be jitted.
_read_for: Any = jax.make_user_context("")
_widest_head: Any = jax.make_user_context(None)
_vmap_axes: Any = jax.make_user_context(())


def trace_to_read(*, tokens: bool = False) -> AbstractContextManager[None]:
    """Traces attention as its formula, for programs that are read and never run.

    What a kernel computes cannot be read: how it treats rows, or its operations.

    Args:
        tokens: Whether the question is what functions do with tokens, apart from attention. It is
            then traced as a function of each token.

    Returns:
        The context of the trace.
    """
    return _read_for("tokens" if tokens else "rows")


@contextmanager
def trace_for(platform: str, widest_head: int | None = None) -> Generator[None]:
    """Traces for devices of a platform that are absent, to count work and memory of the program.

    Attention is the kernel that they would run, as one equation (`ATTENTION`).

    Args:
        platform: "tpu", "gpu" or "cpu".
        widest_head: The most channels of a head that cuDNN has there; None on other devices.

    Returns:
        A context manager, in which functions are traced for these devices.
    """
    device = jax.sharding.AbstractDevice(platform, None, platform)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with _read_for("work"), _widest_head(widest_head), jax.sharding.use_abstract_mesh(mesh):
        yield


def for_heads_up_to(channels: int | None) -> AbstractContextManager[None]:
    """Selects kernels for GPUs that are absent.

    Args:
        channels: The most channels of a head that their cuDNN has; None if they are no GPUs.

    Returns:
        The context.
    """
    return _widest_head(channels)


def trace_is_read_for() -> str:
    """Returns the purpose of a trace, "rows", "tokens" or "work"; "" if it is run."""
    return _read_for.value


def traced_widest_head() -> int | None:
    """Returns the width of cuDNN's heads that `trace_for` was given, or None."""
    return _widest_head.value


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
