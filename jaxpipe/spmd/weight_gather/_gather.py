"""When and how weights that are sharded over fsdp and similar axes are gathered for a stage.

A `Gather` says it for the weights of one stage. Its functions gather weights and reduce-scatter
their gradients; `gather_weights` makes them from logical axes. With `gather_in_layers` a stage is
given its weights as they are stored, and `layer_gather` gathers those of a layer inside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...sharding import Rules, constrain_with, partition_spec
from ...sharding._rules import gathered_rules
from ...sharding.specs import axes_of, axes_of_dim
from .._buffers import cast_like, to_accum_dtype
from ..ranks import is_spec
from ._collectives import all_gather_leaf, only_axes, reduce_scatter_leaf

TreeFunction = Callable[[PyTree], PyTree]
When = Literal["tick", "repeat", "once"]
"""When weights are gathered: in every tick, once per repeat, or once."""

REPLICATED = PartitionSpec()


def identity(tree: PyTree) -> PyTree:
    """Returns `tree`."""
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


EACH_TICK = Gather()
"""Gathers in every tick, with collectives that XLA's partitioner chooses."""


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
        return constrain_unsharded(_map(all_gather_leaf, tree, stored, unsharded, specs))

    def reduce_scatter(tree: PyTree) -> PyTree:
        summed = _map(partial(reduce_scatter_leaf, batch_axes), tree, grad_specs, specs)
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
        return reduce_scatter_leaf(axes, x, _without(spec, done), unsharded)

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
        return reduce_scatter_leaf(
            tuple(a for d in spec for a in axes_of_dim(d)), x, spec, unsharded
        )

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
    return jax.tree.map(lambda spec: only_axes(spec, axes), _specs(logical, rules), is_leaf=is_spec)


def _specs(logical: PyTree, rules: Rules) -> PyTree:
    """Returns the spec of every weight over all mesh axes."""
    return jax.tree.map(
        lambda axes: partition_spec(axes, rules), logical, is_leaf=lambda x: isinstance(x, tuple)
    )
