"""Whole arrays that engines are given: their leading dims, their specs, and their parts on ranks.

S ranks, R stages on each, M microbatches. Leaves of stages and keys are [R, S, ...], those of a
batch [M, rows, ...].
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree, Scalar

from ..autodiff import StagedModel
from ..autodiff.staged_model import Aux, merge_leading
from ..sharding.specs import typed_by_specs
from .ranks import AXIS, on_ranks
from .weight_gather import Gather


def on_parts(
    f: Callable[..., Any],
    model: StagedModel,
    mesh: Mesh | None,
    gather: Gather,
    boundary_gather: Gather,
    out_dims: Any,
) -> Callable:
    """Returns a function of whole arrays that runs `f` on all ranks.

    `f(model, stages, boundary, batch_inputs, keys)` is written for one rank; `boundary` holds the
    groups "embed" and "head" of `weights`. Each rank has the constants of `weights`, if there are
    any, whole. The function returned is `(weights, batch_inputs, keys) -> ...`.
    """
    in_dims = (
        stacked_specs(gather.weight_specs),
        boundary_gather.weight_specs,
        rows_of(gather, P(None)),
        1 if gather.key_specs is None else stacked_specs(gather.key_specs),
        None,
    )

    def run_rank(
        stages: PyTree, boundary: PyTree, batch_inputs: PyTree, keys: PyTree, constants: PyTree
    ) -> Any:
        return f(model.with_constants(constants), stages, boundary, batch_inputs, keys)

    run = on_ranks(run_rank, mesh=mesh, in_dims=in_dims, out_dims=out_dims)

    def run_on_ranks(weights: dict[str, Any], batch_inputs: PyTree, keys: PyTree) -> Any:
        boundary = {name: w for name, w in weights.items() if name not in ("stages", "constants")}
        constants = typed_by_specs(weights.get("constants", ()), P(), mesh)
        if gather.key_specs is None:
            keys = typed_by_specs(keys, P(None, AXIS), mesh)
        return run(weights["stages"], boundary, batch_inputs, keys, constants)

    return run_on_ranks


def gradient_dims(gather: Gather, boundary_gather: Gather) -> tuple[PyTree, PyTree]:
    """Returns `out_dims` for (gradients of the stages, gradients of embedding and head)."""
    return stacked_specs(gather.gradient_specs), boundary_gather.gradient_specs


def value_dims(gather: Gather) -> tuple[None, P]:
    """Returns `out_dims` for ((loss, metrics), metrics [n, ...] of the microbatches of a rank)."""
    return None, rows_of(gather, P(AXIS, None))


def with_arrays(value: tuple[tuple[Scalar, Aux], Aux], batch_inputs: PyTree) -> tuple[Scalar, Aux]:
    """Returns (loss, metrics), with arrays [M, ...] from those [S, n, ...] of all ranks."""
    (loss, metrics), arrays = value
    count = jnp.shape(jax.tree.leaves(batch_inputs)[0])[0]

    def joined(x: jax.Array) -> jax.Array:
        x = merge_leading(x)
        if x.shape[0] == count:
            return x
        mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
        if spec[0] is not None:  # JAX refuses to slice a dim that an explicit axis divides
            x = jax.sharding.reshard(x, NamedSharding(mesh, P(None, *spec[1:])))
        return x[:count]

    return loss, metrics | {name: joined(x) for name, x in arrays.items()}


def rows_of(gather: Gather, lead: P) -> P:
    """Returns the spec of arrays whose rows are in the dim after those of `lead`."""
    return P(*lead, gather.batch_axes) if gather.batch_axes else lead


def stacked_specs(specs: PyTree) -> PyTree:
    """Returns the specs of [R, S, ...] leaves, given those of the weights of one stage."""
    return jax.tree.map(lambda spec: P(None, AXIS, *spec), specs)


def check_rows(microbatches: PyTree, batch_axes: tuple[str, ...], mesh: Mesh | None) -> None:
    """Checks that dim 1 of every [M, rows, ...] leaf divides over `batch_axes`."""
    if not batch_axes:
        return
    if mesh is None:
        raise ValueError(
            f"`gather.batch_axes` is {batch_axes} and `mesh` is None: one device has all rows. "
            "Give a mesh, or no batch axes."
        )
    parts = math.prod(mesh.shape[axis] for axis in batch_axes)
    for path, x in jax.tree_util.tree_leaves_with_path(microbatches):
        if x.ndim < 2 or x.shape[1] % parts:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has dims {x.shape}. Dim 1 must hold rows that "
                f"divide over {' x '.join(batch_axes)} = {parts}, as `gather.batch_axes` says."
            )


def common_dims(tree: dict[str, PyTree], count: int, meaning: str) -> tuple[int, ...]:
    """Returns the sizes of the first `count` dims, and checks that all leaves share them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError(f"`{'` and `'.join(tree)}` have no arrays. Give leaves {meaning}.")
    shapes = [(leaf_name(path), jnp.shape(x)) for path, x in leaves]
    first, first_shape = shapes[0]
    for name, shape in shapes:
        if len(shape) < count:
            raise ValueError(
                f"{name} has shape {shape}. All leaves of `{'` and `'.join(tree)}` are {meaning}: "
                "give it these dims in front."
            )
        if shape[:count] != first_shape[:count]:
            raise ValueError(
                f"{name} has shape {shape} and {first} {first_shape}. All leaves of "
                f"`{'` and `'.join(tree)}` are {meaning}, with the same sizes of these dims."
            )
    return first_shape[:count]


def leaf_name(path: tuple) -> str:
    """Returns a leaf's name as the caller writes it: `weights['w']` for `['weights']['w']`."""
    return path[0].key + jax.tree_util.keystr(path[1:])
