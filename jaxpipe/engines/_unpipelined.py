"""The engine `unpipelined`: one program that runs microbatches one after the other."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import schedules
from ..autodiff import StagedModel, unpipelined
from ..autodiff.backward import apart
from ..devices import find_hardware
from ..schedules import Costs, Schedule, Timeline, builders
from ..schedules.lock_step import Ticks
from ..sharding.layout import LayerLayout
from ..spmd.weight_gather import (
    as_stored_on_gpus,
    axis_in_two_steps,
    constrain_by,
    gather_by_constraints,
)
from . import _stacked
from ._engine import Engine, PipelineSpec
from ._jit import jit
from ._memory import Buffers, PeakMemory, StepCounts, StepSizes, check_cap
from .fsdp import cast_params, over_data, param_spec_tree, read_spec_tree

_IN_FLIGHT = 1.5
"""Gathered layers that XLA:TPU holds beside the one that runs, if an iteration has several: fitted
to llama3.1-70b on 64 v5p and deepseek3-671b on 512, of which it is 2.1 of 91.2 GB and 9.5 of 88.6.
"""
_SHARE_IN_FLIGHT = 1 / 8
"""The most of a device's memory that these may take."""


def _prepare(
    schedule: Schedule | None,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None,
    memory_cap: float | None,
) -> tuple[None, Ticks | None]:
    del num_microbatches, costs
    if schedule is not None:
        raise ValueError(
            "`schedule` is given and `engine` is 'unpipelined', which runs no schedule. Give "
            "`schedule=None`, or leave `engine` out."
        )
    check_cap(
        memory_cap,
        num_ranks,
        f"every device runs the whole model, {{}} times the share of one of {num_ranks} ranks",
        "leave it out",
    )
    return None, None


def _layout(schedule: Schedule | None, num_ranks: int, counts: tuple[int, ...]) -> LayerLayout:
    """Returns all layers as one stage on one rank: the axis `stage` holds copies."""
    del schedule, num_ranks
    return LayerLayout(1, 1, sum(counts))


def _value(
    spec: PipelineSpec, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    model = _gathering(spec, model.with_constants(weights.get("constants", ())))
    with _mesh_in_context(spec):
        return unpipelined.value(model, *_without_repeats(weights, keys, batch_inputs))


def _value_and_grad(
    spec: PipelineSpec, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    arguments = _without_repeats(weights, keys, batch_inputs)
    model = _gathering(spec, model.with_constants(weights.get("constants", ())))
    model = replace(model, stage=spec.remat(model.stage))
    with _mesh_in_context(spec):
        value, grads = unpipelined.value_and_grad(model, *arguments)
    grads |= {"stages": jax.tree.map(lambda x: x[None], grads["stages"])}
    if spec.options.zero1:
        divided = over_data(spec, grads)
        grads = _stacked.put_like(divided, grads, grads, model.tied)
    return value, grads


def _mesh_in_context(spec: PipelineSpec) -> AbstractContextManager[Any]:
    """Shows the mesh to functions of the model, as the engines do that pipeline.

    Explicit axes are the user's to show: outside of `jax.jit` arrays would be typed by them.
    """
    if AxisType.Explicit in spec.mesh.axis_types:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh)


def _stage(spec: PipelineSpec, layer: Callable) -> Callable:
    """Returns a stage whose layers gather their weights one after the other."""

    def gathered(weights: PyTree, *arguments: Any) -> Any:
        return layer(_unsharded(spec, "stages", weights), *arguments)

    def stage(weights: PyTree, *arguments: Any) -> Any:
        scan = _layers_at_a_time(spec, weights)
        of_loop = replace(spec, scan_layers=scan)
        if scan is False or spec.layout.layers_per_stage == 1:  # no loop keeps them apart
            of_loop = replace(of_loop, layer_remat=apart(spec.layer_remat))
        return _stacked.stage(of_loop, gathered)(weights, *arguments)

    return stage


def _layers_at_a_time(spec: PipelineSpec, weights: PyTree) -> bool | int | None:
    """Returns `scan_layers`, or a number where it is left to the engine and one would wait."""
    stored = param_spec_tree("stages", weights, spec.mesh, spec.param_specs, (None,))
    count = spec.layout.layers_per_stage
    most = most_bytes_for_several(spec.scan_layers, count, stored, spec.mesh)
    if not most or _gathered_bytes(spec, weights, stored) / count > most:
        return spec.scan_layers
    return _layers_of_an_iteration(count)


def most_bytes_for_several(
    scan_layers: bool | int | None, count: int, stored: PyTree, mesh: Mesh
) -> float:
    """Returns the bytes of a gathered layer up to which a loop runs several in an iteration.

    A gather in two steps needs two products beside it, so of a layer alone the first step of all
    gathers and the second of the last scatters are exposed: llama3.1-70b on 64 v5p takes 19.4 s
    with one layer in an iteration, 18.1 with two and 17.7 with four, without kernels.

    Args:
        scan_layers: Whether layers run in a loop, or how many in each iteration; None or True if
            the engine may choose.
        count: The layers of the loop.
        stored: Specs of their stored weights.
        mesh: The devices, whose positions on a torus decide.

    Returns:
        Bytes on a device. They are 0 where gathers take one step or the number of layers is given.
    """
    is_said = scan_layers is not None and scan_layers is not True
    if is_said or AxisType.Explicit in mesh.axis_types or _layers_of_an_iteration(count) == 1:
        return 0.0
    if axis_in_two_steps(stored, mesh) is None:
        return 0.0
    kind = find_hardware(mesh.devices.flat[0].device_kind)
    assert kind is not None  # gathers in two steps are those of kinds in the table
    return _SHARE_IN_FLIGHT / _IN_FLIGHT * kind.memory_bytes


def _layers_of_an_iteration(count: int) -> int:
    return next((n for n in (4, 3, 2) if count % n == 0), 1)


def _gathered_bytes(spec: PipelineSpec, weights: PyTree, stored: PyTree) -> int:
    """Returns the bytes of weights on a device when all of them are gathered."""
    read = jax.eval_shape(partial(cast_params, spec, "stages"), weights)
    specs = read_spec_tree(stored)
    where = jax.tree.map(partial(NamedSharding, spec.mesh), specs)
    return _stacked.device_bytes(read, where)


def most_bytes_for_several_of(spec: PipelineSpec) -> float:
    """Returns the bytes of a gathered layer up to which the loop of a spec runs several at a time.

    Args:
        spec: The spec of a step. Only the engine without a pipeline has such loops.

    Returns:
        Bytes on a device, as `most_bytes_for_several` says.
    """
    stored = [PartitionSpec("fsdp"), *(leaf_spec for _, leaf_spec in spec.param_specs)]
    count = spec.layout.layers_per_stage
    return most_bytes_for_several(spec.scan_layers, count, stored, spec.mesh)


def _gathering(spec: PipelineSpec, model: StagedModel) -> StagedModel:
    """Returns the model whose embedding and loss gather their weights."""

    def embed(weights: PyTree, inputs_m: PyTree) -> Any:
        return model.embed(_unsharded(spec, "embed", weights), inputs_m)

    def loss(boundary: dict[str, PyTree], y: PyTree, inputs_m: PyTree) -> Any:
        whole = {name: _unsharded(spec, name, boundary[name]) for name in boundary}
        return model.loss(whole, y, inputs_m)

    return replace(model, embed=embed, loss=loss)


def _unsharded(spec: PipelineSpec, group: str, weights: PyTree) -> PyTree:
    """Returns weights that are no longer sharded over `fsdp`; their gradients are.

    Left to itself, XLA's partitioner may shard activations like the weights, over a dim other than
    rows, and copy them whole to every device to come back to rows.
    """
    mesh, weights = spec.mesh, cast_params(spec, group, weights)
    stored = param_spec_tree(group, weights, mesh, spec.param_specs)
    read = read_spec_tree(stored)
    if AxisType.Explicit in mesh.axis_types:  # the transpose writes the stored type by itself
        return weights if read == stored else constrain_by(read, mesh)(weights)
    weights = weights if read == stored else constrain_by(stored, mesh)(weights)
    if group == "stages" and not jax.sharding.get_abstract_mesh().empty:
        weights = as_stored_on_gpus(weights, stored)
    return weights if read == stored else gather_by_constraints(read, stored, mesh)(weights)


def _without_repeats(weights: dict[str, Any], keys: Any, batch_inputs: Any) -> tuple[Any, Any, Any]:
    """Drops dim 0, of the one repeat, of stages and keys; and the constants."""
    stages, keys = jax.tree.map(lambda x: x[0], (weights["stages"], keys))
    groups = {"embed": weights["embed"], "stages": stages, "head": weights["head"]}
    return groups, batch_inputs, keys


def _timeline(spec: PipelineSpec, costs: Costs) -> Timeline:
    """Returns one row, of the program that every rank runs."""
    one = builders.one_f_one_b(1, spec.num_microbatches)
    return schedules.simulate(one, costs)


def _memory(counts: StepCounts, buffers: Buffers, sizes: StepSizes) -> PeakMemory:
    """Returns the peak, which is in the backward of a layer, in the loss or of the embedding."""
    cast = sizes.casts.stored + sizes.boundary_cast
    gradients, late = sizes.grad_sums, 0.0 if counts.adds_in_loops else sizes.grad_sums
    if counts.num_microbatches == 1:  # nothing is added up: gradients have the dtype of weights
        gradients, late = 0.0, min(sizes.grad_sums, sizes.call_grads)
    gathers = 0.0
    if counts.gather:
        gathers = sizes.kept_read or sizes.layer_read
        if sizes.layer_read <= counts.most_for_several:
            gathers += _IN_FLIGHT * sizes.layer_read
        cast += sizes.outer_read
    activations = buffers.residuals * sizes.residuals + sizes.outer_residuals
    work = sizes.work + sizes.largest_grad
    # The gradients of head and embedding are whole until both are scattered.
    ends = sizes.boundary_grads.whole if sizes.head_read else 0.0
    if late + gathers + work >= max(sizes.loss, ends) + sizes.head_read:
        gradients, cast, logits = gradients + late, cast + gathers, 0.0
    elif ends > sizes.loss:
        gradients, cast, work, logits = gradients + ends, cast + sizes.head_read, 0.0, 0.0
    else:
        cast, work, logits = cast + sizes.head_read, 0.0, sizes.loss
    return PeakMemory(
        weights=sizes.weights,
        optimizer=sizes.optimizer,
        gradients=gradients,
        gathered=cast,
        activations=activations,
        logits=logits,
        buffers=work,
    )


UNPIPELINED = Engine(
    name="unpipelined",
    config_name="none",
    runs_schedules=False,
    options=frozenset({"zero1"}),
    storage=_stacked.STORAGE,
    prepare=_prepare,
    layout=_layout,
    stage=_stage,
    value=_value,
    value_and_grad=_value_and_grad,
    step_bytes=_stacked.rank_bytes,
    jit=jit,
    timeline=_timeline,
    buffers=lambda spec: (Buffers(1),) * spec.mesh.shape["stage"],
    expected_buffers=lambda family, counts: Buffers(1),
    memory=_memory,
    may_divide=lambda spec: True,
    has_branches=lambda spec: False,
)
