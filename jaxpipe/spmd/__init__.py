"""Pipelines in one XLA program: `jax.shard_map` over the axis `stage`, the other axes automatic."""

from ._circular import Remat as Remat
from ._circular import check_circular as check_circular
from ._circular import num_ticks as num_ticks
from ._circular_engine import circular as circular
from ._circular_engine import circular_value_and_grad as circular_value_and_grad
from ._circular_engine import keep as keep
from ._circular_engine import recompute as recompute
from ._ranks import on_ranks as on_ranks
