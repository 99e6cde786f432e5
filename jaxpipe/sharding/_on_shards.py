"""Runs a function on one device's shards, inside or outside a pipeline, with correct gradients.

XLA's partitioner cannot see into Pallas kernels and data-dependent sorting. So the axes that are
still automatic are made manual around them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .specs import axes_of, reshard_to_spec

Local = Callable[[Any, Any], jax.Array]
"""`(inputs, constants) -> out`, differentiable with respect to `inputs`. Both are pytrees."""


def automatic_axes() -> set[str]:
    """Returns the axes of the mesh in context that are not manual.

    Returns:
        The axes; without a mesh none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def on_shards(
    local: Local,
    axes: set[str],
    specs: PyTree,
    constant_specs: PyTree,
    out_spec: PartitionSpec,
    grad_specs: PyTree = None,
) -> Local:
    """Returns a function that runs `local` on every shard over `axes`.

    It is differentiable, also inside a `jax.shard_map` over other axes. If an axis shards the
    result but not an input, several devices share that input: its gradient is summed over that
    axis.

    Args:
        local: The function of the shards of a device. It may gather, and exchange shards.
        axes: The mesh axes, which are not manual yet.
        specs: How inputs are sharded, a prefix of their tree.
        constant_specs: The same of constants.
        out_spec: How the result is sharded.
        grad_specs: How gradients of inputs are wanted, a prefix of their tree. Default: as inputs.

    Returns:
        The function of whole arrays.
    """
    # Pallas calls do not declare over which axes their results vary, so `check_vma` is False.
    # Results then appear equal on all ranks of a surrounding pipeline, and JAX would sum the
    # gradients of the ranks: the custom derivative declares that every result varies.
    shard_map = partial(jax.shard_map, axis_names=axes, check_vma=False)
    one_each = PartitionSpec(tuple(sorted(axes)))  # spec of a device's own residuals
    sums = jax.tree.map(partial(_PartialSums.of, out_spec), specs, grad_specs or specs)

    @jax.custom_vjp
    def run(inputs, constants):
        on_all_shards = shard_map(local, in_specs=(specs, constant_specs), out_specs=out_spec)
        return match_varying_axes(inputs, on_all_shards(inputs, constants))

    def forward(inputs, constants):
        def on_shard(inputs, constants):
            return jax.vjp(lambda inputs: local(inputs, constants), inputs)

        def keep(*arguments):
            out, pull_back = _as_if_equal(on_shard, *arguments)
            return out, jax.tree.map(lambda x: jnp.expand_dims(x, 0), pull_back)

        on_all_shards = shard_map(
            keep, in_specs=(specs, constant_specs), out_specs=(out_spec, one_each)
        )
        return match_varying_axes(inputs, on_all_shards(inputs, constants))

    def backward(pull_back, gradient):
        def pull(pull_back, gradient):
            pull_back = jax.tree.map(lambda x: jnp.squeeze(x, 0), pull_back)
            (input_grads,) = _as_if_equal(lambda pull_back, g: pull_back(g), pull_back, gradient)
            return jax.tree.map(lambda x: jnp.expand_dims(x, (0, 1)), input_grads)

        parts = shard_map(
            pull, in_specs=(one_each, out_spec), out_specs=jax.tree.map(lambda s: s.spec, sums)
        )(pull_back, gradient)
        input_grads = jax.tree.map(lambda s, tree: jax.tree.map(s.total, tree), sums, parts)
        return match_varying_axes(gradient, input_grads), None

    run.defvjp(forward, backward)
    return lambda inputs, constants: run(match_varying_axes(inputs, inputs), constants)


@dataclass(frozen=True)
class _PartialSums:
    """Partial sums of a gradient, on the devices that share an input.

    Those over axes by which the gradient will be sharded are added up first: XLA reduce-scatters
    them. A sum over all axes at once it all-reduces whole, and then takes the shard.
    """

    spec: PartitionSpec  # in front two dims of partial sums: over other axes, and over such axes
    scattered: PartitionSpec | None  # of what is left with the first of them; None for no such axis

    @classmethod
    def of(
        cls, out_spec: PartitionSpec, spec: PartitionSpec, grad_spec: PartitionSpec
    ) -> "_PartialSums":
        """Returns them for an input by its spec, that of its gradient, and that of the result."""
        shared = axes_of(out_spec) - axes_of(spec)
        first = shared & axes_of(grad_spec)
        last = tuple(sorted(shared - first)) or None
        scattered = PartitionSpec(last, *grad_spec) if first else None
        return cls(PartitionSpec(last, tuple(sorted(first)) or None, *spec), scattered)

    def total(self, parts: jax.Array) -> jax.Array:
        """Returns the sum over the first two dims."""
        # Not `jnp.sum`: devices would exchange float32 where layers compute in bfloat16.
        x = jax.lax.reduce_sum(parts, axes=(1,))
        if self.scattered is not None:
            x = reshard_to_spec(x, self.scattered, jax.sharding.get_abstract_mesh())
        return jax.lax.reduce_sum(x, axes=(0,))


def _as_if_equal(f: Callable, *arguments: PyTree) -> PyTree:
    """Runs `f`, traced as if its arguments varied over no axis, as Pallas calls need."""
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    program, result = jax.make_jaxpr(f, return_shape=True)(*plain)
    leaves = jax.extend.core.jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


def match_varying_axes(example: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree`, declared to vary over the manual axes over which `example` varies.

    Args:
        example: A tree of arrays.
        tree: A tree of arrays that vary over fewer axes.

    Returns:
        The same arrays as `tree`.
    """
    axes = varying_axes(example)
    return jax.tree.map(
        lambda x: jax.lax.pcast(x, tuple(sorted(axes - varying_axes(x))), to="varying"), tree
    )


def varying_axes(tree: PyTree) -> frozenset[str]:
    """Returns the manual axes over which at least one array of a tree varies.

    Args:
        tree: A pytree of arrays, of any shapes and dtypes.

    Returns:
        The names of these axes; none outside of `jax.shard_map`.

    Example:
        >>> import jax.numpy as jnp
        >>> varying_axes({"w": jnp.zeros(3)})
        frozenset()
    """
    types = map(jax.typeof, jax.tree.leaves(tree))
    return frozenset[str]().union(*(x.manual_axis_type.varying for x in types))
