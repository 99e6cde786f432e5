"""When and how weights that are sharded over fsdp and similar axes are gathered for a stage.

A `Gather` says it for the weights of one stage. Its functions gather weights and reduce-scatter
their gradients; `gather_weights` makes them from logical axes. `_weight_gather` makes of it what an
engine does with the weights of a rank.
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

    def cast_and_unshard(self, weights: PyTree) -> PyTree:
        """Returns the weights of one stage as it computes with them, from stored ones."""
        return self.unshard(self.cast(weights))


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
        manual_specs(logical, r, batch_axes)
        for r in (rules, unsharded_rules, gradient_rules or rules)
    )
    specs = specs_of(logical, unsharded_rules)
    constrain_unsharded = constrain_by(logical, unsharded_rules)
    constrain_gradients = constrain_by(logical, gradient_rules or rules)

    def unshard(tree: PyTree) -> PyTree:
        return constrain_unsharded(map_leaves(all_gather_leaf, tree, stored, unsharded, specs))

    def reduce_scatter(tree: PyTree) -> PyTree:
        summed = map_leaves(partial(reduce_scatter_leaf, batch_axes), tree, grad_specs, specs)
        return constrain_gradients(summed)

    return Gather(
        when, cast, unshard, constrain_unsharded, reduce_scatter, batch_axes, stored, grad_specs
    )


def only_after(dependency: PyTree, x: jax.Array) -> jax.Array:
    """Returns `x`, which XLA can neither use nor cast before `dependency` is computed.

    Otherwise XLA casts all weights before the loop over layers, even through a barrier, and holds a
    copy of them. It does not cast integers, so float32 passes the barrier as uint32.
    """
    if x.dtype != jnp.float32:
        return lax.optimization_barrier((x, dependency))[0]
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(lax.optimization_barrier((bits, dependency))[0], x.dtype)


def map_leaves(f: Callable, tree: PyTree, *specs: PyTree) -> PyTree:
    """Maps `f` over the leaves of `tree` that are not None."""

    def map_leaf(x, *spec):
        return None if x is None else f(x, *spec)

    return jax.tree.map(map_leaf, tree, *specs, is_leaf=lambda x: x is None)


def constrain_by(logical: PyTree, rules: Rules) -> TreeFunction:
    """Returns a function that shards the leaves that are not None as `rules` say."""
    return lambda tree: map_leaves(constrain_with(rules), tree, logical)


def manual_specs(logical: PyTree, rules: Rules, axes: tuple[str, ...]) -> PyTree:
    """Returns the spec of every weight, restricted to `axes`."""
    return jax.tree.map(
        lambda spec: only_axes(spec, axes), specs_of(logical, rules), is_leaf=is_spec
    )


def specs_of(logical: PyTree, rules: Rules) -> PyTree:
    """Returns the spec of every weight over all mesh axes."""
    return jax.tree.map(
        lambda axes: partition_spec(axes, rules), logical, is_leaf=lambda x: isinstance(x, tuple)
    )
