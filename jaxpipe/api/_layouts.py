"""The layers of every stage, as even as possible: in number, or by the work of a layer."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import jax
from jaxtyping import PyTree

from ..ir.graph import flops
from ..kernels import trace_to_read
from ._kinds import check_all, stack_all
from ._model import Model
from ._packed_x import layer_with_weights, x_of_layers
from ._pieces import shape_of

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


def layer_flops(model: Model, params: PyTree, batch: PyTree) -> dict[str, float]:
    """Counts the floating-point operations of a layer of each kind, forwards, by its program.

    They are two for each term of a matrix product, none for equations that only move or cast
    numbers, and one for each other number. A `while` loop counts one iteration, a `cond` its
    dearest branch, and a kernel that is not of Pallas its results.

    Args:
        model: A model with several kinds of layers.
        params: Parameters in the user's tree, or their shapes.
        batch: [B, ...] leaves, or their shapes.

    Returns:
        Operations for the batch by kind, for `Model.layer_costs`.

    Raises:
        ValueError: If the model has one kind of layers.

    Example:
        >>> import jax.numpy as jnp
        >>> kinds = {"wide": lambda w, x, batch: x @ w @ w.T, "narrow": lambda w, x, batch: x * w}
        >>> model = Model(lambda w, batch: batch, kinds, lambda w, x, batch: x.mean())
        >>> layers = {"wide": [jnp.ones((4, 8))], "narrow": [jnp.ones(4)]}
        >>> layer_flops(model, {"embed": (), "layers": layers, "head": ()}, jnp.ones((2, 4)))
        {'wide': 256.0, 'narrow': 8.0}
    """
    if not model.has_kinds:
        raise ValueError("`model` has one kind of layers, which all cost the same.")
    batch = jax.tree.map(shape_of, batch)
    kinds, groups = one_of_each_kind(model, params)
    key = jax.eval_shape(lambda: jax.random.key(0)) if model.takes_key else ()
    flops_by_kind: dict[str, float] = {}
    for kind, x in zip(kinds, x_of_layers(model, kinds, groups, batch, key), strict=False):
        if kind not in flops_by_kind:
            function, weights = layer_with_weights(model, kind, groups)
            with trace_to_read():
                closed = jax.make_jaxpr(function)(weights, x, batch, key)
            flops_by_kind[kind] = flops(closed.jaxpr)
    return flops_by_kind


def one_of_each_kind(model: Model, params: PyTree) -> tuple[tuple[str, ...], dict[str, PyTree]]:
    """Returns the kind of every layer in order, and groups with the layers of one of each kind."""
    groups = jax.eval_shape(model.to_groups, jax.tree.map(shape_of, params))
    num_layers, _ = check_all(model.layer, groups["layers"])
    stacked = jax.eval_shape(lambda layers: stack_all(model.layer, layers), groups["layers"])
    groups["layers"] = jax.tree.map(lambda x: shape_of(x, 1), stacked)
    pairs = () if isinstance(num_layers, int) else num_layers
    return tuple(model.order or (kind for kind, count in pairs for _ in range(count))), groups
