"""Attributes that the `setup` of MaxText's pipeline documents, for both Flax frontends.

They follow from the settings, the axis rules and the mesh, so they are properties.
"""

from typing import Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..spmd import stepwise
from ..spmd.ranks import AXIS
from ._settings import AxisRules, PipelineSettings
from ._weight_sharding import physical_spec


class PipelineAttributes:
    """Sizes, axis names, specs and shardings that MaxText's `setup` calculates.

    Specs are physical: they name mesh axes. Shardings are None unless the mesh has explicit axes.
    """

    mesh: Mesh | None
    settings: PipelineSettings
    axis_rules: AxisRules
    batch_axis_name = "activation_batch"
    seq_len_axis_name = "activation_length"

    @property
    def num_stages(self) -> int:
        """Returns the number of ranks of the pipeline."""
        return self.settings.pipeline_shape.num_ranks

    @property
    def forwarding_delay(self) -> int:
        """Returns the number of iterations that a hand-over to the next rank takes.

        It is 2 with `pipeline_delay_activation_forwarding`, else 1.
        """
        return self.settings.pipeline_shape.forwarding_delay

    @property
    def pipeline_microbatch_size(self) -> int | None:
        """Returns the rows of a microbatch, or None if the config does not set the batch size."""
        rows = self.settings.batch_size
        return None if rows is None else rows // self.settings.pipeline_shape.num_microbatches

    @property
    def microbatches_per_stage(self) -> int:
        """Returns the number of microbatches that a rank stores in `state_io`."""
        return self.settings.pipeline_shape.microbatches_per_rank

    @property
    def use_circ_storage(self) -> bool:
        """Returns whether outputs of the last rank must wait until rank 0 starts a new repeat."""
        return stepwise.need_circ_storage(self.settings.pipeline_shape)

    @property
    def spmd_axis_name(self) -> str | None:
        """Returns the mesh axis of the ranks, or None if the mesh has explicit axes."""
        return None if self._is_explicit else AXIS

    @property
    def stages_in_logical(self) -> tuple[str | None, ...]:
        """Returns the logical axes of the ranks' inputs [ranks, rows, sequence, embed]."""
        return ("activation_stage", *self._activation)

    @property
    def stages_in_spec(self) -> PartitionSpec:
        """Returns the physical spec of the ranks' inputs [ranks, rows, sequence, embed]."""
        return self._spec(self.stages_in_logical)

    @property
    def stages_in_sharding(self) -> NamedSharding | None:
        """Returns `stages_in_spec` as a sharding."""
        return self._sharding(self.stages_in_logical)

    @property
    def state_io_logical(self) -> tuple[str | None, ...]:
        """Returns the logical axes of `state_io` [ranks, microbatches, rows, sequence, embed]."""
        return ("activation_stage", None, *self._activation)

    @property
    def state_io_spec(self) -> PartitionSpec:
        """Returns the physical spec of `state_io`."""
        return self._spec(self.state_io_logical)

    @property
    def state_io_sharding(self) -> NamedSharding | None:
        """Returns `state_io_spec` as a sharding."""
        return self._sharding(self.state_io_logical)

    @property
    def input_sharding(self) -> NamedSharding | None:
        """Returns the sharding of the inputs [microbatches, rows, sequence, embed]."""
        return self._sharding((None, *self._activation))

    @property
    def output_sharding(self) -> NamedSharding | None:
        """Returns the sharding of the outputs [rows, sequence, embed]."""
        return self._sharding(self._activation)

    @property
    def _activation(self) -> tuple[str, str, str]:
        return self.batch_axis_name, self.seq_len_axis_name, "activation_embed"

    @property
    def _is_explicit(self) -> bool:
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    def _spec(self, names: tuple[str | None, ...]) -> PartitionSpec:
        axes: Any = () if self.mesh is None else self.mesh.axis_names
        return physical_spec(PartitionSpec(*names), self.axis_rules, axes)

    def _sharding(self, names: tuple[str | None, ...]) -> NamedSharding | None:
        if self.mesh is None or not self._is_explicit:
            return None
        return NamedSharding(self.mesh, self._spec(names))
