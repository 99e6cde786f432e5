"""The attributes that the `setup` of MaxText's pipeline documents, for both Flax frameworks.

They follow from the settings, the axis rules and the mesh, so they are properties.
"""

from typing import Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..spmd._ranks import AXIS
from ..spmd.stepwise import _iteration as iteration
from ._placement import physical_spec
from ._settings import AxisRules, PipelineSettings


class PipelineAttributes:
    """What MaxText's `setup` calculates: sizes, names of axes, specs and shardings.

    Specs are physical, of the mesh's axes. Shardings are None unless the mesh has explicit axes.
    """

    mesh: Mesh | None
    settings: PipelineSettings
    axis_rules: AxisRules
    batch_axis_name = "activation_batch"
    seq_len_axis_name = "activation_length"

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self.settings.counts.num_ranks

    @property
    def forwarding_delay(self) -> int:
        """Iterations of a hand-over: 2 with `pipeline_delay_activation_forwarding`, else 1."""
        return self.settings.counts.hop

    @property
    def pipeline_microbatch_size(self) -> int | None:
        """Rows of a microbatch, None if the config does not say how many rows a batch has."""
        rows = self.settings.batch_size
        return None if rows is None else rows // self.settings.counts.num_microbatches

    @property
    def microbatches_per_stage(self) -> int:
        """Microbatches that a rank keeps in `state_io`."""
        return self.settings.counts.slots

    @property
    def use_circ_storage(self) -> bool:
        """Whether results wait between the last rank and the next repeat on rank 0."""
        return iteration.need_circ_storage(self.settings.counts)

    @property
    def spmd_axis_name(self) -> str | None:
        """The mesh axis of the ranks, None if the mesh has explicit axes."""
        return None if self._is_explicit else AXIS

    @property
    def stages_in_logical(self) -> tuple[str | None, ...]:
        """Names of the dims of what the ranks work on, [ranks, rows, sequence, embed]."""
        return ("activation_stage", *self._activation)

    @property
    def stages_in_spec(self) -> PartitionSpec:
        """How what the ranks work on is split."""
        return self._spec(self.stages_in_logical)

    @property
    def stages_in_sharding(self) -> NamedSharding | None:
        """`stages_in_spec` as a sharding."""
        return self._sharding(self.stages_in_logical)

    @property
    def state_io_logical(self) -> tuple[str | None, ...]:
        """Names of the dims of `state_io`, [ranks, microbatches, rows, sequence, embed]."""
        return ("activation_stage", None, *self._activation)

    @property
    def state_io_spec(self) -> PartitionSpec:
        """How `state_io` is split."""
        return self._spec(self.state_io_logical)

    @property
    def state_io_sharding(self) -> NamedSharding | None:
        """`state_io_spec` as a sharding."""
        return self._sharding(self.state_io_logical)

    @property
    def input_sharding(self) -> NamedSharding | None:
        """How inputs [microbatches, rows, sequence, embed] are split."""
        return self._sharding((None, *self._activation))

    @property
    def output_sharding(self) -> NamedSharding | None:
        """How outputs [rows, sequence, embed] are split."""
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
