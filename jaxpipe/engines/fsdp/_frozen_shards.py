"""Frozen parameters of layers that stay sharded over `fsdp` until a layer reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...autodiff import recompute
from ...autodiff.staged_model import Past
from ...sharding.specs import axes_of, only_axes
from ...spmd.weight_gather import gathering_layer, layer_gather
from .._engine import PipelineSpec
from ._params import cast_params, manual_row_axes, param_spec_tree, read_spec_tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrozenShards:
    """Frozen parameters, a pytree.

    Attributes:
        tree: The parameters, with the dims of stages and layers in front or without.
        specs: The spec of each leaf, without these dims.
    """

    tree: Any
    specs: tuple[PartitionSpec, ...] = field(metadata={"static": True})


def to_shards(spec: PipelineSpec, frozen: PyTree) -> PyTree:
    """Returns frozen parameters [v, S, n, ...] as `FrozenShards`, if every layer gathers its own.

    Stages that store more than their input would store gathered parameters for each microbatch.
    """
    by_layer = spec.gather == "layer" or (spec.gather == "tick" and spec.remat is recompute)
    if not by_layer or not jax.tree.leaves(frozen):
        return frozen
    lead = (None,) * 3
    specs = param_spec_tree("stages", frozen, spec.mesh, spec.param_specs, lead)
    leaves = jax.tree.leaves(specs)
    return FrozenShards(frozen, tuple(PartitionSpec(*leaf_spec[3:]) for leaf_spec in leaves))


def gathering(spec: PipelineSpec, layer: Callable) -> Callable:
    """Returns a layer that gathers its frozen parameters, in its forward and in its backward.

    A layer is `(weights, x, inputs, (dropout key, frozen parameters)) -> result`, with `past`
    behind that if it runs a slice.
    """

    def of_gathered(
        frozen: PyTree, x: PyTree, weights: PyTree, inputs: PyTree, key: Any, *past: Past
    ) -> Any:
        return layer(weights, x, inputs, (key, frozen), *past)

    of_shards = gathering_layer(of_gathered, partial(_gathered, spec))

    def run(
        weights: PyTree, x: PyTree, inputs: PyTree, constants: tuple[Any, Any], *past: Past
    ) -> Any:
        key, frozen = constants
        f = of_shards if isinstance(frozen, FrozenShards) else of_gathered
        return f(frozen, x, weights, inputs, key, *past)

    return run


def _gathered(spec: PipelineSpec, shards: FrozenShards, x: PyTree) -> PyTree:
    if "fsdp" not in jax.sharding.get_abstract_mesh().manual_axes:
        return shards.tree  # whole, in a program without ranks
    leaves, tree = jax.tree.flatten(shards.tree)
    is_gathered = ["fsdp" in axes_of(leaf_spec) for leaf_spec in shards.specs]

    def gathered_only(values: Sequence[Any]) -> PyTree:
        """Returns the tree with None at other leaves, so that all have their paths."""
        pairs = zip(values, is_gathered, strict=True)
        return tree.unflatten([value if gathered else None for value, gathered in pairs])

    specs, cast = gathered_only(shards.specs), partial(cast_params, spec, "frozen")
    gather = layer_gather(specs, read_spec_tree(specs), cast=cast, batch_axes=manual_row_axes(spec))
    whole = iter(jax.tree.leaves(gather(gathered_only(leaves), x)))
    pairs = zip(leaves, is_gathered, strict=True)
    return tree.unflatten([next(whole) if gathered else leaf for leaf, gathered in pairs])


def key_specs(spec: PipelineSpec, keys: PyTree) -> PyTree:
    """Returns the specs of the keys of a stage over manual axes, None if they are whole."""

    def is_shards(x: Any) -> bool:
        return isinstance(x, FrozenShards)

    def specs(x: Any) -> PyTree:
        if not is_shards(x):
            return PartitionSpec()
        axes = manual_row_axes(spec)
        manual = [PartitionSpec(None, *only_axes(leaf_spec, axes)) for leaf_spec in x.specs]
        return FrozenShards(jax.tree.unflatten(jax.tree.structure(x.tree), manual), x.specs)

    if not any(map(is_shards, jax.tree.leaves(keys, is_leaf=is_shards))):
        return None
    return jax.tree.map(specs, keys, is_leaf=is_shards)
