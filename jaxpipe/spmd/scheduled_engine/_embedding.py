"""The gradient of the embedding, which the rank of the first stage adds up.

Where devices have slices of sequences, each adds the gradient of its own tokens to a sum of its
own, and sums are added over devices after the last tick. Otherwise XLA's partitioner gathers the
float32 cotangents of all tokens of a microbatch, as it does not divide a scatter onto a sum.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ...autodiff import StagedModel
from ...autodiff.backward import floating
from ...autodiff.staged_model import EmbedOfSlices
from ...ir.transforms import add_gradients
from .._buffers import add_trees, to_accum_dtype
from ..ranks import pvary, zeros, zeros_like

_OF_SLICES = "embed of slices"
"""Name of the group with the sums of devices, [n, ...] for n of them, beside "embed" and "head"."""


def zero_boundary_gradients(model: StagedModel, boundary: PyTree) -> dict[str, PyTree]:
    """Returns zeros for the gradients of the gathered weights of embedding and head."""
    gradients = to_accum_dtype(floating(boundary))
    if model.embed_of_slices is None:
        return zeros_like(gradients)
    axis = model.embed_of_slices.axis
    lead = (jax.sharding.get_abstract_mesh().shape[axis],)
    parts = jax.tree.map(
        lambda x: lax.with_sharding_constraint(zeros(x, lead=lead), P(axis)), gradients["embed"]
    )
    return zeros_like(model.boundary(gradients)) | {_OF_SLICES: parts}


def embed_group(model: StagedModel) -> str:
    """Returns the name of the group that `add_embed_gradient` adds to."""
    return "embed" if model.embed_of_slices is None else _OF_SLICES


def add_embed_gradient(
    model: StagedModel, weights: PyTree, batch_inputs: PyTree, dx: PyTree, sums: PyTree
) -> PyTree:
    """Adds the gradient of the embedding of a microbatch to `sums`, those of `embed_group`."""
    if model.embed_of_slices is None:
        return _adding(model.embed)(weights, batch_inputs, dx, sums)
    return _on_slices(model.embed_of_slices, weights, batch_inputs, dx, sums)


def sum_of_slices(gradients: dict[str, PyTree]) -> dict[str, PyTree]:
    """Returns the gradients of "embed" and "head", with the sums of devices added to each other."""
    if _OF_SLICES not in gradients:
        return gradients
    embed = jax.tree.map(lambda x: jnp.sum(x, axis=0), gradients[_OF_SLICES])
    if "embed" in gradients:  # the loss reads it too
        embed = add_trees(gradients["embed"], embed)
    return {"embed": embed, "head": gradients["head"]}


def _adding(embed: Callable) -> Callable[[PyTree, PyTree, PyTree, PyTree], PyTree]:
    """Returns `(weights, inputs, dx, sums) -> sums` plus the gradient by the weights."""

    def gradient(weights, batch_inputs, dx):
        def of_weights(weights):  # constants in its output would not vary over ranks, as dx does
            return floating(jax.tree.map(pvary, embed(weights, batch_inputs)))

        _, pull = jax.vjp(of_weights, weights)
        return pull(dx)[0]

    return lambda weights, inputs, dx, sums: add_gradients(gradient, weights, inputs, dx)(sums)


def _on_slices(
    how: EmbedOfSlices, weights: PyTree, batch_inputs: PyTree, dx: PyTree, parts: PyTree
) -> PyTree:
    def local(weights, batch_inputs, dx, parts):
        own = jax.tree.map(lambda x: lax.squeeze(x, [0]), parts)
        weights = jax.tree.map(pvary, weights)
        added = _adding(how.function)(weights, batch_inputs, dx, own)
        return jax.tree.map(lambda x: lax.expand_dims(x, [0]), added)

    run = jax.shard_map(
        local,
        axis_names={how.axis},
        in_specs=(P(), how.specs(batch_inputs), how.specs(dx), P(how.axis)),
        out_specs=P(how.axis),
    )
    return run(weights, batch_inputs, dx, parts)
