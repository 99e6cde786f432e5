"""The gathers of the weights of stages, of single layers, and of embedding and head."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...spmd import Gather
from ...spmd.weight_gather import (
    gather_by_specs,
    gather_in_layers,
    join_gathers,
    layer_gather,
)
from .._engine import PipelineSpec
from ._frozen_shards import key_specs
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
    return replace(gather, key_specs=key_specs(spec, keys))


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
