"""Emulates CPU devices; no other module sets XLA's flags for them."""

import gc
import os
from collections.abc import Mapping

from ..._threads import num_threads_for

# Emulated devices outnumber cores. XLA:CPU's concurrency-optimised scheduler then starts
# collectives in an order that can starve one of its participants, and 40 s (the default) is not
# long for a collective whose participants share two cores.
_FLAGS = {
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "xla_cpu_collective_call_terminate_timeout_seconds": "600",
}


def emulation_environment(num_devices: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns `XLA_FLAGS` and `NPROC` for emulated devices; flags of `environment` win."""
    flags = {"xla_force_host_platform_device_count": str(num_devices), **_FLAGS}
    old = environment.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in flags.items() if name not in old]
    threads = environment.get("NPROC", str(num_threads_for(num_devices)))
    return {"XLA_FLAGS": " ".join([old, *added]).strip(), "NPROC": threads}


def emulate_devices(num_devices: int) -> None:
    """Makes this process see `num_devices` CPU devices instead of one.

    Call it before JAX first uses a device, if possible: XLA's other flags for emulated devices,
    such as longer timeouts of collectives, are read only then. Later, JAX starts again if its
    devices are CPUs of one process and no array is left; what was made for the devices before,
    such as meshes, cannot be used any more. Other flags already in `XLA_FLAGS` win.

    Args:
        num_devices: The number of emulated devices.

    Raises:
        ValueError: If JAX has used devices before and cannot start again, or `XLA_FLAGS` asks for
            another number.

    Example:
        >>> import jax
        >>> emulate_devices(8)
        >>> jax.device_count()
        8
    """
    environment = dict(os.environ)
    is_given = "xla_force_host_platform_device_count" in environment.get("XLA_FLAGS", "")
    os.environ |= emulation_environment(num_devices, environment)
    import jax  # not at the top: commands that need no devices start faster without it

    jax.config.update("jax_platforms", "cpu")
    seen = len(jax.local_devices(backend="cpu"))
    if seen != num_devices and not is_given and _can_start_again():
        from jax.extend import backend

        backend.clear_backends()
        jax.config.update("jax_num_cpu_devices", num_devices)
        seen = len(jax.local_devices(backend="cpu"))
    if seen != num_devices:
        for name in ("XLA_FLAGS", "NPROC"):
            os.environ.pop(name, None)
            os.environ |= {name: environment[name]} if name in environment else {}
        raise ValueError(
            f"`emulate_devices` is {num_devices}, but JAX sees {seen} CPU devices: it has arrays "
            "or other devices already, or `XLA_FLAGS` asks for another number. Emulate before "
            "anything uses JAX, and remove `--xla_force_host_platform_device_count` from "
            "`XLA_FLAGS`."
        )


def _can_start_again() -> bool:
    """Returns whether nothing is lost if JAX forgets its devices."""
    import jax

    if jax.process_count() > 1 or jax.default_backend() != "cpu":
        return False
    gc.collect()
    return not jax.live_arrays()
