"""Weights that are gathered per layer: inside a stage, by the layer that reads them.

`gather_in_layers` makes the `Gather` of such a stage: the engine gives it the weights as they are
stored. `layer_gather` makes the function that gathers the weights of one layer, and
`gathering_layer` the layer that does so, in its forward and again in its backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ... import _compat
from ...ir.graph import partitioned_axes, row_major
from ...sharding.specs import axes_of, without_axes
from .._buffers import cast_like, to_accum_dtype
from ._collectives import reduce_scatter_leaf
from ._gather import (
    BySpecs,
    Gather,
    TreeFunction,
    constrain_by,
    gather_by_specs,
    identity,
    manual_specs,
    map_leaves,
    only_after,
    scatter_and_sum_whole,
    without_done,
)


def gather_in_layers(
    stored: PyTree,
    unsharded: PyTree,
    gradients: PyTree | None = None,
    *,
    batch_axes: tuple[str, ...] = (),
    reduce_dtype: Any = None,
) -> Gather:
    """Returns a `Gather` for a stage whose layers gather their own weights, with `layer_gather`.

    The gradients of such a stage are sharded as its weights are stored. After the last tick they
    are only summed over the axes that do not shard them, and with ZeRO-1 scattered further. The
    arguments mean the same as in `gather_by_specs`.
    """
    gradients = stored if gradients is None else gradients
    weight_specs, gradient_specs = (manual_specs(s, batch_axes) for s in (stored, gradients))
    constrain_stored, constrain_gradients = constrain_by(stored), constrain_by(gradients)

    def reduce_leaf(
        dtype: Any,
        x: jax.Array,
        done: PartitionSpec,
        spec: PartitionSpec,
        unsharded: PartitionSpec,
    ) -> jax.Array:
        axes = tuple(axis for axis in batch_axes if axis not in axes_of(done))
        left = without_done(spec, done)
        return reduce_scatter_leaf(axes, x, left, unsharded, dtype=dtype)

    def reduce(tree: PyTree, *, dtype: Any) -> PyTree:
        specs = weight_specs, gradient_specs, unsharded
        return constrain_gradients(map_leaves(partial(reduce_leaf, dtype), tree, *specs))

    scatter, sum_whole = scatter_and_sum_whole(reduce, gradient_specs, reduce_dtype)
    return Gather(
        "once",
        constrain_unsharded=constrain_stored,
        reduce_scatter=lambda tree: sum_whole(scatter(tree)),
        scatter=scatter,
        sum_whole=sum_whole,
        batch_axes=batch_axes,
        weight_specs=weight_specs,
        gradient_specs=gradient_specs,
        sum_specs=weight_specs,
        reduce_dtype=reduce_dtype,
        by_specs=BySpecs(
            partial(gather_in_layers, batch_axes=batch_axes, reduce_dtype=reduce_dtype),
            (stored, unsharded, gradients),
        ),
    )


def layer_gather(
    stored: PyTree,
    unsharded: PyTree,
    *,
    cast: TreeFunction = identity,
    batch_axes: tuple[str, ...] = (),
    reduce_dtype: Any = None,
) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns `(stored weights, input of the layer) -> gathered weights` for one layer of a stage.

    They are gathered only after the input is computed; their gradients are reduce-scattered in
    `reduce_dtype`, or else in float32.
    """
    manual = manual_specs(stored, batch_axes)
    unshard = gather_by_specs(stored, unsharded, batch_axes=batch_axes).unshard
    constrain_stored = constrain_by(stored)

    # The engine sums over axes that do not shard a weight, after the last tick.
    reduce_leaf = partial(reduce_scatter_leaf, (), dtype=reduce_dtype)

    @jax.custom_vjp
    def gather(weights: PyTree, layer_input: PyTree) -> PyTree:
        weights = jax.tree.map(partial(only_after, layer_input), weights)
        return unshard(_name_gathered(cast(as_stored(weights, stored))))

    def forward(weights: PyTree, layer_input: PyTree) -> tuple[PyTree, PyTree]:
        # Residuals must be arrays: empty ones carry the dtypes.
        gathered = gather(weights, layer_input)
        return gathered, jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), weights)

    def backward(dtypes: PyTree, gradients: PyTree) -> tuple[PyTree, None]:
        scattered = constrain_stored(
            map_leaves(reduce_leaf, to_accum_dtype(gradients, apart=False), manual, unsharded)
        )
        return cast_like(scattered, dtypes), None

    gather.defvjp(forward, backward)
    return lambda weights, layer_input: gather(weights, lax.stop_gradient(layer_input))


def gathering_layer(layer: Callable, gather: Callable[[PyTree, PyTree], PyTree]) -> Callable:
    """Returns a layer that gathers its own weights, in the forward and again in the backward."""

    def gathered(weights: PyTree, x: PyTree, *arguments: PyTree) -> PyTree:
        return layer(_name_gathered(gather(weights, x)), x, *arguments)

    return jax.checkpoint(gathered, prevent_cse=False, policy=_is_saveable)


_GATHERED = "gathered_weights"


def _name_gathered(weights: PyTree) -> PyTree:
    """Returns `weights` with the name by which `gathering_layer` does not save them."""
    return jax.tree.map(lambda w: checkpoint_name(w, _GATHERED), weights)


def _is_saveable(primitive: Any, *inputs: Any, **parameters: Any) -> bool:
    """Saves all but gathered weights and results of complex arithmetic: a policy of JAX."""
    dtypes = [x.dtype for x in inputs if hasattr(x, "dtype")]
    dtypes += [v for k, v in parameters.items() if k in ("new_dtype", "dtype") and v is not None]
    makes_complex = primitive.name in ("complex", "fft")  # `rfft` makes complex arrays of real ones
    if makes_complex or any(jnp.issubdtype(x, jnp.complexfloating) for x in dtypes):
        return False  # JAX rounds what it saves under a policy, and cannot round these
    # A gathered weight is the output of an equation with the name, or of a call whose body has one.
    # JAX's `save_anything_except_these_names` excludes only the former, and so nothing: JAX then
    # saves the input of the naming equation.
    call = parameters.get("call_jaxpr")
    inside = () if call is None else (step.params.get("name") for step in call.jaxpr.eqns)
    return _GATHERED not in (parameters.get("name"), *inside)


def as_stored(weights: PyTree, specs: PyTree) -> PyTree:
    """Returns a layer's weights in the layout in which weights are stored.

    Otherwise XLA gives the weights of all layers the layout that a layer's products want, by copies
    that are as large as they are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names, partitioned = mesh.axis_names, partitioned_axes()
    num_before = max((names.index(axis) + 1 for axis in mesh.manual_axes), default=0)

    def keep(weight: jax.Array, spec: PartitionSpec) -> jax.Array:
        # Every device constrains its own shard: XLA's partitioner gathers what a constraint reads.
        # XLA of jax 0.12 aborts where a manual axis is before those around it in the mesh
        # (`named_sharding.cc: Manual axes must be sorted`), so an axis in front of these is made
        # manual only where it divides the weight.
        axes = partitioned & (set(names[num_before:]) | set(axes_of(spec)))
        if not axes:
            return row_major(weight)
        spec = without_axes(spec, frozenset(names) - axes)
        return jax.shard_map(row_major, in_specs=spec, out_specs=spec, axis_names=axes)(weight)

    return map_leaves(keep, weights, specs)


def as_stored_on_gpus(weights: PyTree, specs: PyTree) -> PyTree:
    """Returns gathered weights, which on GPUs are constrained to the layout of stored ones.

    XLA:GPU wants the dim that it gathers in front, and holds a float32 transpose of all layers.
    """
    return as_stored(weights, specs) if _compat.platform() == "gpu" else weights
