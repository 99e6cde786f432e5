"""When and how weights that are sharded over fsdp and similar axes are gathered for a stage.

Weights are gathered in every tick, once per repeat, or once: three implementations of one contract.
`prefetch` gathers the weights of a repeat before it begins, for all ranks at once. A rank makes its
`window` of them when it begins the repeat, and holds it until the repeat ends. In a tick, `unshard`
returns the weights in the window for the stage, and `accumulate` adds their gradients in float32;
`reduce_scatter` sums the gradients of a repeat over devices at its end.

|        | prefetch | window               | unshard | accumulate      | reduce_scatter  |
|--------|----------|----------------------|---------|-----------------|-----------------|
| tick   |          | as stored            | gathers | reduce-scatters |                 |
| repeat | gathers  | result of `prefetch` |         |                 | reduce-scatters |
| once   |          | of a gathered copy   |         |                 | reduce-scatters |
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

from ..autodiff.backward import floating
from ..autodiff.staged_model import index_leading
from ..sharding import Rules, constrain_with, partition_spec
from ..sharding._rules import GATHERED_AXES, gathered_rules
from ..sharding.specs import axes_of, axes_of_dim, without_axes
from ._buffers import cast_like, to_accum_dtype
from ._ranks import is_spec
from ._varying import zeros

TreeFunction = Callable[[PyTree], PyTree]
When = Literal["tick", "repeat", "once"]
REPLICATED = PartitionSpec()


def identity(tree: PyTree) -> PyTree:
    return tree


@dataclass(frozen=True)
class Gather:
    """Functions that gather the weights of one stage and reduce-scatter their gradients.

    Attributes:
        when: In every `tick`; `once` before the first; or once per `repeat`, ahead of it: a rank
            holds the weights of its repeat and those of the next, while a third set is gathered.
        cast: Casts the weights of one stage, before they are gathered, to its compute dtype.
        unshard: Gathers stored weights.
        constrain_unsharded: Constrains gradients that are accumulated over ticks to stay unsharded,
            without communication.
        reduce_scatter: Sums unsharded gradients over devices and shards them as they are stored.
        batch_axes: Mesh axes, beside `stage`, that are manual in the pipeline: each device calls
            the stage with its own rows. With them the program contains exactly the gathers and sums
            of `unshard` and `reduce_scatter`; without them XLA's partitioner decides.
        weight_specs: How stored weights of one stage are sharded over `batch_axes`.
        gradient_specs: How their stored gradients are sharded over `batch_axes`.
    """

    when: When = "tick"
    cast: TreeFunction = identity
    unshard: TreeFunction = identity
    constrain_unsharded: TreeFunction = identity
    reduce_scatter: TreeFunction = identity
    batch_axes: tuple[str, ...] = ()
    weight_specs: PyTree = REPLICATED
    gradient_specs: PyTree = REPLICATED


def gather_weights(
    logical: PyTree,
    rules: Rules,
    *,
    when: When,
    cast: TreeFunction = identity,
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
    unsharded_rules = gathered_rules(rules)
    stored, unsharded, grad_specs = (
        _manual_specs(logical, r, batch_axes)
        for r in (rules, unsharded_rules, gradient_rules or rules)
    )
    specs = _specs(logical, unsharded_rules)
    constrain_unsharded = _constrained(logical, unsharded_rules)
    constrain_gradients = _constrained(logical, gradient_rules or rules)

    def unshard(tree: PyTree) -> PyTree:
        return constrain_unsharded(_map(_all_gather, tree, stored, unsharded, specs))

    def reduce_scatter(tree: PyTree) -> PyTree:
        summed = _map(partial(_reduce_scatter, batch_axes), tree, grad_specs, specs)
        return constrain_gradients(summed)

    return Gather(
        when, cast, unshard, constrain_unsharded, reduce_scatter, batch_axes, stored, grad_specs
    )


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
    constrain_stored = _constrained(logical, rules)
    constrain_gradients = _constrained(logical, gradient_rules or rules)
    specs = _specs(logical, gathered_rules(rules))

    def reduce_leaf(
        x: jax.Array, done: PartitionSpec, spec: PartitionSpec, unsharded: PartitionSpec
    ):
        axes = tuple(a for a in batch_axes if a not in axes_of(done))
        return _reduce_scatter(axes, x, _without(spec, done), unsharded)

    def reduce_scatter(tree: PyTree) -> PyTree:
        return constrain_gradients(_map(reduce_leaf, tree, stored, grad_specs, specs))

    return Gather(
        "once", identity, identity, constrain_stored, reduce_scatter, batch_axes, stored, grad_specs
    )


def layer_gather(
    logical: PyTree,
    rules: Rules,
    *,
    cast: TreeFunction = identity,
    batch_axes: tuple[str, ...] = (),
) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns a function that gathers the weights of one layer inside a stage.

    Args:
        logical: A tuple of logical axes for every weight of a layer.
        rules: From logical axes to mesh axes.
        cast: Casts the weights to the compute dtype before they are gathered.
        batch_axes: Mesh axes, beside `stage`, that are manual in the pipeline.

    Returns:
        `(stored weights, input of the layer) -> gathered weights`. They are gathered only after the
        input is computed; their gradients are reduce-scattered in float32.
    """
    stored = _manual_specs(logical, rules, batch_axes)
    specs = _specs(logical, gathered_rules(rules))
    unshard = gather_weights(logical, rules, when="tick", batch_axes=batch_axes).unshard
    constrain_stored = _constrained(logical, rules)

    def reduce_leaf(x: jax.Array, spec: PartitionSpec, unsharded: PartitionSpec) -> jax.Array:
        return _reduce_scatter(tuple(a for d in spec for a in axes_of_dim(d)), x, spec, unsharded)

    @jax.custom_vjp
    def gather(weights: PyTree, layer_input: PyTree) -> PyTree:
        return unshard(cast(jax.tree.map(partial(only_after, layer_input), weights)))

    def forward(weights: PyTree, layer_input: PyTree) -> tuple[PyTree, PyTree]:
        # Residuals must be arrays: empty ones carry the dtypes.
        gathered = gather(weights, layer_input)
        return gathered, jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), weights)

    def backward(dtypes: PyTree, gradients: PyTree) -> tuple[PyTree, None]:
        scattered = constrain_stored(_map(reduce_leaf, to_accum_dtype(gradients), stored, specs))
        return cast_like(scattered, dtypes), None

    gather.defvjp(forward, backward)
    return lambda weights, layer_input: gather(weights, lax.stop_gradient(layer_input))


def only_after(dependency: PyTree, x: jax.Array) -> jax.Array:
    """Returns `x`, which XLA can neither use nor cast before `dependency` is computed.

    Otherwise XLA casts all weights before the loop over layers, even through a barrier, and holds a
    copy of them. It does not cast integers, so float32 passes the barrier as uint32.
    """
    if x.dtype != jnp.float32:
        return lax.optimization_barrier((x, dependency))[0]
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(lax.optimization_barrier((bits, dependency))[0], x.dtype)


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


def _constrained(logical: PyTree, rules: Rules) -> TreeFunction:
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
    x: jax.Array, stored: PartitionSpec, gathered: PartitionSpec, unsharded: PartitionSpec
) -> jax.Array:
    """Returns `x` gathered over manual axes, from `stored` to `gathered`.

    Automatic axes shard it as in `unsharded`, before and after.
    """
    moved = [
        tuple(axis for axis in axes_of_dim(axes) if axis not in axes_of_dim(rest))
        for axes, rest in zip(stored, gathered, strict=True)
    ]

    def gather(x: jax.Array) -> jax.Array:
        for dim, axes in enumerate(moved):
            x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
        return x

    return _on_shards(gather, x, unsharded, moved=moved)


def _reduce_scatter(
    axes: tuple[str, ...], x: jax.Array, spec: PartitionSpec, unsharded: PartitionSpec
) -> jax.Array:
    """Returns to each device of `axes` its shard of the sum over these devices.

    Automatic axes shard it as in `unsharded`, before and after.

    If XLA sees that a sum is sharded later, it shards the sum inside the loop that accumulates it,
    with one reduce-scatter per tick. The boundary of a `shard_map` over the automatic axes prevents
    that, so that partial sums stay on their devices until the loop has ended.
    """
    rest = tuple(axis for axis in axes if axis not in axes_of(spec))

    def sum_up(x: jax.Array) -> jax.Array:
        for dim, names in enumerate(spec):
            x = lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if names else x
        return lax.psum(x, rest) if rest else x

    return _on_shards(sum_up, x, unsharded, moved=[*map(axes_of_dim, spec)], also=GATHERED_AXES)


def _on_shards(
    f: TreeFunction,
    x: jax.Array,
    unsharded: PartitionSpec,
    *,
    moved: Sequence[tuple[str, ...]],
    also: Collection[str] = (),
) -> jax.Array:
    """Applies `f`, which communicates over manual axes, to shards over the automatic axes.

    XLA's partitioner would gather the operand of a manual collective over automatic axes, and shard
    the result again. A dim that is sharded over both kinds of axes is left to the partitioner.

    Args:
        f: The function.
        x: Its argument.
        unsharded: How `x` is sharded over automatic axes, before and after.
        moved: For every dim the manual axes over which `f` communicates.
        also: Axes that do not shard `x`, but become manual around `f`.

    Returns:
        `f(x)`, sharded over automatic axes as `x` is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {a for a in mesh.axis_names if mesh.shape[a] > 1} - set(mesh.manual_axes)
    spec, extra_axes = _only(unsharded, automatic), automatic.intersection(also)
    if any(names and axes for names, axes in zip(spec, moved, strict=True)):
        return f(_inside(identity, x, REPLICATED, extra_axes))
    split = axes_of(spec)
    axes = extra_axes | split if any(moved) or extra_axes else extra_axes
    return _inside(f, x, spec, axes)


def _inside(f: TreeFunction, x: jax.Array, spec: PartitionSpec, axes: set[str]) -> jax.Array:
    """Applies `f` to shards over `axes`."""
    if not axes:
        return f(x)
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names=axes)(x)


EACH_TICK = Gather()
"""Gathers in every tick, with collectives that XLA's partitioner chooses."""


class RepeatGather(NamedTuple):
    """Functions of the table above, and initial gradients, for the weights of one rank.

    Attributes:
        prefetch: Maps the index of a repeat to the weights gathered before any rank begins it.
        window: Maps these and the index to the weights that the rank holds during the repeat.
        unshard: Maps a window to the weights that a stage reads.
        accumulate: Maps a sum of float32 gradients over ticks, and the gradients of the weights
            that a stage read, to their sum.
        reduce_scatter: Maps a repeat's sum of gradients to gradients sharded as they are stored.
        zeros: Maps a window to the initial sum, zeros.
        zero_gradients: Maps a number of repeats to zero gradients as stored, with that dim in
            front.
    """

    prefetch: Callable[[Any], PyTree]
    window: Callable[[PyTree, Any], PyTree]
    unshard: TreeFunction
    accumulate: Callable[[PyTree, PyTree], PyTree]
    reduce_scatter: TreeFunction
    zeros: TreeFunction
    zero_gradients: Callable[[int], PyTree]


def repeat_gather(gather: Gather, weights: PyTree) -> RepeatGather:
    """Returns the functions of `RepeatGather` for weights with [R, ...] leaves."""

    def stored(repeat: Any) -> PyTree:
        return index_leading(weights, repeat)

    def gathered(w: PyTree) -> PyTree:
        return gather.unshard(gather.cast(w))

    def unsharded_gradient(dw: PyTree) -> PyTree:
        return gather.constrain_unsharded(to_accum_dtype(dw))

    def scattered_gradient(dw: PyTree) -> PyTree:
        return gather.reduce_scatter(to_accum_dtype(dw))

    prefetch: Callable[[Any], PyTree] = lambda repeat: ()  # noqa: E731
    unshard, to_sum, reduce_scatter = identity, unsharded_gradient, gather.reduce_scatter
    match gather.when:
        case "tick":
            window = lambda _, j: stored(j)  # noqa: E731
            unshard, to_sum, reduce_scatter = gathered, scattered_gradient, identity
        case "repeat":
            prefetch = lambda j: gathered(stored(j))  # noqa: E731
            window = lambda prefetched, _: prefetched  # noqa: E731
        case "once":
            copy = jax.vmap(gathered)(weights)
            window = lambda _, j: index_leading(copy, j)  # noqa: E731

    def accumulate(total: PyTree, dw: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, to_sum(dw))

    # Only the types of what these two compute are used.
    def zero_sum(w: PyTree) -> PyTree:
        return jax.tree.map(zeros, to_sum(floating(unshard(w))))

    def zero_gradients(num_repeats: int) -> PyTree:
        scattered = reduce_scatter(zero_sum(window(prefetch(0), 0)))
        return jax.tree.map(lambda x: zeros(x, lead=(num_repeats,)), scattered)

    return RepeatGather(
        prefetch, window, unshard, accumulate, reduce_scatter, zero_sum, zero_gradients
    )
