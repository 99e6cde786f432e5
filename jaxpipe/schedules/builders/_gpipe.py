"""GPipe: every forward, then every backward."""

from .._action import Action, Op
from .._schedule import Schedule
from ._require import require_positive


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: fill the pipeline once and drain it once, holding every microbatch in between.

    References:
        Huang et al., 2019, arXiv 1811.06965.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)
    programs = tuple(
        tuple(Action(stage, op, m) for op in (Op.F, Op.B) for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule(num_stages, num_microbatches, programs)
