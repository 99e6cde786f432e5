"""The gathers of the weights of stages, of single layers, and of embedding and head.

Frozen parameters of layers stay sharded over `fsdp` until a layer reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...autodiff import recompute
from ...autodiff.staged_model import Past
from ...sharding.specs import axes_of, only_axes
from ...spmd import Gather
from ...spmd.weight_gather import (
    gather_by_specs,
    gather_in_layers,
    gathering_layer,
    join_gathers,
    layer_gather,
)
from .._engine import PipelineSpec
from ._params import cast_params, manual_row_axes, over_data, param_spec_tree, read_spec_tree


def weight_gathers(
    spec: PipelineSpec, weights: dict[str, PyTree], keys: PyTree = ()
) -> tuple[Gather, Gather]:
    """Returns the gather of the weights of a stage, and that of `{"embed": ..., "head": ...}`."""
    boundary = {name: weights[name] for name in ("embed", "head")}
    return _stage_gather(spec, weights["stages"], keys), boundary_gather(spec, boundary)


def boundary_gather(spec: PipelineSpec, boundary: dict[str, PyTree]) -> Gather:
    """Returns the gather of the weights of embedding and head, or of one of them."""
    of_groups = {name: _specs(spec, name, tree) for name, tree in boundary.items()}
    stored, read, gradients = (
        {name: specs[i] for name, specs in of_groups.items()} for i in range(3)
    )

    def cast(boundary: dict[str, PyTree]) -> dict[str, PyTree]:
        return {name: cast_params(spec, name, tree) for name, tree in boundary.items()}

    # Once in a step, XLA:TPU sums their gradients as all-reduces, which fail in bfloat16 ("Value
    # element type 'f32' does not match base element type 'bf16'", libtpu 0.0.48.1).
    return _whole_gather(spec.with_options(reduce_dtype=None), cast, stored, read, gradients)


def _stage_gather(spec: PipelineSpec, stages: PyTree, keys: PyTree) -> Gather:
    specs = _specs(spec, "stages", stages)
    of_all = partial(_whole_gather, spec, partial(cast_params, spec, "stages"))
    rows, reduce_dtype = manual_row_axes(spec), spec.options.reduce_dtype
    of_layers = partial(gather_in_layers, batch_axes=rows, reduce_dtype=reduce_dtype)
    if spec.gather != "layer":
        gather = of_all(*specs)
    elif jax.tree.structure(spec.layer_specs) == jax.tree.structure(specs[0]):
        gather = of_layers(*specs)
    else:  # as `share` returns stages
        parts = {"layers": of_layers, "shared": of_all}
        gather = join_gathers({k: of(*(tree[k] for tree in specs)) for k, of in parts.items()})
    return replace(gather, key_specs=_key_specs(spec, keys))


def _whole_gather(spec: PipelineSpec, cast: Callable[[PyTree], PyTree], *specs: PyTree) -> Gather:
    when = "once" if spec.gather == "layer" else spec.gather
    return gather_by_specs(
        *specs,
        when=when,
        cast=cast,
        batch_axes=manual_row_axes(spec),
        reduce_dtype=spec.options.reduce_dtype,
    )


def _specs(spec: PipelineSpec, group: str, weights: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Returns specs of stored and of gathered weights, and of stored gradients: of one stage."""
    lead = (None,) * 3 if group == "stages" else ()
    dropped = max(0, len(lead) - 1)  # the dims of chunks and ranks

    def specs(spec: PipelineSpec) -> PyTree:
        tree = param_spec_tree(group, weights, spec.mesh, spec.param_specs, lead)
        return jax.tree.map(lambda leaf_spec: PartitionSpec(*leaf_spec[dropped:]), tree)

    stored, gradients = specs(spec), specs(over_data(spec, {group: weights}))
    return stored, read_spec_tree(stored), gradients


def gather_of_layer(spec: PipelineSpec) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns a function that gathers the weights of one layer over `fsdp`."""
    stored, rows = spec.layer_specs, manual_row_axes(spec)
    unsharded, cast = read_spec_tree(stored), partial(cast_params, spec, "stages")
    gather = layer_gather(
        stored, unsharded, cast=cast, batch_axes=rows, reduce_dtype=spec.options.reduce_dtype
    )

    def run(weights: PyTree, x: PyTree) -> PyTree:
        # A program without ranks, such as that of shapes, has weights that are whole.
        has_ranks = "stage" in jax.sharding.get_abstract_mesh().manual_axes
        return gather(weights, x) if has_ranks else weights

    return run


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


def to_frozen_shards(spec: PipelineSpec, frozen: PyTree) -> PyTree:
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


def gathering_frozen(spec: PipelineSpec, layer: Callable) -> Callable:
    """Returns a layer that gathers its frozen parameters, in its forward and in its backward.

    A layer is `(weights, x, inputs, (dropout key, frozen parameters)) -> result`, with `past`
    behind that if it runs a slice.
    """

    def of_gathered(
        frozen: PyTree, x: PyTree, weights: PyTree, inputs: PyTree, key: Any, *past: Past
    ) -> Any:
        return layer(weights, x, inputs, (key, frozen), *past)

    of_shards = gathering_layer(of_gathered, partial(_gathered_frozen, spec))

    def run(
        weights: PyTree, x: PyTree, inputs: PyTree, constants: tuple[Any, Any], *past: Past
    ) -> Any:
        key, frozen = constants
        f = of_shards if isinstance(frozen, FrozenShards) else of_gathered
        return f(frozen, x, weights, inputs, key, *past)

    return run


def _gathered_frozen(spec: PipelineSpec, shards: FrozenShards, x: PyTree) -> PyTree:
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


def _key_specs(spec: PipelineSpec, keys: PyTree) -> PyTree:
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
