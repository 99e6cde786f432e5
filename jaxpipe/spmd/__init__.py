"""Pipelines in one XLA program: `jax.shard_map` over the axis `stage`, the other axes automatic."""

import typing

from .. import _lazy

if typing.TYPE_CHECKING:
    from ._options import NO_OPTIONS as NO_OPTIONS
    from ._options import EngineOptions as EngineOptions
    from ._options import check_reduce_dtype as check_reduce_dtype
    from .circular_engine import circular as circular
    from .ranks import to_ranks as to_ranks
    from .ranks import to_stages as to_stages
    from .weight_gather import Gather as Gather
    from .weight_gather import gather_weights as gather_weights
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
