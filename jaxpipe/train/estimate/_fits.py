"""Checks by arithmetic, before anything is allocated, that the devices can hold a run."""

import os
import resource
from pathlib import Path

import jax

from ..._input import shorten
from ..plan._devices import BatchPlan
from ..plan._family import ModelConfig
from ..plan._setup import StepPlan
from ._memory_estimate import MemoryEstimate, estimate_memory

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def check_fits(plan: StepPlan) -> None:
    """Checks that the devices of this process have the memory that a run needs.

    The estimate leaves out activations inside a stage, so a run that passes may still be too large.

    Raises:
        ValueError: If the run needs more. The error names the keys that decide how much it needs.
    """
    devices = plan.pipeline.mesh.local_devices
    found = max(estimate_memory(plan), key=lambda footprint: footprint.total)
    batch = sum(array.size * array.dtype.itemsize for array in plan.batch.shapes.values())
    on_host = devices[0].platform == "cpu"
    # Emulated devices share the memory of the host, where batches are made too.
    needed = found.total * len(devices) + batch if on_host else found.total
    most = host_bytes() if on_host else (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    if most and needed > most:
        keys = _deciding_values(plan.state.weights.sizes, plan.batch)
        where = "this host" if on_host else "a device"
        raise ValueError(_message(keys, found, f"{needed / 1e9:.3g} GB, and {where} has", most))


def host_bytes() -> int:
    """Returns the bytes of memory that this process may use at most."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    if _CGROUP.is_file() and (text := _CGROUP.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits)


def _deciding_values(sizes: ModelConfig, batch: BatchPlan) -> str:
    """Returns the keys that decide how much memory a run needs, with their values."""
    names = ["base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "vocab_size"]
    if hasattr(sizes, "num_experts"):
        names += ["num_experts", "base_moe_mlp_dim"]
    values = {name: getattr(sizes, name) for name in names}
    rows = batch.num_microbatches * batch.microbatch_size  # of one call of the engine
    values["per_device_batch_size"] = rows / batch.devices.mesh.size
    values["max_target_length"] = batch.length
    return ", ".join(f"`{key}` {value}" for key, value in values.items())


def _message(keys: str, found: MemoryEstimate, needed: str, most: int) -> str:
    return (
        f"The run needs at least {needed} {most / 1e9:.3g} GB. On "
        f"each device weights take {found.weights / 1e9:.3g} GB, gradients "
        f"{(found.gradients + found.gradient_sums) / 1e9:.3g} GB, the optimizer "
        f"{found.optimizer / 1e9:.3g} GB and stage inputs {found.stage_inputs / 1e9:.3g} GB. These "
        f"keys decide it: {shorten(keys, 500)}. Make them smaller, or use more devices "
        f"(`ici_fsdp_parallelism`, `ici_pipeline_parallelism`; now {jax.device_count()})."
    )
