"""Shards batches over the devices of a run.

M microbatches of b rows in each of A steps of gradient accumulation, T tokens per row.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from jaxtyping import Int64

from ...data.batches import Batch, RowsByStep
from ..plan._devices import BatchPlan


def shard_batch(plan: BatchPlan, batch: Batch) -> dict[str, ArrayLike]:
    """Shards a batch [B, T] over the devices, in microbatches [A * M, b, T].

    `target_weights` are divided by their sum over the batch: each is then the share of its token in
    the loss, so that uneven masks need no care anywhere else. If the plan says so, arrays stay in
    host memory: the step transfers each to the ranks that read it.
    """
    total = float(batch["target_weights"].sum(dtype=np.float64))
    return _shard_rows(plan, batch, np.arange(plan.num_rows), total)


def shard_batch_of_step(plan: BatchPlan, batches: RowsByStep, step: int) -> dict[str, ArrayLike]:
    """Shards the batch of a step; makes only the rows that this process needs."""
    where = plan.shardings["tokens"]
    indices = where.addressable_devices_indices_map(plan.shape).values()
    row_ids = row_ids_of_shards(indices, plan.shape)
    # Ranks that run programs of their own each read all rows, a share on each of their devices.
    if plan.in_host_memory or len(row_ids) == plan.num_rows:
        return shard_batch(plan, batches.rows(step, range(plan.num_rows)))
    # All processes must divide by the same number, whatever rows they hold.
    rows = batches.rows(step, row_ids.tolist())
    return _shard_rows(plan, rows, row_ids, float(batches.num_targets(step)))


def row_ids_of_shards(
    shard_indices: Iterable[tuple[slice, ...] | None], batch_shape: tuple[int, ...]
) -> Int64[np.ndarray, " n"]:
    """Returns the ids of rows of [A * M, b, T] arrays that shards hold, in ascending order."""
    needed = np.zeros(batch_shape[:2], bool)
    for index in shard_indices:
        assert index is not None, "devices of this process have a part"
        needed[index[:2]] = True
    return np.flatnonzero(needed)


def _shard_rows(
    plan: BatchPlan, batch: Batch, row_ids: Int64[np.ndarray, " n"], total: float
) -> dict[str, ArrayLike]:
    """Shards the rows of a batch with these ids; `total` is the weight of the whole batch."""
    weights = (batch["target_weights"] / (total or 1.0)).astype(np.float32)
    batch = batch | {"target_weights": weights}
    shape = plan.shape[:2]
    if plan.in_host_memory:
        return {name: rows.reshape(*shape, -1) for name, rows in batch.items()}
    row_positions = np.full(plan.num_rows, -1)  # no device of this process asks for the others
    row_positions[row_ids] = np.arange(len(row_ids))
    row_positions = row_positions.reshape(shape)

    def to_global_array(rows: np.ndarray, where: NamedSharding) -> Any:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "arrays are not scalars"
            return rows[row_positions[index[:2]], index[2]]

        return jax.make_array_from_callback((*shape, rows.shape[1]), where, part)

    return jax.tree.map(to_global_array, batch, plan.shardings)
