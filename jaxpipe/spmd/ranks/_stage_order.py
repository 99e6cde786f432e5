"""Conversions of stacked stages between the model's order and the order of a schedule's ranks.

S ranks, v chunks on each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ...schedules import Schedule, num_ranks
from ...schedules.lock_step import RankAndChunk, rank_and_chunk_by_stage


def to_ranks(tree: PyTree, schedule: Schedule) -> PyTree:
    """Reorders stacked stages from the order of the model to that of ranks and chunks.

    Args:
        tree: [v * S, ...] leaves, stages in forward order.
        schedule: The schedule, which assigns every stage to a rank.

    Returns:
        [v, S, ...] leaves: entry [chunk, rank] is stage `stages_on_ranks(schedule)[chunk][rank]`.

    Example:
        >>> from jaxpipe.schedules import build
        >>> schedule = build("zbv", ranks=2, microbatches=4)
        >>> to_ranks(jnp.arange(4), schedule).tolist()  # rank 0 has the first and the last stage
        [[0, 1], [3, 2]]
    """
    order = _order(schedule)
    return jax.tree.map(lambda x: jnp.take(x, order, axis=0), tree)


def to_stages(tree: PyTree, schedule: Schedule) -> PyTree:
    """Reorders stacked stages from the order of ranks and chunks to that of the model.

    Args:
        tree: [v, S, ...] leaves, as `to_ranks` returns them.
        schedule: The schedule, which assigns every stage to a rank.

    Returns:
        [v * S, ...] leaves, stages in forward order.

    Example:
        >>> from jaxpipe.schedules import build
        >>> schedule = build("zbv", ranks=2, microbatches=4)
        >>> to_stages(jnp.asarray([[0, 1], [3, 2]]), schedule).tolist()
        [0, 1, 2, 3]
    """
    indices = np.argsort(_order(schedule).ravel())
    return jax.tree.map(lambda x: jnp.take(x.reshape(-1, *x.shape[2:]), indices, axis=0), tree)


def stages_on_ranks(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Returns a table [v, S]: the stage that every rank runs as every one of its chunks."""
    rank_and_chunk_of = rank_and_chunk_by_stage(schedule)
    stages = {assigned: stage for stage, assigned in rank_and_chunk_of.items()}
    ranks = range(num_ranks(schedule))
    return tuple(
        tuple(stages[RankAndChunk(rank, chunk)] for rank in ranks)
        for chunk in range(len(rank_and_chunk_of) // num_ranks(schedule))
    )


def _order(schedule: Schedule) -> np.ndarray:
    return np.asarray(stages_on_ranks(schedule))
