"""What engines of one XLA program share: the weights of all stages in one stack of padded layers.

S ranks, v stages on each, n layers in the largest stage, L layers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..autodiff.staged_model import run_layers
from ..schedules import Schedule
from ..sharding import ROW_AXES
from ..sharding.layout import LayerLayout
from ..sharding.specs import reshard
from ..spmd.ranks import masked_layer, stages_on_ranks
from ..spmd.weight_gather import gathering_layer
from ._engine import PipelineSpec, Storage
from .fsdp import gather_of_layer, param_spec_tree, weight_gathers
from .fsdp._gathers import gathering_frozen, to_frozen_shards


def round_robin_layout(
    schedule: Schedule | None, num_ranks: int, counts: tuple[int, ...]
) -> LayerLayout:
    """Assigns stage `repeat * num_ranks + rank`, of `counts` layers, to each rank."""
    del schedule
    uneven = counts if len(set(counts)) > 1 else None
    return LayerLayout(len(counts) // num_ranks, num_ranks, max(counts), None, uneven)


def layout_of_schedule(
    schedule: Schedule | None, num_ranks: int, counts: tuple[int, ...]
) -> LayerLayout:
    """Assigns stages, of `counts` layers, to the ranks that run them by the schedule."""
    assert schedule is not None
    stages = stages_on_ranks(schedule)
    uneven = counts if len(set(counts)) > 1 else None
    return LayerLayout(len(stages), num_ranks, max(counts), stages, uneven)


def stack(spec: PipelineSpec, layers: PyTree) -> PyTree:
    """Stacks layers [L, ...] as ranks hold them, [v, S, n, ...], with zeros for padding."""
    ids = np.asarray(spec.layout.layer_ids).reshape(spec.layout.dims)

    def stack_leaf(leaf: Any) -> Any:
        taken = jnp.asarray(leaf)[np.maximum(ids, 0)]
        if (ids >= 0).all() or jnp.issubdtype(taken.dtype, jax.dtypes.prng_key):
            return taken
        mask = (ids >= 0).reshape(*ids.shape, *(1,) * (taken.ndim - ids.ndim))
        return jnp.where(mask, taken, jnp.zeros_like(taken))

    return jax.tree.map(stack_leaf, layers)


def unstack(spec: PipelineSpec, stages: PyTree) -> PyTree:
    """Returns layers [L, ...] in forward order from [v, S, n, ...]: the inverse of `stack`."""
    ids = np.asarray(spec.layout.layer_ids)
    positions = np.argsort(np.where(ids < 0, ids.size, ids), kind="stable")
    positions = positions[: spec.layout.num_layers]

    def unstack_leaf(leaf: Any) -> Any:
        rest = leaf.shape[3:]
        if not math.prod(rest):  # with explicit axes JAX 0.10 cannot reshape an array of size 0
            return jnp.zeros((len(positions), *rest), leaf.dtype)
        return leaf.reshape(ids.size, *rest)[positions]

    return jax.tree.map(unstack_leaf, stages)


def share(spec: PipelineSpec, stages: PyTree, shared: PyTree) -> dict[str, PyTree]:
    """Returns "layers", the stages, and "shared", a copy [v, S, 1, ...] for each of them."""
    dims = *spec.layout.dims[:2], 1
    copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*dims, *leaf.shape)), shared)
    return {"layers": stages, "shared": copies}


def own_copy(stage: dict[str, PyTree]) -> PyTree:
    """Returns the parameters that all layers share, from the [1, ...] copies of a stage."""
    return jax.tree.map(lambda leaf: leaf[0], stage["shared"])


def sum_shared(spec: PipelineSpec, stages: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
    """Returns the gradients of layers, and those of what they share, summed over stages."""
    del spec
    sums = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1, 2)), stages["shared"])
    return stages["layers"], sums


def layer_keys(spec: PipelineSpec, dropout: PyTree, frozen: PyTree) -> PyTree:
    """Returns [v, S, n, ...] keys of layers: dropout, frozen parameters and, if needed, a mask.

    Dropout keys are given as [L, ...], or (); frozen parameters as [v, S, n, ...].
    """
    keys = stack(spec, dropout), to_frozen_shards(spec, frozen)
    if not spec.layout.counts:
        return keys
    mask = np.asarray(spec.layout.layer_ids).reshape(spec.layout.dims) >= 0
    return {"dropout": keys, "layer_mask": jnp.asarray(mask)}


def pipeline_arguments(
    spec: PipelineSpec, weights: dict[str, PyTree], keys: PyTree
) -> dict[str, Any]:
    """Returns the arguments that all pipelines of one program take of a spec."""
    gather, boundary_gather = weight_gathers(spec, weights, keys)
    return {
        "mesh": spec.mesh,
        "gather": gather,
        "boundary_gather": boundary_gather,
        "options": spec.options,
    }


def stage(spec: PipelineSpec, layer: Callable, run: Callable = run_layers) -> Callable:
    """Returns a stage that runs its layers by `run`, and skips padding layers."""
    num_layers = spec.layout.layers_per_stage
    return partial(run, _wrapped(spec, layer), num_layers=num_layers, scan=spec.scan_layers)


def _wrapped(spec: PipelineSpec, layer: Callable) -> Callable:
    """Returns a layer, from outside in: rematerialised, masked if it is padding, and gathering.

    The condition of a mask would return the weights that its backward reads, a copy of those of all
    layers. Rematerialised too, it reads them again.
    """
    layer = gathering_frozen(spec, layer)
    if spec.gather == "layer":
        layer = gathering_layer(layer, gather_of_layer(spec))
    layer = spec.layer_remat(layer)
    return spec.layer_remat(masked_layer(layer)) if spec.layout.counts else layer


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _identity(x: Any, message: str) -> Any:
    return x


@_identity.defjvp
def _refuse(message: str, primals: Any, tangents: Any) -> Any:
    raise ValueError(message)


def undifferentiated(tree: PyTree, message: str) -> PyTree:
    """Returns arguments or results as they are; differentiating them raises a `ValueError`.

    JAX's derivative of these engines would hang or be wrong.
    """

    def guard(leaf: Any) -> Any:
        is_inexact = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return _identity(leaf, message) if is_inexact else leaf

    return jax.tree.map(guard, tree)


def put(spec: PipelineSpec, weights: dict[str, PyTree], tied: bool) -> dict[str, PyTree]:
    """Moves weights to the devices that hold them."""
    where = shardings(spec, weights, tied)
    here = jax.tree.map(_from_other_devices, weights, where)
    return jax.jit(lambda tree: tree, out_shardings=where)(here)


def _from_other_devices(leaf: Any, sharding: NamedSharding) -> Any:
    """Moves an array that is on other devices than those of the mesh, as programs cannot."""
    if isinstance(leaf, Tracer):
        return leaf
    is_elsewhere = getattr(leaf, "committed", False) and leaf.devices() != sharding.device_set
    return jax.device_put(leaf, sharding) if is_elsewhere else leaf


def init(
    spec: PipelineSpec, make: Callable[[], dict[str, PyTree]], tied: bool
) -> dict[str, PyTree]:
    """Makes weights on the devices that hold them; no device has more than its own shards."""
    where = shardings(spec, jax.eval_shape(make), tied)
    return jax.jit(make, out_shardings=where)()


def put_like(
    spec: PipelineSpec, weights: dict[str, PyTree], like: dict[str, PyTree], tied: bool
) -> dict[str, PyTree]:
    """Returns new arrays in groups of weights, sharded as weights are, in a traced function."""
    del like
    return reshard(weights, shardings(spec, weights, tied))


def shardings(spec: PipelineSpec, weights: dict[str, PyTree], tied: bool) -> dict[str, PyTree]:
    """Returns where stored weights are: without a pipeline, on all ranks alike."""
    del tied
    stage_axis = None if spec.schedule is None else "stage"
    by_group = {}
    for group, tree in weights.items():
        lead = (None, stage_axis, None) if group == "stages" else ()
        specs = param_spec_tree(group, tree, spec.mesh, spec.param_specs, lead)
        by_group[group] = jax.tree.map(partial(NamedSharding, spec.mesh), specs)
    return by_group


def rank_bytes(spec: PipelineSpec, weights: dict[str, PyTree], tied: bool) -> tuple[int, ...]:
    """Returns [S] the bytes of weights on a device of every rank, which are the same for all."""
    where = shardings(spec, weights, tied)
    return (device_bytes(weights, where),) * spec.mesh.shape["stage"]


def device_bytes(arrays: PyTree, where: PyTree) -> int:
    """Returns the bytes on a device of arrays, or of their shapes, by their shardings."""
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(where), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)


def may_divide_rows(mesh: Mesh) -> bool:
    """Returns whether XLA may divide rows in a program of all ranks, by the axes of its mesh.

    Between several automatic axes XLA's partitioner reorders shards, as of gradients, by collective
    permutes in branches that a rank takes alone. Explicit axes would be in the types that functions
    of the user see.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = [axis for axis, size in mesh.shape.items() if size > 1 and axis != "stage"]
    return all(axis in ROW_AXES and types[axis] == AxisType.Auto for axis in others)


def gather(spec: PipelineSpec, tree: PyTree) -> PyTree:
    """Returns arrays that every device of the mesh has whole."""
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(spec.mesh, PartitionSpec()))(tree)


STORAGE = Storage(
    per_stage=False,
    stack=stack,
    unstack=unstack,
    share=share,
    own_copy=own_copy,
    sum_shared=sum_shared,
    layer_keys=layer_keys,
    put=put,
    shardings=shardings,
    rank_bytes=rank_bytes,
    init=init,
    put_like=put_like,
    gather=gather,
)
