"""The memory of a pipeline by arithmetic on shapes: nothing is allocated or compiled.

Sizes are those of the model and its shardings; its engine says what a step makes of them. S ranks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import PyTree

from ..._compat import jaxprs_in_params
from ...autodiff import keep
from ...autodiff.backward import floating, pullback, split_backward
from ...autodiff.staged_model import Past, accum_dtype
from ...devices import hardware
from ...engines import (
    LIVE,
    PeakMemory,
    PipelineSpec,
    Sharded,
    StepCounts,
    StepSizes,
    loss_bytes,
    most_bytes_for_several_of,
)
from ...engines.fsdp import (
    cast_params,
    gathered_size,
    gathered_spec,
    num_row_shards,
    over_data,
    row_axes,
)
from ...schedules import language
from .._frozen import unmark
from .._params import weights_of

_KINDS = tuple(kind.name for kind in fields(PeakMemory))


@dataclass(frozen=True, repr=False)
class MemoryTable:
    """Bytes on one device of every rank at the peak of a step. Prints as a table.

    It is what `jaxpipe.plan` predicts. `PipelinedModel.compile` has what a compiler says.

    Attributes:
        device: The generation of the devices.
        device_bytes: The memory of a device.
        ranks: [S] the memory of a device of every rank, by kind.
    """

    device: str
    device_bytes: int
    ranks: tuple[PeakMemory, ...]

    @property
    def totals(self) -> tuple[float, ...]:
        """[S] the bytes of all kinds."""
        return tuple(rank.total for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """True if every rank needs less than its device has."""
        return max(self.totals) < self.device_bytes

    def __repr__(self) -> str:
        name, unit = ("kB", 1e3) if max(self.totals) < 1e7 else ("MB", 1e6)
        lines = [f"{name} per device{''.join(f'{kind:>13}' for kind in _KINDS)}        total"]
        for rank, peak in enumerate(self.ranks):
            sizes = (*(getattr(peak, kind) for kind in _KINDS), peak.total)
            lines.append(f"rank {rank:<8}" + "".join(f"{size / unit:>13,.1f}" for size in sizes))
        share = max(self.totals) / self.device_bytes
        verdict = "fits" if self.fits else "does not fit"
        lines.append(
            f"{verdict}: about {share:.1%} of the {self.device_bytes / 1e9:.1f} GB of a "
            f"{self.device}"
        )
        return "\n".join(lines)


def memory_table(
    pipe: Any, params: PyTree, batch: PyTree, key: Any, device: str, num_moments: int
) -> MemoryTable:
    """Returns the memory of a train step; raises a `ValueError` if the device is unknown."""
    stored = pipe.shapes(params)
    spec = pipe.plan(stored["layers"].num_layers, stored["layers"].specs)
    engine = pipe.engine
    is_gathered = gathered_size(spec.mesh, spec.param_specs) > 1
    counts = StepCounts(
        num_ranks=spec.mesh.shape["stage"],
        chunks=_num_stages(spec),
        num_microbatches=spec.num_microbatches,
        gather=spec.gather if is_gathered else None,
        num_calls=spec.num_calls,
        options=spec.options,
        adds_in_loops=_adds_in_loops(spec),
        most_for_several=most_bytes_for_several_of(spec),
    )
    memory_bytes, buffers_by_rank = hardware(device).memory_bytes, engine.buffers(spec)
    splits = any(buffers.wgrad_residuals for buffers in buffers_by_rank)
    row = _traced_sizes(pipe, stored, batch, key, splits=splits)
    gathers_once = not hardware(device).is_gpu and spec.num_microbatches > 1
    ranks = zip(buffers_by_rank, _weight_sizes(pipe, spec, stored, num_moments), strict=True)
    return MemoryTable(
        device,
        memory_bytes,
        tuple(
            engine.memory(counts, buffers, _step_sizes(pipe, spec, sizes, row, gathers_once))
            for buffers, sizes in ranks
        ),
    )


def _step_sizes(
    pipe: Any, spec: PipelineSpec, weights: dict[str, Any], row: dict[str, Any], gathers_once: bool
) -> StepSizes:
    """Returns the sizes of a rank, from those of its weights and of a microbatch."""
    layers = spec.layout.layers_per_stage * _num_stages(spec)
    keeps_all = spec.remat is keep and spec.layer_remat is keep
    return StepSizes(
        **weights,
        **row,
        layer_read=weights["reads"].whole / layers,
        head_grads=0.0 if pipe.model.tied else weights["boundary_grads"].whole,
        outer_read=weights["boundary_read"] * gathers_once,
        kept_read=weights["reads"].whole * keeps_all * (not pipe.engine.pipelines),
    )


def _adds_in_loops(spec: PipelineSpec) -> bool:
    """Returns whether all layers run in loops, one for each kind, and axes are automatic."""
    runs = len(list(groupby(spec.kinds_of_layers)))
    is_typed = AxisType.Explicit in spec.mesh.axis_types
    return spec.scan_layers is not False and runs == len(spec.kinds) and not is_typed


def _num_stages(spec: PipelineSpec) -> int:
    """Returns the stages that each rank runs."""
    copies = language.num_copies(spec.schedule) if spec.schedule else 0
    return spec.layout.num_repeats + copies


def _weight_sizes(
    pipe: Any, spec: PipelineSpec, stored: dict[str, Any], num_moments: int
) -> list[dict[str, Any]]:
    """Returns the bytes of weights and gradients on every rank, by the fields of `StepSizes`."""
    engine, tied = pipe.engine, pipe.model.tied
    weights, trainable = weights_of(unmark(stored)), weights_of(pipe.partition(stored)[0])
    divided, whole = over_data(spec, trainable), gathered_spec(spec, weights)
    grads, reads = jax.tree.map(_in_accum_dtype, trainable), _as_read(spec, weights)
    casts = jax.tree.map(lambda x, y: y if x.dtype != y.dtype else None, weights, reads)

    def of(spec: PipelineSpec, tree: dict[str, Any], count: Callable = engine.step_bytes) -> Any:
        return count(spec, tree, tied)

    def shards(spec: PipelineSpec, tree: dict[str, Any]) -> list[Sharded]:
        return [Sharded(*pair) for pair in zip(of(spec, tree), of(whole, tree), strict=True)]

    stages, boundary = partial(_part, of_stages=True), partial(_part, of_stages=False)
    columns = {
        "weights": of(spec, weights),
        "optimizer": [num_moments * x for x in of(divided, trainable, engine.storage.rank_bytes)],
        "grads": shards(divided, stages(grads)),
        "reads": shards(spec, stages(reads)),
        "casts": shards(spec, stages(casts)),
        "boundary_grads": shards(divided, boundary(grads)),
        "boundary_read": of(whole, boundary(reads)),
        "boundary_cast": of(spec, boundary(casts)),
        "call_grads": of(divided, trainable),
        "largest_grad": [_largest_grad(weights["stages"])] * spec.mesh.shape["stage"],
    }
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _in_accum_dtype(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, accum_dtype(x.dtype))


def _part(weights: dict[str, Any], *, of_stages: bool) -> dict[str, Any]:
    """Returns groups of weights with None in place of the leaves of stages, or of all others."""
    return {
        group: tree if (group == "stages") == of_stages else jax.tree.map(lambda _: None, tree)
        for group, tree in weights.items()
    }


def _as_read(spec: PipelineSpec, weights: dict[str, Any]) -> dict[str, Any]:
    """Returns the shapes of weights in the dtypes to which the engine casts them."""

    def cast(group: str, tree: PyTree) -> PyTree:
        if isinstance(tree, list):
            return [cast(group, stage) for stage in tree]
        return jax.eval_shape(partial(cast_params, spec, group), tree)

    return {group: cast(group, tree) for group, tree in weights.items()}


def _largest_grad(stages: PyTree) -> int:
    """Returns the bytes of the gradient of the largest weight of a layer; 0 for trees of stages."""
    if isinstance(stages, list):
        return 0
    leaves = map(_in_accum_dtype, jax.tree.leaves(stages))
    return max((math.prod(x.shape[3:]) * x.dtype.itemsize for x in leaves), default=0)


def _traced_sizes(
    pipe: Any, stored: PyTree, batch: PyTree, key: Any, *, splits: bool
) -> dict[str, Any]:
    """Returns the bytes of a microbatch on a device, by the fields of `StepSizes`.

    Of stages that differ, those of the largest one. `splits` says that the backward has two halves.
    """
    traced = _trace(pipe, stored, batch, key, splits=splits)
    spec = traced.pop("spec")
    unwrapped = _trace(pipe, stored, batch, key, splits=False, layer_remat=keep)
    work = LIVE * unwrapped["kept"] / spec.layout.layers_per_stage
    again = traced.pop("kept") - traced["residuals"]
    if spec.layout.layers_per_stage > 1:  # what is computed again for all layers at once
        work += again * (LIVE if spec.layer_remat is keep else 1.0)
    loss = traced.pop("loss") / (spec.mesh.shape["stage"] if spec.options.vocab_parallel else 1)
    return traced | {"work": work, "loss": loss}


def _trace(
    pipe: Any, stored: PyTree, batch: PyTree, key: Any, *, splits: bool, **options: Any
) -> dict[str, Any]:
    """Traces the functions of a pipeline that is told other options.

    Returns:
        The spec, and bytes of one microbatch on a device: what the largest stage is given, stores
        with its rematerialization and without that of ticks ("kept"), and what the loss makes.
    """
    pipe = replace(pipe, gather="tick", told=replace(pipe.told, **options))
    traced: dict[str, Any] = dict.fromkeys(
        ("activation", "kept", "residuals", "wgrad_residuals", "past", "past_cotangent"), 0
    )

    def measure(*given: PyTree) -> None:
        spec, model, weights, inputs, keys = pipe._arguments(*given)
        rows = [jax.tree.map(partial(_first_piece, times=n), inputs) for n in (1, 2)]
        xs = [model.embed(weights["embed"], row) for row in rows]

        for i, (w, key) in enumerate(_stages(weights["stages"], keys)):
            entering = [model.hand_overs[i].take(x) for x in xs] if model.hand_overs else xs

            def of_a_row(count: Callable, stage: Callable) -> int:
                pairs = zip(entering, rows, strict=True)  # noqa: B023
                one, two = (count(stage, w, x, row, key) for x, row in pairs)  # noqa: B023
                return two - one  # what two rows store once is no residual of a row

            stage = model.stage_of(i)
            run = spec.remat(stage)
            of_stage = {
                "activation": _bytes(entering[0]),
                "kept": of_a_row(residual_bytes, stage),
                "residuals": of_a_row(residual_bytes, run),
            }
            if splits:
                of_stage["wgrad_residuals"] = of_a_row(wgrad_residual_bytes, run)
            if model.sliced_stage is not None:
                of_stage |= _past_bytes(model, spec, w, xs[0], rows[0], key)
            traced.update({name: max(size, traced[name]) for name, size in of_stage.items()})
        loss = jax.make_jaxpr(model.loss)(model.boundary(weights), xs[0], rows[0])
        traced["loss"] = loss_bytes(*_largest_product(loss.jaxpr))
        shards = num_row_shards(spec.mesh) if spec.whole_microbatches else 1
        for name in traced:  # of a slice, but for the state that slices carry
            traced[name] *= (1 if "past" in name else pipe.num_slices) / shards
        traced["spec"] = spec

    on_device = measure
    if not pipe.engine.program_per_rank:  # functions of all rows name the axes that divide these
        for axis in row_axes(pipe.mesh):
            size = pipe.mesh.shape[axis]
            on_device = jax.vmap(on_device, None, None, axis_name=axis, axis_size=size)
    jax.eval_shape(on_device, stored, batch, key)
    return traced


def _first_piece(leaf: Any, *, times: int) -> Any:
    """Returns the rows of one device in the first microbatch, repeated along dim 0."""
    return jnp.repeat(leaf[0, :1], times, axis=0)


def _stages(stages: Any, keys: Any) -> list[tuple[Any, Any]]:
    """Returns weights and keys of stages; of [v, S, ...] leaves one, as padded stages are alike."""
    if isinstance(stages, list):
        return list(zip(stages, keys if keys else [()] * len(stages), strict=True))
    return [jax.tree.map(lambda leaf: leaf[0, 0], (stages, keys))]


def _past_bytes(
    model: Any, spec: PipelineSpec, w: PyTree, x: PyTree, row: PyTree, key: PyTree
) -> dict[str, int]:
    """Returns the bytes of the state that the slices of a sequence carry, and of its cotangent."""
    assert spec.schedule is not None
    past = Past(num_slices=language.num_slices(spec.schedule))
    state = model.sliced_stage(w, x, row, key, past)[2].earlier
    sums = jax.tree.map(_in_accum_dtype, floating(state))
    return {"past": _bytes(state), "past_cotangent": _bytes(sums)}


def _bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _largest_product(jaxpr: Any) -> tuple[int, int]:
    """Returns the elements of the largest result of a matrix product, and the bytes of one."""
    results = (product.outvars[0].aval for product in _products(jaxpr))
    return max(((x.size, x.dtype.itemsize) for x in results), default=(0, 4))


def _products(jaxpr: Any) -> Iterator[Any]:
    """Yields the matrix products of a jaxpr and of those inside of it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _products(inner)


def residual_bytes(
    function: Callable, weights: PyTree, x: PyTree, inputs: PyTree, key: PyTree
) -> int:
    """Returns the bytes that a forward stores on the device for its backward, x among them."""
    pulled = pullback(function, weights, x, inputs, key)
    closed = jax.make_jaxpr(lambda *given: pulled.forward(*given)[1])(weights, x, inputs, key)
    return _device_bytes(closed.out_avals)


def wgrad_residual_bytes(
    function: Callable, weights: PyTree, x: PyTree, inputs: PyTree, key: PyTree
) -> int:
    """Returns the bytes that the I of a stage stores for its W."""
    split = split_backward(function, weights, x, inputs, key)
    out, residuals = jax.eval_shape(split.forward, weights, x, inputs, key)
    examples = weights, inputs, key, residuals, floating(out)
    return _device_bytes(jax.make_jaxpr(lambda *given: split.input(*given)[2])(*examples).out_avals)


def _device_bytes(avals: Any) -> int:
    stored = (aval for aval in avals if aval.memory_space != jax.memory.Space.Host)
    return sum(aval.size * aval.dtype.itemsize for aval in stored)
