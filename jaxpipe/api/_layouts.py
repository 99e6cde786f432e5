"""The layers of every stage, as even as possible: in number, or by what they cost."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

_LEAST_GAIN = 0.05
"""The share of the largest stage that uneven numbers of layers must save.

In one program each stage has room for as many layers as the largest one.
"""


def layer_counts(
    num_layers: int,
    num_stages: int,
    given: tuple[int, ...] | None,
    costs: Sequence[float] | None,
) -> tuple[int, ...]:
    """Returns the layers of every stage: those that are given, or as even as possible by costs."""
    if given is None:
        is_even = costs is None
        return even_counts(num_layers, num_stages) if is_even else counts_by_cost(costs, num_stages)
    if sum(given) != num_layers or len(given) != num_stages:
        raise ValueError(
            f"`layers_per_stage` is {given}: {sum(given)} layers in {len(given)} stages. The model "
            f"has {num_layers} layers and the schedule {num_stages} stages."
        )
    return given


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns the layers of every stage, as even as possible.

    If they do not divide, the stages after the first have one more, and the last ones have it last:
    the first and the last also run embedding and loss.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"The model has {num_layers} layers and the schedule {num_stages} stages. Give fewer "
            "ranks or chunks, so that every stage has a layer."
        )
    least, more = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1][:more]
    return tuple(least + (stage in order) for stage in range(num_stages))


def counts_by_cost(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Divides layers so that the stage that costs most costs least.

    Of the divisions with the cheapest largest stage it is the one with the least sum of squares of
    stages. `even_counts` stays if it saves less than `_LEAST_GAIN` of the largest stage.

    Args:
        costs: The cost of each layer, in forward order.
        num_stages: The number of stages.

    Returns:
        Layers of every stage, at least one.

    Example:
        >>> counts_by_cost([1, 1, 1, 1, 1, 1, 3, 3], num_stages=4)
        (3, 3, 1, 1)
    """
    even, sums = even_counts(len(costs), num_stages), [0.0, *accumulate(costs)]

    def largest(counts: Sequence[int]) -> float:
        ends = [0, *accumulate(counts)]
        return max(sums[b] - sums[a] for a, b in pairwise(ends))

    # best[k]: (largest stage, sum of squares, counts) of stage - 1 stages of the first
    # k + stage - 1 layers.
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for stage in range(1, num_stages + 1):
        last = len(costs) - num_stages + stage
        best = [
            min(
                (
                    max(best[k][0], sums[n] - sums[k + stage - 1]),
                    best[k][1] + (sums[n] - sums[k + stage - 1]) ** 2,
                    (*best[k][2], n - k - stage + 1),
                )
                for k in range(min(len(best), n - stage + 1))
            )
            for n in range(stage, last + 1)
        ]
    counts = best[-1][2]
    return counts if largest(counts) < largest(even) * (1 - _LEAST_GAIN) else even
