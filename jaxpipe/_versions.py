"""What differs between versions of JAX, from 0.10 on: here and nowhere else."""

import io
from collections.abc import Sequence
from typing import Any

import jax


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

    JAX can save a program and load it again, on the same devices. What it saved names them by
    number; here other devices answer to these numbers.
    """
    return None
    from jax.experimental import serialize_executable

    try:
        payload, in_tree, out_tree = serialize_executable.serialize(compiled)
        client = others[0].client
        unpickler = serialize_executable._JaxPjrtUnpickler(io.BytesIO(payload), client, others)
        unpickler.devices_by_id = {
            device.id: other for device, other in zip(devices, others, strict=True)
        }
        unloaded, args_info, no_kwargs = unpickler.load()
        loaded = unloaded.load()
        info = in_tree.unflatten(args_info)
        return jax.stages.Compiled(loaded, [], info, out_tree, no_kwargs=no_kwargs)
    except Exception:  # any part of this may be missing in another version
        return None
