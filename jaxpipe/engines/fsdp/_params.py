"""Specs of parameters over the axis `fsdp`, and the axes that divide the rows of a microbatch."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from ...sharding import ROW_AXES
from ...sharding.specs import axes_of_dim
from .._engine import ParamSpecs, PipelineSpec


def row_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of `mesh` that divide the rows of a microbatch."""
    return tuple(axis for axis in ROW_AXES if mesh.shape.get(axis, 1) > 1)


def manual_row_axes(spec: PipelineSpec) -> tuple[str, ...]:
    """Returns the axes along which each device calls functions with its own rows.

    Axes of size 1 too: where they are explicit, JAX before 0.12 types arrays by them.
    """
    if spec.whole_microbatches:
        return ()
    return tuple(axis for axis in ROW_AXES if axis in spec.mesh.shape)


def num_row_shards(mesh: Mesh) -> int:
    """Returns D, the number of devices that divide the rows of a microbatch."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh))


# Elements of a vector that every device stores whole. XLA sums the gradient of a divided one in
# every microbatch with nothing beside it: 1 to 2% of a step on v5p (docs/speed-and-memory.md).
_LARGEST_WHOLE_VECTOR = 2**20


def fsdp_axes(shape: tuple[int, ...], mesh: Mesh) -> tuple[str | None, ...]:
    """Returns the axis of each dim of a parameter: `fsdp` for the largest dim that it divides.

    Vectors, such as scales of norms and biases, are whole unless they are large.
    """
    size = mesh.shape.get("fsdp", 1)
    sizes = [n if size > 1 and n % size == 0 else 0 for n in shape]
    is_small_vector = len(shape) < 2 and math.prod(shape) <= _LARGEST_WHOLE_VECTOR
    if is_small_vector or not any(sizes):
        return (None,) * len(shape)
    largest = sizes.index(max(sizes))
    return tuple("fsdp" if i == largest else None for i in range(len(shape)))


def param_spec(
    name: str,
    leaf: Any,
    mesh: Mesh,
    specs: ParamSpecs = (),
    lead: tuple[str | None, ...] = (),
) -> PartitionSpec:
    """Returns the spec of a stored parameter: the user's by its path, or one over `fsdp`.

    The path of a frozen one may have `.value` behind.
    """
    shape, table = jnp.shape(leaf)[len(lead) :], dict(specs)
    spec = table.get(name, table.get(name.removesuffix(".value")))
    if spec is None:
        return PartitionSpec(*lead, *fsdp_axes(shape, mesh))
    dims = map(axes_of_dim, spec)
    return PartitionSpec(*lead, *dims, *(None,) * (len(shape) - len(spec)))


def param_spec_tree(
    group: str,
    tree: PyTree,
    mesh: Mesh,
    specs: ParamSpecs = (),
    lead: tuple[str | None, ...] = (),
) -> PyTree:
    """Returns the specs of a tree of stored parameters; None where it has None."""

    def spec(path: Any, leaf: Any) -> PartitionSpec | None:
        name = f"['{group}']{jax.tree_util.keystr(path)}"
        return None if leaf is None else param_spec(name, leaf, mesh, specs, lead)

    return jax.tree_util.tree_map_with_path(spec, tree, is_leaf=lambda x: x is None)


def gathered_size(mesh: Mesh, specs: ParamSpecs) -> int:
    """Returns the largest number of devices over which a parameter is gathered."""
    dims = [axes_of_dim(dim) for _, spec in specs for dim in spec]
    sizes = [math.prod(mesh.shape[axis] for axis in axes) for axes in dims if "fsdp" in axes]
    return max(mesh.shape.get("fsdp", 1), *sizes, 1)


def read_spec_tree(stored: PyTree) -> PyTree:
    """Returns the specs of gathered parameters, from those of stored ones.

    A dim that is divided over `fsdp` is gathered, also over other axes of the dim.
    """

    def read(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(None if "fsdp" in axes_of_dim(dim) else dim for dim in spec))

    return jax.tree.map(read, stored)


def cast_group(dtype: Any, group: str, params: PyTree) -> PyTree:
    """Returns the parameters of a group, such as `['layers']`, in the dtype in which they are read.

    That may be a rule, `path -> dtype or None`.
    """

    def cast(path: Any, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        name = f"{group}{jax.tree_util.keystr(path)}".removesuffix(".value")
        leaf_dtype = dtype(name) if is_rule(dtype) else dtype
        return leaf if leaf_dtype is None else leaf.astype(leaf_dtype)

    return params if dtype is None else jax.tree_util.tree_map_with_path(cast, params)


def is_rule(dtype: Any) -> bool:
    """Returns whether `PipelineSpec.compute_dtype` is a rule by path, not a dtype."""
    return callable(dtype) and not hasattr(dtype, "dtype") and not isinstance(dtype, type)


def cast_params(spec: PipelineSpec, group: str, params: PyTree) -> PyTree:
    """Returns parameters of a group of engines in the dtype in which functions read them."""
    if group in ("stages", "frozen"):
        if isinstance(params, dict) and params.keys() == {"layers", "shared"}:
            return {k: cast_group(spec.compute_dtype, f"['{k}']", x) for k, x in params.items()}
        group = "layers"
    return cast_group(spec.compute_dtype, f"['{group}']", params)


def with_layer_specs(spec: PipelineSpec, stages: PyTree) -> PipelineSpec:
    """Returns the spec with the specs of one layer's parameters, if layers gather their own."""
    if spec.gather != "layer":
        return spec
    lead = (None,) * 3
    specs = param_spec_tree("stages", stages, spec.mesh, spec.param_specs, lead)
    layer_specs = jax.tree.map(lambda leaf_spec: PartitionSpec(*leaf_spec[3:]), specs)
    return replace(spec, layer_specs=layer_specs)


def over_data(spec: PipelineSpec, weights: dict[str, PyTree]) -> PipelineSpec:
    """Returns the spec of gradients and state, which ZeRO-1 divides over `data` too.

    A dim that is divided over `fsdp` is divided over `data` too; without one the largest dim that
    divides and is whole. https://arxiv.org/abs/1910.02054
    """
    return _with_specs(spec, weights, spec_over_data) if spec.options.zero1 else spec


def gathered_spec(spec: PipelineSpec, weights: dict[str, PyTree]) -> PipelineSpec:
    """Returns the spec of weights that are gathered over `fsdp`, with a spec for every leaf."""
    return _with_specs(spec, weights, lambda leaf_spec, shape, mesh: read_spec_tree(leaf_spec))


def _with_specs(
    spec: PipelineSpec, weights: dict[str, PyTree], change: Callable[..., PartitionSpec]
) -> PipelineSpec:
    num_stacked, specs = (1 if isinstance(weights.get("stages"), list) else 3), []
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        name = jax.tree_util.keystr(path)
        shape = jnp.shape(leaf)[num_stacked if name.startswith("['stages']") else 0 :]
        of_shape = jax.ShapeDtypeStruct(shape, leaf.dtype)
        leaf_spec = param_spec(name, of_shape, spec.mesh, spec.param_specs)
        specs.append((name, change(leaf_spec, shape, spec.mesh)))
    return replace(spec, param_specs=tuple(specs))


def spec_over_data(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns a spec with an entry for every dim, one of which is divided over `data` if it can."""
    size = mesh.shape.get("data", 1)
    axes = list(map(axes_of_dim, spec))
    shards = [math.prod(mesh.shape[axis] for axis in names) for names in axes]
    divides = [n > 0 and n % (size * k) == 0 for n, k in zip(shape, shards, strict=True)]
    candidates = [i for i, names in enumerate(axes) if "fsdp" in names and divides[i]]
    candidates = candidates or [i for i, names in enumerate(axes) if not names and divides[i]]
    if size == 1 or not candidates:
        return spec
    largest = max(candidates, key=lambda i: shape[i])
    axes[largest] = (*axes[largest], "data")
    return PartitionSpec(*axes)
