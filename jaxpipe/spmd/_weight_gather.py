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

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ..autodiff import floating, index_leading
from ..sharding import (
    GATHERED_AXES,
    Rules,
    axes_of,
    constrain_with,
    gathered_rules,
    partition_spec,
    without_axes,
)
from ._ranks import is_spec, names_of, zeros

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
    kept = _specs(logical, whole_rules)
    hold = _constrained(logical, whole_rules)
    as_gradients = _constrained(logical, gradient_rules or rules)

    def gather(tree: PyTree) -> PyTree:
        return hold(_map(_all_gather, tree, stored, whole, kept))

    def scatter(tree: PyTree) -> PyTree:
        return as_gradients(_map(partial(_reduce_scatter, batch_axes), tree, of_gradients, kept))

    return Gather(when, cast, gather, hold, scatter, batch_axes, stored, of_gradients)


def gather_in_layers(
    logical: PyTree,
    rules: Rules,
    *,
    batch_axes: tuple[str, ...] = (),
    gradient_rules: Rules | None = None,
) -> Gather:
    """A `Gather` for a stage whose layers gather their own weights, with `layer_gather`.

    The arguments are those of `gather_weights`. Gradients come out of such a stage as its weights
    are stored; what is left to do after the last tick is to sum them over the axes that do not
    split them, and with ZeRO-1 to scatter them further.
    """
    stored, of_gradients = (
        _manual_specs(logical, r, batch_axes) for r in (rules, gradient_rules or rules)
    )
    hold = _constrained(logical, rules)
    as_gradients = _constrained(logical, gradient_rules or rules)
    kept = _specs(logical, gathered_rules(rules))

    def sum_up(x: jax.Array, done: PartitionSpec, spec: PartitionSpec, kept: PartitionSpec):
        axes = tuple(a for a in batch_axes if a not in axes_of(done))
        return _reduce_scatter(axes, x, _without(spec, done), kept)

    def scatter(tree: PyTree) -> PyTree:
        return as_gradients(_map(sum_up, tree, stored, of_gradients, kept))

    return Gather("once", same, same, hold, scatter, batch_axes, stored, of_gradients)


def layer_gather(
    logical: PyTree, rules: Rules, *, cast: Trees = same, batch_axes: tuple[str, ...] = ()
) -> Callable[[PyTree, PyTree], PyTree]:
    """`(stored weights of a layer, what it is given) -> whole weights`. Their gradients are
    scattered in float32.

    Args:
        logical: A tuple of logical axes for every weight of a layer.
        rules: From logical axes to mesh axes.
        cast: Before they are gathered: to the dtype that the layer computes in.
        batch_axes: As in `Gather`.
    """
    stored = _manual_specs(logical, rules, batch_axes)
    kept = _specs(logical, gathered_rules(rules))
    whole = gather_weights(logical, rules, when="tick", batch_axes=batch_axes).whole
    as_stored = _constrained(logical, rules)

    def scatter(x: jax.Array, spec: PartitionSpec, kept: PartitionSpec) -> jax.Array:
        return _reduce_scatter(tuple(a for d in spec for a in names_of(d)), x, spec, kept)

    @jax.custom_vjp
    def gather(weights: PyTree, given: PyTree) -> PyTree:
        return whole(cast(jax.tree.map(partial(only_after, given), weights)))

    def forward(weights: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
        # The dtypes, in something that JAX takes for arrays.
        return gather(weights, given), jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), weights)

    def backward(like: PyTree, gradients: PyTree) -> tuple[PyTree, None]:
        scattered = as_stored(_map(scatter, wide(gradients), stored, kept))
        return jax.tree.map(lambda g, x: g.astype(x.dtype), scattered, like), None

    gather.defvjp(forward, backward)
    return lambda weights, given: gather(weights, lax.stop_gradient(given))


def only_after(given: PyTree, x: jax.Array) -> jax.Array:
    """`x`, in a way that XLA can neither compute nor cast before `given` is there.

    Otherwise it casts all weights before the loop over layers, even through a barrier, and holds a
    copy of them. Integers it does not cast.
    """
    if x.dtype != jnp.float32:
        return lax.optimization_barrier((x, given))[0]
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(lax.optimization_barrier((bits, given))[0], x.dtype)


def _without(spec: PartitionSpec, done: PartitionSpec) -> PartitionSpec:
    """What `spec` splits more than `done`."""
    return PartitionSpec(
        *(
            tuple(a for a in names_of(axes) if a not in names_of(before)) or None
            for axes, before in zip(spec, done, strict=True)
        )
    )


def _map(f: Callable, tree: PyTree, *specs: PyTree) -> PyTree:
    """Over the leaves of `tree` that are there."""

    def of_leaf(x, *spec):
        return None if x is None else f(x, *spec)

    return jax.tree.map(of_leaf, tree, *specs, is_leaf=lambda x: x is None)


def _constrained(logical: PyTree, rules: Rules) -> Trees:
    return lambda tree: _map(constrain_with(rules), tree, logical)


def _manual_specs(logical: PyTree, rules: Rules, axes: tuple[str, ...]) -> PyTree:
    """For every weight, how it is split over `axes`."""
    return jax.tree.map(lambda spec: _only(spec, axes), _specs(logical, rules), is_leaf=is_spec)


def _specs(logical: PyTree, rules: Rules) -> PyTree:
    """For every weight, how it is split over all axes."""
    return jax.tree.map(
        lambda axes: partition_spec(axes, rules), logical, is_leaf=lambda x: isinstance(x, tuple)
    )


def _only(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    return without_axes(spec, axes_of(spec).difference(axes))


def _all_gather(
    x: jax.Array, stored: PartitionSpec, whole: PartitionSpec, kept: PartitionSpec
) -> jax.Array:
    """From `stored` to `whole`, over manual axes; automatic ones split it as `kept` throughout."""
    gathered = [
        tuple(axis for axis in names_of(axes) if axis not in names_of(rest))
        for axes, rest in zip(stored, whole, strict=True)
    ]

    def gather(x: jax.Array) -> jax.Array:
        for dim, axes in enumerate(gathered):
            x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
        return x

    return _on_shards(gather, x, kept, moved=gathered)


def _reduce_scatter(
    axes: tuple[str, ...], x: jax.Array, spec: PartitionSpec, kept: PartitionSpec
) -> jax.Array:
    """Sums over the devices of `axes`; each keeps its shard. Automatic axes as in `_all_gather`.

    A compiler that knows that a sum is split later splits it from the start, inside the loop that
    makes it: that is one reduce-scatter per tick. The boundary of a `shard_map` over the automatic
    axes stops it. Then sums can stay on their devices until the loop has ended.
    """
    rest = tuple(axis for axis in axes if axis not in axes_of(spec))

    def sum_up(x: jax.Array) -> jax.Array:
        for dim, names in enumerate(spec):
            x = lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if names else x
        return lax.psum(x, rest) if rest else x

    return _on_shards(sum_up, x, kept, moved=[*map(names_of, spec)], also=GATHERED_AXES)


def _on_shards(
    f: Trees,
    x: jax.Array,
    kept: PartitionSpec,
    *,
    moved: Sequence[tuple[str, ...]],
    also: Collection[str] = (),
) -> jax.Array:
    """`f`, which communicates over manual axes, of shards over the automatic axes of `kept`.

    XLA's partitioner makes an operand of a manual collective whole over automatic axes, and splits
    the result again. Where a dim is split over both kinds it cannot be done by hand either.

    Args:
        f: The function.
        x: Its argument.
        kept: How `x` is split, before and after.
        moved: For every dim the manual axes over which `f` communicates.
        also: Axes over which `x` is whole, and `f` a boundary.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {a for a in mesh.axis_names if mesh.shape[a] > 1} - set(mesh.manual_axes)
    spec, boundary = _only(kept, automatic), automatic.intersection(also)
    if any(names and axes for names, axes in zip(spec, moved, strict=True)):
        return f(_inside(same, x, WHOLE, boundary))
    split = axes_of(spec)
    return _inside(f, x, spec, boundary | split if any(moved) or boundary else boundary)


def _inside(f: Trees, x: jax.Array, spec: PartitionSpec, axes: set[str]) -> jax.Array:
    """`f` of shards over `axes`."""
    if not axes:
        return f(x)
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names=axes)(x)


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
        return index_leading(weights, repeat)

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
            window = lambda _, j: index_leading(copy, j)  # noqa: E731

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
        return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x

    return jax.tree.map(widen, tree)
