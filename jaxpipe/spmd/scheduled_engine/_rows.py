"""Rows of the tables of a schedule: the integers of one tick, as one rank reads them.

A scan over ticks slices the columns of a rank, so the row of a tick has the fields of the tables.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ...schedules.lock_step import PhaseTable, TickTables
from ..ranks import AXIS, execution_count_hint

Index = Int[Array, "*ticks"]


class PhaseRow(NamedTuple):
    """The integers of one phase, of one rank; the fields are those of `PhaseTable`.

    They are scalars in a tick, and [ticks] where the scan over ticks begins.
    """

    microbatch: Index
    stage: Index
    chunk: Index
    input_slot: Index
    cotangent_slot: Index
    residuals_for_backward_slot: Index
    residuals_for_weight_slot: Index
    wgrad_residuals_slot: Index
    weight_source: Index
    prefetch_chunk: Index
    ends_residency: Index
    completes_chunk: Index
    past_slot: Index
    past_cotangent_slot: Index


class TickRow(NamedTuple):
    """The integers of a tick, of one rank; the fields are those of `TickTables`, and one more.

    They are scalars in a tick, and [ticks] where the scan over ticks begins.

    Attributes:
        activation_arrivals: By the offset of the sending rank, the slot of the activation that
            arrives; negative for none.
        cotangent_arrivals: The same for cotangents.
        loss_microbatches: For each rank of the last stage, the microbatch whose loss all ranks
            compute together, or -1; () if the rank of the last stage computes losses alone.
    """

    forward: PhaseRow
    backward: PhaseRow
    weight: PhaseRow
    activation_arrivals: dict[int, Index]
    cotangent_arrivals: dict[int, Index]
    loss_microbatches: tuple[Index, ...] = ()


FIRST_CHUNK = PhaseRow(*[0] * len(PhaseRow._fields))  # type: ignore[arg-type]
"""A row that reads the weights of chunk 0, to trace a stage."""


def rows_of_rank(tables: TickTables) -> TickRow:
    """Returns this rank's columns of the tables, [ticks] each, which vary over `stage` alone."""

    def column(table: tuple) -> Int[Array, " ticks"]:
        return jnp.take(jnp.asarray(table, jnp.int32), lax.axis_index(AXIS), axis=1)

    def phase(table: PhaseTable) -> PhaseRow:
        return PhaseRow(*map(column, table))

    return TickRow(
        phase(tables.forward),
        phase(tables.backward),
        phase(tables.weight),
        {offset: column(table) for offset, table in sorted(tables.activation_arrivals.items())},
        {offset: column(table) for offset, table in sorted(tables.cotangent_arrivals.items())},
    )


def stage_hint(table: PhaseTable, stage: int) -> str:
    """Returns the `execution_count_hint` of the ticks in which a phase works on a stage."""
    return execution_count_hint(_working_stages(table), lambda at: at == stage)


def visits_stage(table: PhaseTable, stage: int) -> bool:
    """Returns whether a phase works on a stage, on any rank and in any tick."""
    return any(stage in row for row in _working_stages(table))


def _working_stages(table: PhaseTable) -> list[list[int]]:
    """Returns [ticks, ranks] the stage on which a rank works, or -1."""
    pairs = zip(table.microbatch, table.stage, strict=True)
    return [[at if work >= 0 else -1 for work, at in zip(*ranks, strict=True)] for ranks in pairs]
