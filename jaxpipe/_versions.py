"""What differs between versions of JAX, from 0.10 on, and what has no public door: here only."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import serialize_executable
from jax.sharding import Sharding


def splash_aborts_in_pipelines() -> bool:
    """Whether XLA:TPU aborts on a kernel's `shard_map` inside a recomputed tick.

    It does in jax 0.10 with the Shardy partitioner, its default
    (`target.IsManualSubgroup() == sharding().IsManualSubgroup()`), and no longer in 0.11.
    """
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    return jax.__version_info__ < (0, 11) and shardy


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Consts and carries of an equation of `lax.scan`: its inputs, but for the xs that follow.

    jax 0.12 has trees of its inputs in place of the numbers.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def on_other_devices(compiled: Any, devices: Sequence[Any], others: Sequence[Any]) -> Any:
    """A compiled program for other devices of the same kind, or None if that cannot be done.

    JAX saves programs and loads them again, for the same devices. Here others answer to what was
    saved of them, and the compiler's own options are told so. What came out of JAX's persistent
    cache cannot be saved once more on CPU (`Function wrapped_broadcast not found` when it runs):
    with a cache nothing moves, and another compilation finds its program there.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return None
    try:
        payload, in_tree, out_tree = serialize_executable.serialize(compiled)
        unpickler = _Elsewhere(io.BytesIO(payload), others[0].client, tuple(others))
        unpickler.devices_by_id = {
            device.id: other for device, other in zip(devices, others, strict=True)
        }
        unloaded, args_info, no_kwargs = unpickler.load()
        if list(unloaded.xla_executable.local_devices()) != list(others):
            return None
        info = in_tree.unflatten(args_info)
        return jax.stages.Compiled(unloaded.load(), [], info, out_tree, no_kwargs=no_kwargs)
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError):
        return None  # another version, or a device whose programs cannot be saved


def distributed_state() -> Any:
    """What `jax.distributed` knows: its `client`, the key-value store, or None before it is
    initialised, and its `coordinator_address`."""
    return distributed.global_state


def copier(shardings: Sequence[Sharding]) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """`jax.device_put`, or in a third of its time what it does once it has looked at everything.

    Args:
        shardings: Where each array goes, divided as it is.
    """
    try:
        copy = xla_client.batched_copy_array_to_devices_with_sharding
        semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(shardings)
        devices = [s._internal_device_list.addressable_device_list for s in shardings]
    except AttributeError:
        return lambda arrays: jax.device_put(list(arrays), shardings)
    return lambda arrays: copy(arrays, devices, shardings, semantics)


class _Elsewhere(serialize_executable._JaxPjrtUnpickler):
    """Reads a saved program for other devices than it was compiled for."""

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        options = xla_client.CompileOptions()
        build = options.executable_build_options
        ids = np.array([[device.id for device in self.execution_devices]])
        build.num_replicas, build.num_partitions = ids.shape
        build.device_assignment = xla_client.DeviceAssignment.create(ids)
        return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
