"""When and how weights that are sharded over fsdp and similar axes are gathered for a stage.

Weights are gathered in every tick, once per repeat, or once: three implementations of one contract.
`ahead` gathers the weights of a repeat before it begins, for all ranks at once. A rank makes its
`window` of them when it begins the repeat, and holds it until the repeat ends. In a tick, `read`
returns the weights in the window for the stage, and `give` takes their gradients, which are
accumulated in float32; `close` reduce-scatters the gradients of a repeat at its end.

|        | ahead   | window             | read    | give            | close           |
|--------|---------|--------------------|---------|-----------------|-----------------|
| tick   |         | as stored          | gathers | reduce-scatters |                 |
| repeat | gathers | result of `ahead`  |         |                 | reduce-scatters |
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

from ..autodiff._model import index_leading
from ..autodiff._pullback import floating
from ..sharding import Rules, constrain_with, partition_spec
from ..sharding._rules import GATHERED_AXES, gathered_rules
from ..sharding._specs import axes_of, axes_of_dim, without_axes
from ._ranks import is_spec
from ._varying import zeros

Trees = Callable[[PyTree], PyTree]
When = Literal["tick", "repeat", "once"]
WHOLE = PartitionSpec()


def same(tree: PyTree) -> PyTree:
    return tree


@dataclass(frozen=True)
class Gather:
    """Functions that gather the weights of one stage and reduce-scatter their gradients.

    Attributes:
        when: In every `tick`; `once` before the first; or once per `repeat`, ahead of it: a rank
            holds the weights of its repeat and those of the next, while a third set is gathered.
        cast: Casts the weights of one stage, before they are gathered, to its compute dtype.
        whole: Gathers stored weights.
        hold: Constrains gradients that are accumulated over ticks to stay unsharded, without
            communication.
        scatter: Sums whole gradients over devices and shards them as they are stored.
        batch_axes: Mesh axes, beside `stage`, that are manual in the pipeline: each device calls
            the stage with its own rows. With them the program contains exactly the gathers and sums
            of `whole` and `scatter`; without them XLA's partitioner decides.
        weight_specs: How stored weights of one stage are sharded over `batch_axes`.
        gradient_specs: How their stored gradients are sharded over `batch_axes`.
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
    """Returns a `Gather` for weights described by logical axes, over fsdp, context and expert.

    Args:
        logical: A tuple of logical axes for every weight of one stage, as in `[layers, ...]`.
        rules: From logical axes to mesh axes.
        when: Gather in every "tick", "once", or once per "repeat".
        cast: Casts the weights to the compute dtype before they are gathered.
        batch_axes: Mesh axes, beside `stage`, that are manual in the pipeline. Only for a stage
            that treats rows one by one, or communicates over these axes itself.
        gradient_rules: Rules for gradients, if they are sharded more than the weights (ZeRO-1).

    Returns:
        A `Gather` whose specs are those of `logical` under the rules, over `batch_axes`.
    """
    whole_rules = gathered_rules(rules)
    stored, whole, grad_specs = (
        _manual_specs(logical, r, batch_axes) for r in (rules, whole_rules, gradient_rules or rules)
    )
    kept = _specs(logical, whole_rules)
    hold = _constrained(logical, whole_rules)
    as_gradients = _constrained(logical, gradient_rules or rules)

    def gather(tree: PyTree) -> PyTree:
        return hold(_map(_all_gather, tree, stored, whole, kept))

    def scatter(tree: PyTree) -> PyTree:
        return as_gradients(_map(partial(_reduce_scatter, batch_axes), tree, grad_specs, kept))

    return Gather(when, cast, gather, hold, scatter, batch_axes, stored, grad_specs)


def gather_in_layers(
    logical: PyTree,
    rules: Rules,
    *,
    batch_axes: tuple[str, ...] = (),
    gradient_rules: Rules | None = None,
) -> Gather:
    """Returns a `Gather` for a stage whose layers gather their own weights, with `layer_gather`.

    The gradients of such a stage are sharded as its weights are stored. After the last tick they
    are only summed over the axes that do not shard them, and with ZeRO-1 scattered further. The
    arguments mean the same as in `gather_weights`.
    """
    stored, grad_specs = (
        _manual_specs(logical, r, batch_axes) for r in (rules, gradient_rules or rules)
    )
    hold = _constrained(logical, rules)
    as_gradients = _constrained(logical, gradient_rules or rules)
    kept = _specs(logical, gathered_rules(rules))

    def sum_up(x: jax.Array, done: PartitionSpec, spec: PartitionSpec, kept: PartitionSpec):
        axes = tuple(a for a in batch_axes if a not in axes_of(done))
        return _reduce_scatter(axes, x, _without(spec, done), kept)

    def scatter(tree: PyTree) -> PyTree:
        return as_gradients(_map(sum_up, tree, stored, grad_specs, kept))

    return Gather("once", same, same, hold, scatter, batch_axes, stored, grad_specs)


def layer_gather(
    logical: PyTree, rules: Rules, *, cast: Trees = same, batch_axes: tuple[str, ...] = ()
) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns a function that gathers the weights of one layer inside a stage.

    Args:
        logical: A tuple of logical axes for every weight of a layer.
        rules: From logical axes to mesh axes.
        cast: Casts the weights to the compute dtype before they are gathered.
        batch_axes: Mesh axes, beside `stage`, that are manual in the pipeline.

    Returns:
        `(stored weights, input of the layer) -> whole weights`. They are gathered only after the
        input is computed; their gradients are reduce-scattered in float32.
    """
    stored = _manual_specs(logical, rules, batch_axes)
    kept = _specs(logical, gathered_rules(rules))
    whole = gather_weights(logical, rules, when="tick", batch_axes=batch_axes).whole
    as_stored = _constrained(logical, rules)

    def scatter(x: jax.Array, spec: PartitionSpec, kept: PartitionSpec) -> jax.Array:
        return _reduce_scatter(tuple(a for d in spec for a in axes_of_dim(d)), x, spec, kept)

    @jax.custom_vjp
    def gather(weights: PyTree, given: PyTree) -> PyTree:
        return whole(cast(jax.tree.map(partial(only_after, given), weights)))

    def forward(weights: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
        # Residuals must be arrays: empty ones carry the dtypes.
        return gather(weights, given), jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), weights)

    def backward(like: PyTree, gradients: PyTree) -> tuple[PyTree, None]:
        scattered = as_stored(_map(scatter, wide(gradients), stored, kept))
        return jax.tree.map(lambda g, x: g.astype(x.dtype), scattered, like), None

    gather.defvjp(forward, backward)
    return lambda weights, given: gather(weights, lax.stop_gradient(given))


def only_after(given: PyTree, x: jax.Array) -> jax.Array:
    """Returns `x`, which XLA can neither use nor cast before `given` is computed.

    Otherwise XLA casts all weights before the loop over layers, even through a barrier, and holds a
    copy of them. It does not cast integers, so float32 passes the barrier as uint32.
    """
    if x.dtype != jnp.float32:
        return lax.optimization_barrier((x, given))[0]
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(lax.optimization_barrier((bits, given))[0], x.dtype)


def _without(spec: PartitionSpec, done: PartitionSpec) -> PartitionSpec:
    """Returns `spec` without the axes that `done` has in the same dim."""
    return PartitionSpec(
        *(
            tuple(a for a in axes_of_dim(axes) if a not in axes_of_dim(before)) or None
            for axes, before in zip(spec, done, strict=True)
        )
    )


def _map(f: Callable, tree: PyTree, *specs: PyTree) -> PyTree:
    """Maps `f` over the leaves of `tree` that are not None."""

    def map_leaf(x, *spec):
        return None if x is None else f(x, *spec)

    return jax.tree.map(map_leaf, tree, *specs, is_leaf=lambda x: x is None)


def _constrained(logical: PyTree, rules: Rules) -> Trees:
    return lambda tree: _map(constrain_with(rules), tree, logical)


def _manual_specs(logical: PyTree, rules: Rules, axes: tuple[str, ...]) -> PyTree:
    """Returns the spec of every weight, restricted to `axes`."""
    return jax.tree.map(lambda spec: _only(spec, axes), _specs(logical, rules), is_leaf=is_spec)


def _specs(logical: PyTree, rules: Rules) -> PyTree:
    """Returns the spec of every weight over all mesh axes."""
    return jax.tree.map(
        lambda axes: partition_spec(axes, rules), logical, is_leaf=lambda x: isinstance(x, tuple)
    )


def _only(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    return without_axes(spec, axes_of(spec).difference(axes))


def _all_gather(
    x: jax.Array, stored: PartitionSpec, whole: PartitionSpec, kept: PartitionSpec
) -> jax.Array:
    """Gathers `x` from `stored` to `whole` over manual axes; automatic axes shard it as `kept`."""
    gathered = [
        tuple(axis for axis in axes_of_dim(axes) if axis not in axes_of_dim(rest))
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
    """Sums over the devices of `axes` and returns each its shard; automatic axes shard as `kept`.

    If XLA sees that a sum is sharded later, it shards the sum inside the loop that accumulates it,
    with one reduce-scatter per tick. The boundary of a `shard_map` over the automatic axes prevents
    that, so that partial sums stay on their devices until the loop has ended.
    """
    rest = tuple(axis for axis in axes if axis not in axes_of(spec))

    def sum_up(x: jax.Array) -> jax.Array:
        for dim, names in enumerate(spec):
            x = lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if names else x
        return lax.psum(x, rest) if rest else x

    return _on_shards(sum_up, x, kept, moved=[*map(axes_of_dim, spec)], also=GATHERED_AXES)


def _on_shards(
    f: Trees,
    x: jax.Array,
    kept: PartitionSpec,
    *,
    moved: Sequence[tuple[str, ...]],
    also: Collection[str] = (),
) -> jax.Array:
    """Applies `f`, which communicates over manual axes, to shards over automatic axes of `kept`.

    XLA's partitioner would gather the operand of a manual collective over automatic axes, and shard
    the result again. A dim that is sharded over both kinds of axes is left to the partitioner.

    Args:
        f: The function.
        x: Its argument.
        kept: How `x` is sharded, before and after.
        moved: For every dim the manual axes over which `f` communicates.
        also: Axes that do not shard `x`, but become manual around `f`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {a for a in mesh.axis_names if mesh.shape[a] > 1} - set(mesh.manual_axes)
    spec, boundary = _only(kept, automatic), automatic.intersection(also)
    if any(names and axes for names, axes in zip(spec, moved, strict=True)):
        return f(_inside(same, x, WHOLE, boundary))
    split = axes_of(spec)
    return _inside(f, x, spec, boundary | split if any(moved) or boundary else boundary)


def _inside(f: Trees, x: jax.Array, spec: PartitionSpec, axes: set[str]) -> jax.Array:
    """Applies `f` to shards over `axes`."""
    if not axes:
        return f(x)
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names=axes)(x)


EACH_TICK = Gather()
"""Gathers in every tick, with collectives that XLA's partitioner chooses."""


class Access(NamedTuple):
    """Functions of the table above, and initial gradients, for the weights of one rank.

    Attributes:
        ahead: Maps the index of a repeat to the weights gathered before any rank begins it.
        window: Maps these and the index to the weights that the rank holds during the repeat.
        read: Maps a window to the weights that a stage reads.
        give: Maps gradients of these to float32 gradients, which are accumulated over ticks.
        close: Maps a repeat's sum of these to gradients sharded as they are stored.
        zeros: Maps a window to the initial sum, zeros.
        gradients: Maps a number of repeats to zero gradients as stored, with that dim in front.
    """

    ahead: Callable[[Any], PyTree]
    window: Callable[[PyTree, Any], PyTree]
    read: Trees
    give: Trees
    close: Trees
    zeros: Trees
    gradients: Callable[[int], PyTree]


def access(gather: Gather, weights: PyTree) -> Access:
    """Returns the functions of `Access` for weights with [R, ...] leaves."""

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
    """Casts to float32 if narrower: the dtype in which gradients are summed over microbatches."""

    def widen(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x

    return jax.tree.map(widen, tree)
