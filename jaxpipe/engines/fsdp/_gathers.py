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
    plan: PipelineSpec, weights: dict[str, PyTree], keys: PyTree = ()
) -> tuple[Gather, Gather]:
    """Returns the gather of the weights of a stage, and that of `{"embed": ..., "head": ...}`."""
    boundary = {name: weights[name] for name in ("embed", "head")}
    return _stage_gather(plan, weights["stages"], keys), boundary_gather(plan, boundary)


def boundary_gather(plan: PipelineSpec, boundary: dict[str, PyTree]) -> Gather:
    """Returns the gather of the weights of embedding and head, or of one of them."""
    of_groups = {name: _specs(plan, name, tree) for name, tree in boundary.items()}
    stored, read, gradients = (
        {name: specs[i] for name, specs in of_groups.items()} for i in range(3)
    )

    def cast(boundary: dict[str, PyTree]) -> dict[str, PyTree]:
        return {name: cast_params(plan, name, tree) for name, tree in boundary.items()}

    # Once in a step, XLA:TPU sums their gradients as all-reduces, which fail in bfloat16 ("Value
    # element type 'f32' does not match base element type 'bf16'", libtpu 0.0.48.1).
    return _whole_gather(plan.with_options(reduce_dtype=None), cast, stored, read, gradients)


def _stage_gather(plan: PipelineSpec, stages: PyTree, keys: PyTree) -> Gather:
    specs = _specs(plan, "stages", stages)
    of_all = partial(_whole_gather, plan, partial(cast_params, plan, "stages"))
    rows, reduce_dtype = manual_row_axes(plan), plan.options.reduce_dtype
    of_layers = partial(gather_in_layers, batch_axes=rows, reduce_dtype=reduce_dtype)
    if plan.gather != "layer":
        gather = of_all(*specs)
    elif jax.tree.structure(plan.layer_specs) == jax.tree.structure(specs[0]):
        gather = of_layers(*specs)
    else:  # as `share` returns stages
        parts = {"layers": of_layers, "shared": of_all}
        gather = join_gathers({k: of(*(tree[k] for tree in specs)) for k, of in parts.items()})
    return replace(gather, key_specs=key_specs(plan, keys))


def _whole_gather(plan: PipelineSpec, cast: Callable[[PyTree], PyTree], *specs: PyTree) -> Gather:
    when = "once" if plan.gather == "layer" else plan.gather
    return gather_by_specs(
        *specs,
        when=when,
        cast=cast,
        batch_axes=manual_row_axes(plan),
        reduce_dtype=plan.options.reduce_dtype,
    )


def _specs(plan: PipelineSpec, group: str, weights: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Returns specs of stored and of gathered weights, and of stored gradients: of one stage."""
    lead = (None,) * 3 if group == "stages" else ()
    dropped = max(0, len(lead) - 1)  # the dims of chunks and ranks

    def specs(plan: PipelineSpec) -> PyTree:
        tree = param_spec_tree(group, weights, plan.mesh, plan.param_specs, lead)
        return jax.tree.map(lambda spec: PartitionSpec(*spec[dropped:]), tree)

    stored, gradients = specs(plan), specs(over_data(plan, {group: weights}))
    return stored, read_spec_tree(stored), gradients


def gather_of_layer(plan: PipelineSpec) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns a function that gathers the weights of one layer over `fsdp`."""
    stored, rows = plan.layer_specs, manual_row_axes(plan)
    unsharded, cast = read_spec_tree(stored), partial(cast_params, plan, "stages")
    gather = layer_gather(
        stored, unsharded, cast=cast, batch_axes=rows, reduce_dtype=plan.options.reduce_dtype
    )

    def run(weights: PyTree, x: PyTree) -> PyTree:
        # A program without ranks, such as that of shapes, has weights that are whole.
        has_ranks = "stage" in jax.sharding.get_abstract_mesh().manual_axes
        return gather(weights, x) if has_ranks else weights

    return run
