"""Interleaving: every rank holds several small stages, so that the pipeline fills sooner.

p ranks, v chunks per rank, g microbatches in a group. A group passes chunk 0, then chunk 1 and so
on, before the next group enters. All families here run the same two sequences, one of forwards and
one of backwards; they differ in how many forwards come first.
"""

from collections.abc import Iterator

from ..language._action import Action, Op
from ..language._placement import loop_stage
from ..language._schedule import Schedule, from_ranks
from ._require import require, require_positive


def even_group_size(num_ranks: int, num_microbatches: int) -> int:
    """Returns the group size that torch chooses: about p, equal for all groups."""
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    num_groups = max(1, num_microbatches // num_ranks)
    require(
        num_microbatches % num_groups == 0,
        f"`num_microbatches` is {num_microbatches}, which {num_ranks} ranks would take in "
        f"{num_groups} groups of unequal size.",
        f"Give {num_microbatches // num_groups * num_groups} microbatches, or a group size.",
    )
    return num_microbatches // num_groups


def interleaved_one_f_one_b(
    num_ranks: int, num_microbatches: int, *, num_chunks: int = 2, group_size: int
) -> Schedule:
    """Megatron's interleaved 1F1B: divides the bubble by the v chunks per rank.

    The last group may be smaller than `group_size`, but not smaller than the pipeline is long.

    References:
        Narayanan et al., 2021, arXiv 2104.04473, figure 4 (bottom).
    """
    _require_full_groups(num_ranks, num_microbatches, num_chunks, group_size)

    def program(rank: int) -> Iterator[Action]:
        forwards, backwards = _sequences(rank, num_ranks, num_microbatches, num_chunks, group_size)
        warmup = (num_chunks - 1) * group_size + 2 * (num_ranks - 1 - rank)
        return alternate(forwards, backwards, warmup)

    return from_ranks(program, num_ranks, num_microbatches, num_chunks)


def kimi_k2(
    num_ranks: int, num_microbatches: int, *, num_chunks: int = 2, group_size: int
) -> Schedule:
    """Interleaved 1F1B with one more warmup forward.

    The forward and the backward that are neighbours are then of different microbatches, and can
    overlap one's expert all-to-all with the other's arithmetic.

    References:
        Kimi K2, 2025, arXiv 2507.20534.
    """
    _require_full_groups(num_ranks, num_microbatches, num_chunks, group_size)

    def program(rank: int) -> Iterator[Action]:
        forwards, backwards = _sequences(rank, num_ranks, num_microbatches, num_chunks, group_size)
        warmup = (num_chunks - 1) * group_size + 2 * (num_ranks - 1 - rank) + 1
        return alternate(forwards, backwards, warmup)

    return from_ranks(program, num_ranks, num_microbatches, num_chunks)


def interleaved_gpipe(
    num_ranks: int, num_microbatches: int, *, num_chunks: int = 2, group_size: int
) -> Schedule:
    """Interleaved GPipe: runs every forward in interleaved order, then every backward.

    The bubble is v times smaller than that of GPipe.
    """
    _require_full_groups(num_ranks, num_microbatches, num_chunks, group_size)

    def program(rank: int) -> Iterator[Action]:
        forwards, backwards = _sequences(rank, num_ranks, num_microbatches, num_chunks, group_size)
        yield from forwards
        yield from backwards

    return from_ranks(program, num_ranks, num_microbatches, num_chunks)


def interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, *, num_chunks: int = 2, group_size: int
) -> Schedule:
    """Interleaved 1F1B with half the warmup and the first r W's of rank r postponed.

    References:
        The interleaved ZB-H1 of Qi et al., 2023, arXiv 2401.10241, as torch orders it.
    """
    _require_full_groups(num_ranks, num_microbatches, num_chunks, group_size)

    def program(rank: int) -> Iterator[Action]:
        forwards, backwards = _sequences(rank, num_ranks, num_microbatches, num_chunks, group_size)
        warmup = (num_chunks - 1) * group_size + (num_ranks - 1 - rank)
        return _split_backwards(alternate(forwards, backwards, warmup), postponed=rank)

    return from_ranks(program, num_ranks, num_microbatches, num_chunks)


def grouped_interleaved(
    num_ranks: int, num_microbatches: int, *, num_chunks: int = 2, group_size: int
) -> Schedule:
    """Interleaved 1F1B in groups shorter than the pipeline: trades a larger bubble for less memory.

    A forward and its successor chunk are only g microbatches apart, so a microbatch returns while
    the next ones wait, and fewer are alive.

    References:
        PipeOffload, Wan et al., 2025, arXiv 2503.01328, "generalised interleaved schedule".
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    shortest = (num_ranks + 1) // 2
    require(
        shortest <= group_size <= num_ranks,
        f"`group_size` is {group_size} for {num_ranks} ranks.",
        f"Give {shortest} (least memory) to {num_ranks} (least bubble).",
    )
    # Built for whole groups, then cut: the order of the rest does not depend on what is missing.
    whole = -(-num_microbatches // group_size) * group_size

    def program(rank: int) -> Iterator[Action]:
        forwards, backwards = _sequences(rank, num_ranks, whole, num_chunks, group_size)
        warmup = (num_chunks - 1) * group_size + (num_ranks - 1 - rank)
        steps = _split_backwards(alternate(forwards, backwards, warmup), postponed=0)
        return (action for action in steps if action.microbatch < num_microbatches)

    return from_ranks(program, num_ranks, num_microbatches, num_chunks)


def _sequences(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int
) -> tuple[list[Action], list[Action]]:
    """Returns a rank's forwards and backwards, ordered by group, chunk and microbatch."""
    forwards, backwards = [], []
    for first in range(0, num_microbatches, group_size):
        group = range(first, min(first + group_size, num_microbatches))
        for chunk in range(num_chunks):
            stage = loop_stage(rank, chunk, num_ranks)
            mirror = loop_stage(rank, num_chunks - 1 - chunk, num_ranks)
            forwards += [Action(stage, Op.F, m) for m in group]
            backwards += [Action(mirror, Op.B, m) for m in group]
    return forwards, backwards


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> Iterator[Action]:
    """Yields `warmup` forwards, then a forward and a backward in turn, then the other backwards."""
    yield from forwards[:warmup]
    for k, backward in enumerate(backwards):
        yield from forwards[warmup + k : warmup + k + 1]
        yield backward


def _split_backwards(actions: Iterator[Action], *, postponed: int) -> Iterator[Action]:
    """Turns every B into an I, and yields its W after `postponed` more backwards."""
    pending: list[Action] = []
    for action in actions:
        if action.op is not Op.B:
            yield action
            continue
        yield Action(action.stage, Op.I, action.microbatch)
        pending.append(Action(action.stage, Op.W, action.microbatch))
        if len(pending) > postponed:
            yield pending.pop(0)
    yield from pending


def _require_full_groups(
    num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int
) -> None:
    """Refuses groups shorter than the pipeline: they return too late for their next chunk."""
    require_positive(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        group_size=group_size,
    )
    if num_microbatches <= group_size:
        return
    rest = num_microbatches % group_size
    require(
        group_size >= num_ranks,
        f"`group_size` is {group_size} for {num_ranks} ranks.",
        f"Give at least {num_ranks}, or choose grouped_interleaved.",
    )
    require(
        rest == 0 or rest >= num_ranks,
        f"`group_size` {group_size} leaves a last group of {rest} of {num_microbatches} "
        f"microbatches, fewer than {num_ranks} ranks.",
        "Give a divisor of `num_microbatches`, or a larger rest.",
    )
