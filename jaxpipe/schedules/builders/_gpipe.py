"""GPipe: every forward, then every backward."""

from ..language._action import Action, Op
from ..language._schedule import Schedule
from ._require import require_positive


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: fills the pipeline once and drains it once, holding every microbatch in between.

    Example:
        >>> print(gpipe(2, 2))
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1

    References:
        Huang et al., 2019, arXiv 1811.06965.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)
    programs = tuple(
        tuple(Action(stage, op, m) for op in (Op.F, Op.B) for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule(num_stages, num_microbatches, programs)
