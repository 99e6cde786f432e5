"""Stages in the order of the model, and where a schedule has them.

S ranks, v chunks on each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..schedules import Schedule, num_ranks, rank_and_chunk_by_stage
from ..schedules.lock_step import RankAndChunk


def to_ranks(tree: PyTree, schedule: Schedule) -> PyTree:
    """[v S, ...] in the order of the model -> [v, S, ...] as the schedule places stages."""
    order = _order(schedule)
    return jax.tree.map(lambda x: jnp.take(x, order, axis=0), tree)


def to_stages(tree: PyTree, schedule: Schedule) -> PyTree:
    """The inverse of `to_ranks`."""
    places = np.argsort(_order(schedule).ravel())
    return jax.tree.map(lambda x: jnp.take(x.reshape(-1, *x.shape[2:]), places, axis=0), tree)


def stages_on_ranks(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """[v][S] the stage of every chunk of every rank."""
    places = rank_and_chunk_by_stage(schedule)
    stages = {place: stage for stage, place in places.items()}
    ranks = range(num_ranks(schedule))
    return tuple(
        tuple(stages[RankAndChunk(rank, chunk)] for rank in ranks)
        for chunk in range(len(places) // num_ranks(schedule))
    )


def _order(schedule: Schedule) -> np.ndarray:
    return np.asarray(stages_on_ranks(schedule))
