"""Checks by arithmetic, before anything is allocated, that the devices can hold a run."""

from typing import Any

import jax

from ..._input import shorten
from ...devices import host_bytes
from ...engines import PeakMemory
from ...models import ModelConfig
from ..plan._devices import BatchPlan
from ..plan._setup import StepPlan
from ._memory_estimate import estimate_memory

_SURE = 0.85
"""The least share of its estimate that a step may need (docs/plan.md)."""


def check_fits(plan: StepPlan) -> None:
    """Checks that the devices of this process have the memory that a run needs.

    A run is refused only if it needs more even where the estimate is too high.
    """
    devices = plan.pipeline.mesh.local_devices
    peak = max(estimate_memory(plan), key=lambda peak: peak.total)
    batch = sum(array.size * array.dtype.itemsize for array in plan.batch.shapes.values())
    on_host = devices[0].platform == "cpu"
    # Emulated devices share the memory of the host, where batches are made too.
    needed = peak.total * len(devices) + batch if on_host else peak.total
    most = device_bytes(devices[0])
    if most and _SURE * needed > most:
        keys = _deciding_values(plan.state.weights.sizes, plan.batch)
        where = "this host" if on_host else "a device"
        raise ValueError(_message(keys, peak, f"{needed / 1e9:.3g} GB, and {where} has", most))


def device_bytes(device: Any) -> int:
    """Returns the bytes of a device, of the host for one that it emulates; 0 if it is unknown."""
    if device.platform == "cpu":
        return host_bytes()
    return (device.memory_stats() or {}).get("bytes_limit", 0)


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


def _message(keys: str, peak: PeakMemory, needed: str, most: int) -> str:
    kinds = ", ".join(f"{kind} {size / 1e9:.3g}" for kind, size in vars(peak).items())
    return (
        f"The run needs about {needed} {most / 1e9:.3g} GB. On each device in GB: {kinds}. These "
        f"keys decide it: {shorten(keys, 500)}. Make them smaller, or use more devices "
        f"(`ici_fsdp_parallelism`, `ici_pipeline_parallelism`; now {jax.device_count()})."
    )
