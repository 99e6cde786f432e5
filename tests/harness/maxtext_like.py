"""A config object and shardings as MaxText's own code has them, for tests of both frameworks."""

from enum import Enum, StrEnum
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, reshard

from jaxpipe import sharding

RULES = [
    ["activation_batch", ["data", "fsdp", "expert"]],
    ["activation_length", ["context"]],
    ["activation_embed", ["tensor"]],
    ["activation_mlp", ["tensor"]],
    ["activation_stage", "stage"],
    ["circular_repeats", []],
    ["embed", ["fsdp", "expert"]],
    ["mlp", ["tensor"]],
    ["layers", "stage"],
]


class ShardMode(Enum):
    AUTO = "auto"
    EXPLICIT = "explicit"


class RematLocation(StrEnum):
    REMAT = "remat"
    DEVICE = "device"


class Config:
    """Read only, as a pydantic model behind an object is, with fields that no pipeline reads."""

    def __init__(self, **fields: Any):
        found = {
            "model_name": "llama2-7b",
            "ici_pipeline_parallelism": 2,
            "dcn_pipeline_parallelism": 1,
            "num_decoder_layers": 4,
            "pipeline_parallel_layers": 4,
            "num_layers_per_pipeline_stage": 1,
            "num_pipeline_repeats": 2,
            "num_pipeline_microbatches": 2,
            "micro_batch_size_to_train_on": 8,
            "pipeline_delay_activation_forwarding": False,
            "pipeline_fsdp_ag_once": False,
            "pipeline_fsdp_ag_per_repeat": False,
            "scan_pipeline_iterations": True,
            "scan_pipeline_repeats": False,
            "set_remat_policy_on_pipeline_iterations": True,
            "set_remat_policy_on_layers_per_stage": False,
            "remat_policy": "custom",
            "decoder_layer_input": RematLocation.DEVICE,
            "mlpwo": RematLocation.REMAT,
            "shard_mode": ShardMode.AUTO,
            "logical_axis_rules": RULES,
            "debug_sharding": False,
            **fields,
        }
        object.__setattr__(self, "_fields", found)

    def __getattr__(self, name: str) -> Any:
        fields = object.__getattribute__(self, "_fields")
        if name not in fields:
            raise ValueError(f"Requested key {name}, not in config")
        return fields[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError("Configuration is read-only")


def mesh_of(mode: ShardMode, *, every_axis: bool = False) -> Mesh:
    """2 ranks x 2 fsdp x 2 tensor; with `every_axis` all are of the mode's type."""
    sizes, devices = {"stage": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8]
    mesh = sharding.make_mesh(sizes, devices=devices, explicit=mode == ShardMode.EXPLICIT)
    if not every_axis:
        return mesh
    kind = AxisType.Explicit if mode == ShardMode.EXPLICIT else AxisType.Auto
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))


def shard_as(x: jax.Array, names: tuple[str | None, ...], mesh: Mesh, mode: ShardMode) -> jax.Array:
    """What MaxText's layers do with their activations: rules in context, the whole mesh."""
    where = nn.spmd.logical_to_mesh_sharding(jax.sharding.PartitionSpec(*names), mesh)
    if mode == ShardMode.EXPLICIT:
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        kept = (
            tuple(
                a
                for a in (dim if isinstance(dim, tuple) else (dim,))
                if a and types[a] == AxisType.Explicit
            )
            for dim in where.spec
        )
        spec = jax.sharding.PartitionSpec(*(axes or None for axes in kept))
        return reshard(x, NamedSharding(mesh, spec))
    return jax.lax.with_sharding_constraint(x, where)
