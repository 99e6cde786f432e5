"""What differs between versions of JAX, from 0.10 on: here and nowhere else."""

import jax


def splash_aborts_in_pipelines() -> bool:
    """Whether XLA:TPU aborts on a kernel's `shard_map` inside a recomputed tick.

    It does in jax 0.10 with the Shardy partitioner, its default
    (`target.IsManualSubgroup() == sharding().IsManualSubgroup()`), and no longer in 0.11.
    """
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    return jax.__version_info__ < (0, 11) and shardy
