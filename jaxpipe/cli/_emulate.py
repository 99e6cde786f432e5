"""Emulated CPU devices: the one place that sets XLA's flags for them."""

import os
from collections.abc import Mapping

# Emulated devices outnumber cores. XLA:CPU's concurrency-optimised scheduler then starts
# collectives in an order that can starve one of its participants, and 40 s (the default) is not
# long for a collective whose participants share two cores.
_FLAGS = {
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "xla_cpu_collective_call_terminate_timeout_seconds": "600",
}


# A program of several devices whose input has come on one of them waits in a thread of XLA's pool
# for the others. With as few threads as cores all may wait for what needs a thread to arrive.
_THREADS = 64


def emulation(num_devices: int, given: Mapping[str, str]) -> dict[str, str]:
    """What a process's environment needs for that many devices, besides what is `given` in it."""
    flags = {"xla_force_host_platform_device_count": str(num_devices), **_FLAGS}
    old = given.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in flags.items() if name not in old]
    threads = given.get("NPROC", str(max(_THREADS, 4 * num_devices)))
    return {"XLA_FLAGS": " ".join([old, *added]).strip(), "NPROC": threads}


def emulate_devices(num_devices: int) -> None:
    """Makes this process see `num_devices` CPU devices instead of one.

    Call it before JAX first touches a device. Other flags already in `XLA_FLAGS` win.

    Raises:
        ValueError: If it is too late, or `XLA_FLAGS` already asks for another number.
    """
    os.environ |= emulation(num_devices, os.environ)
    import jax  # not at the top: commands that need no devices start faster without it

    jax.config.update("jax_platforms", "cpu")
    found = len(jax.local_devices(backend="cpu"))
    if found != num_devices:
        raise ValueError(
            f"`emulate_devices` is {num_devices}, but JAX sees {found} CPU devices: it was in use "
            "before, or `XLA_FLAGS` asks for another number. Emulate before anything uses JAX, and "
            "remove `--xla_force_host_platform_device_count` from `XLA_FLAGS`."
        )
