"""When and how weights that are split over fsdp and its like become whole for a stage.

Three moments, with one contract. What a repeat needs comes `ahead` of it, for all ranks at once. A
rank makes its `window` of that when it begins the repeat, and holds it to the end. A tick `reads`
weights from the window and `gives` gradients, which add up in float32; `close` ends the repeat.

|        | ahead   | window             | read    | give            | close           |
|--------|---------|--------------------|---------|-----------------|-----------------|
| tick   |         | as stored          | gathers | reduce-scatters |                 |
| repeat | gathers | what came ahead    |         |                 | reduce-scatters |
| once   |         | of a gathered copy |         |                 | reduce-scatters |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ..autodiff import at, floating
from ..sharding import (
    GATHERED_AXES,
    LogicalAxes,
    Rules,
    constrain_with,
    gathered_rules,
    partition_spec,
)
from ._ranks import names_of, zeros

Trees = Callable[[PyTree], PyTree]
When = Literal["tick", "repeat", "once"]
WHOLE = PartitionSpec()


def same(tree: PyTree) -> PyTree:
    return tree


@dataclass(frozen=True)
class Gather:
    """How the weights of one stage become what the stage reads.

    Attributes:
        when: In every `tick`; `once` before the first; or once per `repeat`, ahead of it: a rank
            holds the weights of its repeat and those of the next, while others are on their way.
        cast: Of the weights of one stage, before they are gathered: to the dtype it computes in.
        whole: From stored to whole: gathers.
        hold: Keeps gradients that add up over ticks whole; no communication.
        scatter: From whole gradients to stored: sums over devices.
        batch_axes: Mesh axes, beside `stage`, that are manual in the pipeline: each device calls
            the stage with its own rows. Then gathers and sums are exactly those above, whatever the
            compiler; without them it decides.
        weight_specs: How stored weights of one stage are split over `batch_axes`.
        gradient_specs: The same for their gradients.
    """

    when: When = "tick"
    cast: Trees = same
    whole: Trees = same
    hold: Trees = same
    scatter: Trees = same
    batch_axes: tuple[str, ...] = ()
    weight_specs: PyTree = WHOLE
    gradient_specs: PyTree = WHOLE


def gather_weights(
    logical: PyTree,
    rules: Rules,
    *,
    when: When,
    cast: Trees = same,
    batch_axes: tuple[str, ...] = (),
    gradient_rules: Rules | None = None,
) -> Gather:
    """A `Gather` for weights described by logical axes, over fsdp, context and expert.

    Args:
        logical: A tuple of logical axes for every weight of one stage, as in `[layers, ...]`.
        rules: From logical axes to mesh axes.
        when: As in `Gather`.
        cast: As in `Gather`.
        batch_axes: As in `Gather`. Only for a stage that treats rows one by one, or communicates
            over these axes itself.
        gradient_rules: Rules for gradients, if they are split more than the weights (ZeRO-1).
    """
    whole_rules = gathered_rules(rules)
    stored, whole, of_gradients = (
        _manual_specs(logical, r, batch_axes) for r in (rules, whole_rules, gradient_rules or rules)
    )
    hold = _constrained(logical, whole_rules)
    as_gradients = _constrained(logical, gradient_rules or rules)

    def gather(tree: PyTree) -> PyTree:
        return hold(_map(_all_gather, tree, stored, whole))

    def scatter(tree: PyTree) -> PyTree:
        def sum_up(x, spec):
            return _reduce_scatter(x, spec, batch_axes)

        return as_gradients(_map(sum_up, _wall(tree), of_gradients))

    return Gather(when, cast, gather, hold, scatter, batch_axes, stored, of_gradients)


def _map(f: Callable, tree: PyTree, *specs: PyTree) -> PyTree:
    """Over the leaves of `tree` that are there."""

    def of_leaf(x, *spec):
        return None if x is None else f(x, *spec)

    return jax.tree.map(of_leaf, tree, *specs, is_leaf=lambda x: x is None)


def _constrained(logical: PyTree, rules: Rules) -> Trees:
    return lambda tree: _map(constrain_with(rules), tree, logical)


def _manual_specs(logical: PyTree, rules: Rules, axes: tuple[str, ...]) -> PyTree:
    """For every weight, how it is split over `axes`."""

    def spec(of_weight: LogicalAxes) -> PartitionSpec:
        dims = map(names_of, partition_spec(of_weight, rules))
        return PartitionSpec(*(tuple(a for a in names if a in axes) or None for names in dims))

    return jax.tree.map(spec, logical, is_leaf=lambda x: isinstance(x, tuple))


def _all_gather(x: jax.Array, stored: PartitionSpec, whole: PartitionSpec) -> jax.Array:
    for dim, (axes, kept) in enumerate(zip(stored, whole, strict=True)):
        gathered = tuple(axis for axis in names_of(axes) if axis not in names_of(kept))
        x = lax.all_gather(x, gathered, axis=dim, tiled=True) if gathered else x
    return x


def _reduce_scatter(x: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """Sums over the devices of `axes`; each keeps its shard."""
    scattered = {axis for names in spec for axis in names_of(names)}
    rest = tuple(axis for axis in axes if axis not in scattered)
    for dim, names in enumerate(spec):
        x = lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if names else x
    return lax.psum(x, rest) if rest else x


def _wall(tree: PyTree) -> PyTree:
    """`tree`, whole over the automatic axes, whatever it is used for afterwards.

    A compiler that knows that a sum is split later splits it from the start, inside the loop that
    makes it: that is one reduce-scatter per tick. The boundary of a `shard_map` stops it. Then the
    sums can stay on their devices until the loop has ended, and are reduce-scattered once.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = {axis for axis in GATHERED_AXES if mesh.shape.get(axis, 1) > 1} - set(mesh.manual_axes)
    if not axes:
        return tree
    return jax.shard_map(same, in_specs=WHOLE, out_specs=WHOLE, axis_names=axes)(tree)


EACH_TICK = Gather()
"""Gathers in every tick, as the compiler likes."""


class Access(NamedTuple):
    """How a rank gets at its weights: the functions of the table above, and where gradients start.

    Attributes:
        ahead: From a repeat's number to what is gathered before any rank begins it.
        window: From that and the repeat's number to what the rank holds while it runs.
        read: From a window to the weights that a stage reads.
        give: From gradients of these, to float32 gradients that add up over ticks.
        close: From a repeat's sum of these, to gradients as they are stored.
        zeros: From a window to a sum of nothing.
        gradients: From a number of repeats to room for their gradients, with that dim in front.
    """

    ahead: Callable[[Any], PyTree]
    window: Callable[[PyTree, Any], PyTree]
    read: Trees
    give: Trees
    close: Trees
    zeros: Trees
    gradients: Callable[[int], PyTree]


def access(gather: Gather, weights: PyTree) -> Access:
    """Access to weights with [R, ...] leaves."""

    def stored(repeat: Any) -> PyTree:
        return at(weights, repeat)

    def gathered(w: PyTree) -> PyTree:
        return gather.whole(gather.cast(w))

    def held(dw: PyTree) -> PyTree:
        return gather.hold(wide(dw))

    def scattered(dw: PyTree) -> PyTree:
        return gather.scatter(wide(dw))

    def nothing_ahead(repeat: Any) -> PyTree:
        del repeat
        return ()

    ahead, read, give, close = nothing_ahead, same, held, gather.scatter
    match gather.when:
        case "tick":
            window = lambda _, j: stored(j)  # noqa: E731
            read, give, close = gathered, scattered, same
        case "repeat":
            ahead = lambda j: gathered(stored(j))  # noqa: E731
            window = lambda there, _: there  # noqa: E731
        case "once":
            copy = jax.vmap(gathered)(weights)
            window = lambda _, j: at(copy, j)  # noqa: E731

    # Only the types of what these two compute are used.
    def nothing(w: PyTree) -> PyTree:
        return jax.tree.map(zeros, give(floating(read(w))))

    def gradients(num_repeats: int) -> PyTree:
        closed = close(nothing(window(ahead(0), 0)))
        return jax.tree.map(lambda x: zeros(x, lead=(num_repeats,)), closed)

    return Access(ahead, window, read, give, close, nothing, gradients)


def wide(tree: PyTree) -> PyTree:
    """Gradients add up over microbatches in float32 at least."""

    def widen(x: jax.Array) -> jax.Array:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    return jax.tree.map(widen, tree)
