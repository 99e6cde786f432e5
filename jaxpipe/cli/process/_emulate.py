"""Emulates CPU devices; no other module sets XLA's flags for them."""

import gc
import os

# Emulated devices outnumber cores. XLA:CPU's concurrency-optimised scheduler then starts
# collectives in an order that can starve one of its participants, and 40 s (the default) is not
# long for a collective whose participants share two cores.
_FLAGS = {
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "xla_cpu_collective_call_terminate_timeout_seconds": "600",
}


def emulation_flags(num_devices: int, old: str) -> str:
    """Returns `XLA_FLAGS` for emulated devices, of which those of `old` win."""
    flags = {"xla_force_host_platform_device_count": str(num_devices), **_FLAGS}
    added = [f"--{name}={value}" for name, value in flags.items() if name not in old]
    return " ".join([old, *added]).strip()


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
    old = os.environ.get("XLA_FLAGS")
    is_given = "xla_force_host_platform_device_count" in (old or "")
    os.environ["XLA_FLAGS"] = emulation_flags(num_devices, old or "")
    import jax  # not at the top: commands that need no devices start faster without it

    jax.config.update("jax_platforms", "cpu")
    seen = len(jax.local_devices(backend="cpu"))
    if seen != num_devices and not is_given and _can_start_again():
        from jax.extend import backend

        backend.clear_backends()
        jax.config.update("jax_num_cpu_devices", num_devices)
        seen = len(jax.local_devices(backend="cpu"))
    if seen != num_devices:
        if old is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = old
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
