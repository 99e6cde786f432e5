"""What a rank stores and keeps if layers differ, as that of layers which are all alike.

In one program each stage has room for the slots of a sequence of kinds that all stages run.
Programs of ranks have the layers of their own stages.
"""

from functools import lru_cache
from itertools import accumulate

from ...engines import common_sequence
from ...schedules import FAMILIES
from ...schedules.language import rank_of_each_stage
from .._candidates import StepLayout
from .._model import PlannedModel

OfRank = tuple[PlannedModel, StepLayout]
"""The model and the layout as a rank has them."""


def ranks(model: PlannedModel, candidate: StepLayout) -> tuple[OfRank, ...]:
    """Returns the model and the layout as each rank has them; one pair if all have the same.

    If layers differ, those of the model that is returned are the means of what the rank has.
    """
    if not model.layer_sizes:
        return ((model, candidate),)
    family = FAMILIES.get(candidate.schedule)
    placement = family.placement if family else "loop"
    one_program = not candidate.engine.program_per_rank
    counts, models = _ranks(model, one_program, placement, candidate.num_ranks, candidate.counts)
    layout = candidate._replace(counts=counts)
    return tuple((of_rank, layout) for of_rank in models)


@lru_cache(maxsize=1000)
def _ranks(
    model: PlannedModel, one_program: bool, placement: str, S: int, counts: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[PlannedModel, ...]]:
    """Returns layers of every stage, of the longest its slots, and models of ranks."""
    ends = [0, *accumulate(counts)]
    stages = [
        model.layer_sizes[end - count : end] for end, count in zip(ends[1:], counts, strict=True)
    ]
    sizes = {layer.kind: layer for layer in model.layer_sizes}
    if one_program:
        slots = [sizes[kind] for kind in common_sequence([[x.kind for x in s] for s in stages])]
        longest = counts.index(max(counts))
        with_slots = (*counts[:longest], len(slots), *counts[longest + 1 :])
        return with_slots, (model.with_means([slots], len(slots)),)
    if placement == "both_ways":
        own = [[stages[rank], stages[S - 1 - rank]] for rank in range(S)]
    else:
        on_ranks = rank_of_each_stage(placement, S, len(counts) // S)
        own = [[s for s, at in zip(stages, on_ranks, strict=True) if at == r] for r in range(S)]
    return counts, tuple(model.with_means(of_rank, max(counts)) for of_rank in own)
