"""The devices of a run, and the batches that are divided over them.

M microbatches of b rows in each of A steps of gradient accumulation, T tokens per row.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ... import sharding


@dataclass(frozen=True)
class DeviceLayout:
    """Devices, and the rules by which arrays are divided over them.

    Attributes:
        mesh: The mesh of all devices.
        rules: Logical axis rules of weights and activations.
    """

    mesh: Mesh
    rules: sharding.Rules

    @property
    def platform(self) -> str:
        """Returns the platform of the devices, such as `tpu`."""
        return self.mesh.devices.flat[0].platform

    def shardings(self, shapes: PyTree, axes: PyTree) -> PyTree[NamedSharding]:
        """Returns the shardings of arrays with these logical axes.

        Returns:
            A tree like `shapes`.

        Raises:
            ValueError: If a dim does not divide by the mesh axes that split it.
        """
        return sharding.named_shardings(shapes, axes, self.mesh, self.rules)


@dataclass(frozen=True)
class BatchPlan:
    """The batch of a step, and the devices that have its rows.

    Attributes:
        gradient_accumulation_steps: A, the number of calls of the engine in a step.
        num_microbatches: M, those of one call.
        microbatch_size: b, summed over all devices.
        length: T, the tokens of a row.
        in_host_memory: Whether arrays stay in host memory, because the step transfers each to the
            ranks that read it.
    """

    devices: DeviceLayout
    gradient_accumulation_steps: int
    num_microbatches: int
    microbatch_size: int
    length: int
    in_host_memory: bool = False

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of a step, summed over all devices: A * M * b."""
        return self.shape[0] * self.shape[1]

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of a step, summed over all devices: A * M * b * T."""
        return self.num_rows * self.length

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns [A * M, b, T], the dims of every array of a batch."""
        count = self.gradient_accumulation_steps * self.num_microbatches
        return count, self.microbatch_size, self.length

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns abstract arrays: tokens, targets, target_weights, positions and segment_ids."""
        int32_array = jax.ShapeDtypeStruct(self.shape, jnp.int32)
        return {
            "tokens": int32_array,
            "targets": int32_array,
            "target_weights": jax.ShapeDtypeStruct(self.shape, jnp.float32),
            "positions": int32_array,
            "segment_ids": int32_array,
        }

    @property
    def shardings(self) -> Any:
        """Returns a `NamedSharding` for each array of `shapes`.

        Raises:
            ValueError: If microbatches or rows do not divide by the mesh axes that split them.
        """
        shapes = self.shapes
        rows = {"microbatches": next(iter(shapes.values()))}  # all alike; an error names them so
        axes = {"microbatches": ("microbatches", "activation_batch", "activation_length")}
        return dict.fromkeys(shapes, self.devices.shardings(rows, axes)["microbatches"])
