"""Gradients of embedding and head, which a rank adds up over microbatches.

Where devices have slices of sequences, each adds the gradients of its own tokens to sums of its
own, and these are added over devices after the last tick. Left to itself, XLA's partitioner sums
the head's gradient over devices for every microbatch, and gathers the float32 cotangents of all
tokens for the embedding's, as it does not divide a scatter onto a sum.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree, Scalar

from ...autodiff import StagedModel
from ...autodiff.backward import floating
from ...autodiff.staged_model import Aux, BoundaryOfSlices
from ...ir.transforms import add_gradients
from .._boundary import add_to_boundary, loss_and_gradients
from .._buffers import add_trees, to_accum_dtype
from ..ranks import pvary, zeros, zeros_like

Sums = dict[str, dict[str, PyTree]]
"""By group, and in it by name, "embed" or "head"."""

_WHOLE = "whole"
"""The group of sums over all tokens of a microbatch."""

_OF_SLICES = "of slices"
"""The group of sums over the tokens of a device: leaves are [n, ...], for the n devices of the
axis that divides sequences."""


def zero_sums(model: StagedModel, boundary: dict[str, PyTree], vocab_parallel: bool) -> Sums:
    """Returns zeros for the gradients of the gathered weights of embedding and head."""
    gradients, how = to_accum_dtype(floating(boundary)), model.of_slices
    if how is None:
        return {_WHOLE: zeros_like(gradients)}
    # With slices, all ranks compute a loss together as they do without.
    of_loss = model.boundary(gradients) if vocab_parallel or how.loss is None else {}
    names = {*gradients} - {*of_loss} | {"embed"}
    lead = (jax.sharding.get_abstract_mesh().shape[how.axis],)
    of_slices = jax.tree.map(
        lambda x: lax.with_sharding_constraint(zeros(x, lead=lead), P(how.axis)),
        {name: gradients[name] for name in names},
    )
    return {_WHOLE: zeros_like(of_loss), _OF_SLICES: of_slices}


def embed_group(model: StagedModel) -> str:
    """Returns the group that has the sums of the embedding."""
    return _WHOLE if model.of_slices is None else _OF_SLICES


def add_embed_gradient(
    model: StagedModel, weights: PyTree, batch_inputs: PyTree, dx: PyTree, sums: PyTree
) -> PyTree:
    """Adds the gradient of the embedding of a microbatch to `sums`, those of `embed_group`."""
    how = model.of_slices
    if how is None:
        return _adding(model.embed)(weights, batch_inputs, dx, sums)

    def local(weights: PyTree, batch_inputs: PyTree, dx: PyTree, sums: PyTree) -> PyTree:
        return _adding(how.embed)(jax.tree.map(pvary, weights), batch_inputs, dx, sums)

    specs = P(), how.specs(batch_inputs), how.specs(dx)
    return _with_own_sums(how, local, specs, ())(weights, batch_inputs, dx, sums)[0]


def add_loss_gradients(
    model: StagedModel, boundary: dict[str, PyTree], y: PyTree, batch_inputs: PyTree, sums: Sums
) -> tuple[tuple[Scalar, Aux], Sums, PyTree]:
    """Returns (loss, metrics) of a microbatch, `sums` with its gradients, and that of `y`."""
    if "head" not in sums.get(_OF_SLICES, {}):
        value, (grads, dy) = loss_and_gradients(model, boundary, y, batch_inputs)
        return value, add_whole(sums, grads), dy
    how = model.of_slices
    assert how is not None and how.loss is not None, "as `zero_sums` has the group"
    of_slice = replace(model, loss=how.loss)

    def local(boundary: PyTree, y: PyTree, batch_inputs: PyTree, sums: PyTree) -> Any:
        boundary = jax.tree.map(pvary, boundary)
        value, (grads, dy) = loss_and_gradients(of_slice, boundary, y, batch_inputs)
        return add_to_boundary(sums, grads), lax.psum(value, how.axis), dy

    specs = P(), how.specs(y), how.specs(batch_inputs)
    run = _with_own_sums(how, local, specs, (P(), how.specs(floating(y))))
    own, value, dy = run(model.boundary(boundary), y, batch_inputs, sums[_OF_SLICES])
    return value, sums | {_OF_SLICES: own}, dy


def add_whole(sums: Sums, gradients: dict[str, PyTree]) -> Sums:
    """Adds gradients of all tokens of a microbatch."""
    return sums | {_WHOLE: add_to_boundary(sums[_WHOLE], gradients)}


def all_sums(sums: Sums) -> dict[str, PyTree]:
    """Returns the gradients of "embed" and "head", summed over the devices of slices."""
    total = sums[_WHOLE]
    for name, parts in sums.get(_OF_SLICES, {}).items():
        of_slices = jax.tree.map(lambda x: jnp.sum(x, axis=0), parts)
        total = total | {name: add_trees(total[name], of_slices) if name in total else of_slices}
    return total


def _adding(embed: Callable) -> Callable[[PyTree, PyTree, PyTree, PyTree], PyTree]:
    """Returns `(weights, inputs, dx, sums) -> sums` plus the gradient by the weights."""

    def gradient(weights, batch_inputs, dx):
        def of_weights(weights):  # constants in its output would not vary over ranks, as dx does
            return floating(jax.tree.map(pvary, embed(weights, batch_inputs)))

        _, pull = jax.vjp(of_weights, weights)
        return pull(dx)[0], ()

    return lambda weights, inputs, dx, sums: add_gradients(sums, gradient, weights, inputs, dx)[0]


def _with_own_sums(
    how: BoundaryOfSlices, local: Callable, specs: tuple, result_specs: tuple
) -> Callable[..., tuple]:
    """Returns a function of whole arrays and sums [n, ...] that runs `local` on every slice.

    Args:
        local: `(*arguments, sums) -> sums` or `-> (sums, *results)`, of one device.
    """

    def run(*arguments: PyTree) -> tuple:
        own = jax.tree.map(lambda x: lax.squeeze(x, [0]), arguments[-1])
        returned = local(*arguments[:-1], own)
        own, *results = returned if result_specs else (returned,)
        return jax.tree.map(lambda x: lax.expand_dims(x, [0]), own), *results

    parts = P(how.axis)
    return jax.shard_map(
        run, axis_names={how.axis}, in_specs=(*specs, parts), out_specs=(parts, *result_specs)
    )
