"""Valid schedules that nobody would write: any placement, any order that does not deadlock."""

from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from jaxpipe.schedules import Action, Op, Schedule, check
from jaxpipe.schedules.language import dependencies, outputs


class Draft(NamedTuple):
    """What a random schedule is made of."""

    ranks: int
    chunks: int
    microbatches: int
    seed: int
    copies: int = 1


def drafts(ranks: tuple[int, ...] = (1, 2, 3, 4), copies: int = 2) -> st.SearchStrategy[Draft]:
    """Not built yet: beartype looks at random items of a list, which hypothesis forbids here."""
    return st.builds(
        Draft,
        st.sampled_from(ranks),
        st.integers(1, 2),
        st.integers(1, 6),
        st.integers(0, 2**32),
        st.integers(1, copies),
    )


def forwards_first(draft: Draft, *, mirrored: bool) -> Schedule:
    """All forwards before all backwards, on ranks that have `draft.chunks` stages each.

    Stages are in a ring, or anywhere if not `mirrored`: then a rank runs what is ready in any
    order, and may come back to a chunk. Otherwise backwards retrace forwards, chunk by chunk.
    """
    rng = Random(draft.seed)
    num_stages = draft.ranks * draft.chunks
    home = [stage % draft.ranks for stage in range(num_stages)]
    if not mirrored:
        rng.shuffle(home)
    forwards, backwards = (
        [Action(s, op, m) for s in range(num_stages) for m in range(draft.microbatches)]
        for op in (Op.F, Op.B)
    )
    if mirrored:
        backwards.reverse()
    programs, done = [[] for _ in range(draft.ranks)], set[Action]()
    for actions in (forwards, backwards):
        while actions:
            ready = (a for a in actions if done.issuperset(dependencies(a, num_stages, 1)))
            action = next(ready) if mirrored else rng.choice([*ready])
            actions.remove(action)
            programs[home[action.stage]].append(action)
            done.update(outputs(action))
    return check(Schedule(num_stages, draft.microbatches, tuple(map(tuple, programs))))


def random_schedule(draft: Draft) -> Schedule:
    """Stages lie anywhere, as many on every rank; each backward is whole or split.

    With copies some microbatches run one rank on, or more, so that a stage is on several ranks.
    Whatever is ready may come next, so the order of microbatches differs from stage to stage.
    """
    rng = Random(draft.seed)
    num_stages = draft.ranks * draft.chunks
    home = [stage % draft.ranks for stage in range(num_stages)]
    rng.shuffle(home)
    shifts = [rng.randrange(draft.copies) for _ in range(draft.microbatches)]
    waiting = [
        Action(stage, op, microbatch)
        for stage in range(num_stages)
        for microbatch in range(draft.microbatches)
        for op in rng.choice(((Op.F, Op.B), (Op.F, Op.I, Op.W)))
    ]
    programs, done = [[] for _ in range(draft.ranks)], set[Action]()
    while waiting:
        action = rng.choice([a for a in waiting if done.issuperset(dependencies(a, num_stages, 1))])
        waiting.remove(action)
        rank = (home[action.stage] + shifts[action.microbatch]) % draft.ranks
        programs[rank].append(action)
        done.update(outputs(action))
    return check(Schedule(num_stages, draft.microbatches, tuple(map(tuple, programs))))
