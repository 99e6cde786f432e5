"""A function of one device's shards, inside a pipeline or not, with the right gradients.

Pallas kernels and data-dependent sorting are opaque to XLA's partitioner, so the axes that are
still automatic are made manual around them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...sharding import axes_of

Local = Callable[[Any, Any], jax.Array]
"""`(inputs, constants) -> out`, differentiable by `inputs`, a tree; `constants` is a tree."""


def automatic_axes() -> set[str]:
    """The axes of the mesh in context that are not manual yet; none without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def on_shards(
    local: Local, axes: set[str], specs: PyTree, constant_specs: PyTree, out_spec: PartitionSpec
) -> Local:
    """`local` on every shard over `axes`, differentiable inside a `jax.shard_map` over others.

    `local` must not communicate. Axes that split the result but not an input tell devices apart
    that share this input: its gradient is summed over them.

    Pallas calls do not say over which axes their results vary, so the check is off in here, and
    what comes out looks equal on all ranks of a pipeline around it: JAX would add the gradients of
    the ranks up. Hence a derivative of our own, which says of every result that it varies.

    Args:
        local: Runs on the shards of one device.
        axes: Axes of the mesh in context, all that are not manual yet.
        specs: A `PartitionSpec` for each leaf of the inputs.
        constant_specs: The same for the constants.
        out_spec: How the result is split.
    """
    shard_map = partial(jax.shard_map, axis_names=axes, check_vma=False)
    one_each = PartitionSpec(tuple(sorted(axes)))  # of what a device keeps for its own backward
    partial_specs = jax.tree.map(lambda spec: _with_partial_sums(spec, out_spec), specs)

    @jax.custom_vjp
    def run(inputs, constants):
        on_all = shard_map(local, in_specs=(specs, constant_specs), out_specs=out_spec)
        return varying_like(inputs, on_all(inputs, constants))

    def forward(inputs, constants):
        def on_shard(inputs, constants):
            return jax.vjp(lambda inputs: local(inputs, constants), inputs)

        def keep(*arguments):
            out, pull_back = _as_if_equal(on_shard, *arguments)
            return out, jax.tree.map(lambda x: jnp.expand_dims(x, 0), pull_back)

        on_all = shard_map(keep, in_specs=(specs, constant_specs), out_specs=(out_spec, one_each))
        return varying_like(inputs, on_all(inputs, constants))

    def backward(pull_back, gradient):
        def pull(pull_back, gradient):
            pull_back = jax.tree.map(lambda x: jnp.squeeze(x, 0), pull_back)
            (of_inputs,) = _as_if_equal(lambda pull_back, g: pull_back(g), pull_back, gradient)
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), of_inputs)

        on_all = shard_map(pull, in_specs=(one_each, out_spec), out_specs=partial_specs)
        # Not `jnp.sum`: devices would exchange float32 where layers compute in bfloat16.
        of_inputs = jax.tree.map(
            partial(jax.lax.reduce_sum, axes=(0,)), on_all(pull_back, gradient)
        )
        return varying_like(gradient, of_inputs), None

    run.defvjp(forward, backward)
    return lambda inputs, constants: run(varying_like(inputs, inputs), constants)


def _with_partial_sums(spec: PartitionSpec, out_spec: PartitionSpec) -> PartitionSpec:
    """`spec` behind a dim of partial sums, one for each device that shares the shard."""
    return PartitionSpec(tuple(sorted(axes_of(out_spec) - axes_of(spec))) or None, *spec)


def _as_if_equal(f: Callable, *arguments: PyTree) -> PyTree:
    """`f(*arguments)`, traced as if they varied over no axis: as Pallas calls see the world."""
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    program, result = jax.make_jaxpr(f, return_shape=True)(*plain)
    leaves = jax.extend.core.jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


def varying_like(example: PyTree, tree: PyTree) -> PyTree:
    """`tree`, declared to vary over the manual axes over which any leaf of `example` does."""
    varying = frozenset().union(*map(_varying, jax.tree.leaves(example)))
    return jax.tree.map(
        lambda x: jax.lax.pcast(x, tuple(varying - _varying(x)), to="varying"), tree
    )


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
