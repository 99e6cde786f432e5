"""Emulated CPU devices: the one place that sets XLA's flags for them."""

import os

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


def emulate_devices(num_devices: int) -> None:
    """Makes this process see `num_devices` CPU devices instead of one.

    Call it before JAX first touches a device. Other flags already in `XLA_FLAGS` win.

    Raises:
        ValueError: If it is too late, or `XLA_FLAGS` already asks for another number.
    """
    flags = {"xla_force_host_platform_device_count": str(num_devices), **_FLAGS}
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
    os.environ.setdefault("NPROC", str(max(_THREADS, 4 * num_devices)))
    import jax  # not at the top: commands that need no devices start faster without it

    jax.config.update("jax_platforms", "cpu")
    found = len(jax.local_devices(backend="cpu"))
    if found != num_devices:
        raise ValueError(
            f"`emulate_devices` is {num_devices}, but JAX sees {found} CPU devices: it was in use "
            "before, or `XLA_FLAGS` asks for another number. Emulate before anything uses JAX, and "
            "remove `--xla_force_host_platform_device_count` from `XLA_FLAGS`."
        )
