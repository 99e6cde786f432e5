"""Runs a batch through a pipeline module, for both Flax frontends (Linen and NNX)."""

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...sharding.specs import typed_by_specs
from ...spmd.circular_engine import circular
from ._method_loop import check_methods_can_run, loop_of_methods, overridden_methods
from ._methods import PipelineMethods, to_batch_inputs
from ._overwritten_weights import (
    MICROBATCH,
    broadcast_to_slots,
    slotted_weights,
    split_weights,
    stage_with_slots,
)
from ._settings import PipelineSettings
from ._stages import (
    check_microbatches,
    from_microbatches,
    from_stored,
    num_parts,
    pipeline_stages,
    to_microbatches,
    to_stored,
)
from ._weight_sharding import (
    describe_shardings,
    gather_of_names,
    physical_specs,
    reshard_microbatches,
)

Arrays = tuple[Any, Any, Any]
"""Inputs, segment ids and positions of a call."""


def split_batch(
    settings: PipelineSettings, arrays: Arrays, microbatched: bool
) -> tuple[PyTree, dict[str, Any]]:
    """Returns inputs and batch inputs as [M, rows, ...] leaves; `microbatched` ones are already."""
    inputs, segment_ids, positions = arrays
    split = check_microbatches if microbatched else to_microbatches
    leaves = {"inputs": inputs} | to_batch_inputs(segment_ids, positions)
    parts = split(leaves, settings.pipeline_shape.num_microbatches, settings.batch_size)
    return parts.pop("inputs"), parts


def run_batch(
    pipeline: PipelineMethods,
    arrays: Arrays,
    options: tuple[Any, Any],
    names: Any,
    overwritten: tuple[str, ...],
    microbatched: bool,
) -> tuple[PyTree, PyTree]:
    """Runs a batch through all stages; returns outputs and records, with M behind the stage.

    If a documented method of the module is overridden, the methods run the iterations, and are
    given the options (deterministic, model_mode). `names` are the logical specs of weights; None
    for the module's. A step overwrites the weights of the names `overwritten` with their gradient,
    as of FP8. If `microbatched`, leaves are [M, rows, ...] already.
    """
    stage, weights = pipeline.stage_function(*options, records=True), pipeline.stage_variables()
    names = pipeline.get_weight_sharding() if names is None else names
    settings, mesh = pipeline.settings, pipeline.mesh
    parts = num_parts(mesh, settings.batch_axes)
    specs = physical_specs(names, pipeline.axis_rules, mesh)
    if settings.debug_sharding:
        logging.getLogger("jaxpipe").info(describe_shardings(weights, names, specs))
    microbatches, batch_inputs = split_batch(settings, arrays, microbatched)
    microbatches = reshard_microbatches(
        microbatches, pipeline.axis_rules, mesh, settings.batch_axes
    )
    weights = typed_by_specs(weights, specs, mesh)
    weights = from_stored(weights, settings)
    others, slots = split_weights(weights, overwritten)
    overridden = overridden_methods(pipeline)
    if overridden:
        check_methods_can_run(pipeline, overridden, slots)
        state = pipeline.init_states(microbatches)
        engine, keys = loop_of_methods(pipeline, state, names, options), state["keys"]
    else:
        names, specs = (_with_repeats(tree, settings) for tree in (names, specs))
        keys = pipeline.draw_keys()
        _check_keys(keys, settings)
        if slots:
            M = settings.pipeline_shape.num_microbatches
            microbatch_ids = jnp.broadcast_to(jnp.arange(M)[:, None], (M, parts))
            batch_inputs |= {MICROBATCH: microbatch_ids}
            stage = stage_with_slots(stage)
            replicated = jax.tree.map(lambda _: PartitionSpec(None, None), slots)
            weights = slotted_weights(others, broadcast_to_slots(slots, M * parts))
            names, specs = (
                slotted_weights({name: tree[name] for name in others}, replicated)
                for tree in (names, specs)
            )
        gather = gather_of_names(
            weights, names, specs, mesh=mesh, when=settings.gather, batch_axes=settings.batch_axes
        )
        engine = partial(
            circular,
            mesh=mesh,
            scan_ticks=settings.scan_ticks,
            scan_repeats=settings.scan_repeats,
            delay=settings.pipeline_shape.forwarding_delay > 1,
            remat=settings.remat_tick,
            gather=gather,
        )
    ys, records = pipeline_stages(
        engine, stage, weights, microbatches, batch_inputs, keys, settings, mesh
    )
    return ys if microbatched else from_microbatches(ys), to_stored(records, settings)


def _with_repeats(specs: PyTree, settings: PipelineSettings) -> PyTree:
    """Returns specs of [R, S, ...] leaves of those of leaves as a module stores them."""
    if settings.dims[0] > 1:
        return specs
    return jax.tree.map(lambda spec: PartitionSpec(None, *spec), specs)


def _check_keys(keys: PyTree, settings: PipelineSettings) -> None:
    if settings.batch_axes and jax.tree.leaves(keys):
        raise ValueError(
            f"`pipeline_batch_axes` is {settings.batch_axes} and stages have random streams: each "
            "device would draw, for its own rows, other numbers than one with all rows. Leave "
            "`pipeline_batch_axes` at (), or the streams out."
        )
