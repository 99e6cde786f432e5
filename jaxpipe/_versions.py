"""What differs between versions of JAX, from 0.10 on: here and nowhere else."""

from typing import Any

import jax


def splash_aborts_in_pipelines() -> bool:
    """Whether XLA:TPU aborts on a kernel's `shard_map` inside a recomputed tick.

    It does in jax 0.10 with the Shardy partitioner, its default
    (`target.IsManualSubgroup() == sharding().IsManualSubgroup()`), and no longer in 0.11.
    """
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    return jax.__version_info__ < (0, 11) and shardy


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Consts and carries of an equation of `lax.scan`: its inputs, but for the xs that follow.

    jax 0.12 has trees of its inputs in place of the numbers.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))
