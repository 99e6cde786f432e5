"""Sequences that are divided over the axis `context`: which leaves, and what is refused.

Functions of a model stay functions of whole sequences. Leaves are divided, and XLA divides what
functions compute with them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import PyTree

from ..autodiff.staged_model import BoundaryOfSlices
from ..sharding.specs import reshard_to_spec
from ._model import Model

CONTEXT = "context"


def check_sequences(model: Model, mesh: Mesh, num_slices: int, *, has_specs: bool) -> None:
    """Checks that something is divided over the axis `context`, if the mesh has it."""
    size = mesh.shape.get(CONTEXT, 1)
    if size == 1 or model.contributions:
        return
    if model.sequence_dim is None and not has_specs:
        raise ValueError(
            f"The axis {CONTEXT!r} of `mesh` has {size} devices, and nothing is divided over them. "
            "Say by `sequence_dim=1` that dim 1 of [b, T, ...] has the tokens, or give "
            f"{CONTEXT!r} size 1."
        )
    if model.sequence_dim is not None and num_slices > 1:
        raise ValueError(
            f"`schedule` cuts sequences into {num_slices} slices, and the axis {CONTEXT!r} of "
            f"`mesh` divides them over {size} devices. Give one of the two."
        )


def boundary_of_slices(
    embed: Callable, mesh: Mesh, dim: int | None, loss: Callable | None = None
) -> BoundaryOfSlices | None:
    """Returns the rule by which functions of single tokens run on slices along a dim, if known."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if dim is None or mesh.shape.get(CONTEXT, 1) == 1 or types[CONTEXT] != AxisType.Auto:
        return None
    return BoundaryOfSlices(embed, loss, CONTEXT, dim)


def is_divided(shape: tuple[int, ...], dim: int, size: int) -> bool:
    """Returns whether the devices of `context` divide the tokens of an array."""
    return len(shape) > dim and shape[dim] % size == 0


def sequences_divided(tree: PyTree, mesh: Mesh, dim: int | None, lead: int = 0) -> PyTree:
    """Returns a tree whose leaves [..., b, T, ...] are divided over `context`, if they have T.

    `dim` is that of T behind `lead` dims; None leaves them as they are.
    """
    size = mesh.shape.get(CONTEXT, 1)
    if dim is None or size == 1:
        return tree
    place = dim + lead
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * place, CONTEXT)

    if not any(is_divided(jnp.shape(leaf), place, size) for leaf in jax.tree.leaves(tree)):
        shapes = [jnp.shape(leaf)[lead:] for leaf in jax.tree.leaves(tree)]
        raise ValueError(
            f"`sequence_dim` is {dim}, and no array has a dim {dim} that the {size} devices "
            f"of the axis {CONTEXT!r} divide: their shapes are {shapes}."
        )
    return jax.tree.map(
        lambda x: reshard_to_spec(x, spec, mesh) if is_divided(jnp.shape(x), place, size) else x,
        tree,
    )
