"""A model of plain functions as a planner sees it: its layer is traced, and its products counted.

L layers. Tokens are those of x [rows, T, ...] between layers; rows, if x has no such dim.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
from jaxtyping import PyTree

from .. import sharding
from ..api import Model, PipelinedModel, layer_flops, pipeline
from ..api.inspection import (
    NumLayers,
    layer_with_weights,
    one_of_each_kind,
    residual_bytes,
    wgrad_residual_bytes,
    x_of_layers,
)
from ..autodiff.backward import floating
from ..cost.work import ActivationBytes, LayerWork, ModelWork
from ..engines import engine_of_any_schedule
from ..kernels import trace_for, trace_to_read
from ..xla.compile_report import CompileReport
from ._candidates import Space, StepLayout
from ._devices import Devices
from ._model import LayerSizes, PlannedModel, StateBytes, WeightBytes, WeightGroup
from ._request import PreparedPipeline, Request, Values
from ._trace import bytes_as_read, trace

_FLOAT32 = 4
_MOMENTS = 2  # of AdamW
_ONLY_KIND = "layer"

_AXES = ("data", "stage", "fsdp")


NOT_CHOSEN: Values = {
    "tensor": 1,
    "expert": 1,
    "context": 1,
    "scope": "tick",
    "gather": "tick",
    "vocab_tiling": 1,
}
"""What plans for a model of the user's own have in common: nobody gives it."""


@dataclass(frozen=True)
class OwnSource:
    """A model of plain functions: layouts are arguments of `jaxpipe.pipeline`.

    Attributes:
        model: The model.
        params: Its parameters, or their shapes.
        example: A batch, or its shapes.
        num_layers: L; or a pair for each kind of layers, its name and number of layers.
    """

    model: Model
    params: PyTree
    example: PyTree
    num_layers: NumLayers
    is_own = True

    def settings(self, candidate: StepLayout) -> Values:
        """Returns arguments by name; `mesh` has sizes, and `remat` the name of a policy."""
        engine = candidate.engine
        settings: Values = {
            "mesh": {
                axis: size for axis, size in candidate.sizes.items() if size > 1 or axis == "stage"
            },
            "schedule": candidate.family_name or None,
            "microbatches": candidate.microbatches,
            "remat": candidate.policy if engine.pipelines else "none",
        }
        if not engine.pipelines:
            settings["layer_remat"] = candidate.policy
        if candidate.chunks > 1:
            settings["chunks"] = candidate.chunks
        if engine.runs_schedules:
            settings["engine"] = engine.name
        if engine.runs_schedules or (engine.pipelines and self.model.has_kinds):
            settings["layers_per_stage"] = candidate.counts
        return settings

    def prepare(self, candidate: StepLayout, devices: Sequence[Any]) -> PreparedPipeline:
        """Returns the pipeline as its engine would run it."""
        pipe = self.pipeline(self.settings(candidate), devices)
        return PreparedPipeline(pipe.engine, pipe.plan(self.num_layers))

    def compile(self, settings: Values, num_rows: int, devices: Sequence[Any]) -> CompileReport:
        """Compiles a train step with AdamW."""
        import optax

        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params)
        pipe = self.pipeline(settings, devices)
        return pipe.compile(params, _rows(self.example, num_rows), optimizer=optax.adamw(1e-3))

    def pipeline(self, settings: Values, devices: Sequence[Any]) -> PipelinedModel:
        """Returns what `jaxpipe.pipeline` returns for the settings."""
        arguments: dict[str, Any] = {name: settings[name] for name in settings if name != "mesh"}
        mesh = sharding.make_mesh(settings["mesh"], devices=devices)
        return pipeline(self.model, mesh=mesh, **arguments)


def own_request(
    model: Model,
    params: PyTree,
    example: PyTree,
    devices: Devices,
    fixed: Mapping[str, Any],
    *,
    batch: int | None = None,
    memory_gb: float | None = None,
    max_stages: int | None = None,
    schedule: str | None = None,
) -> Request:
    """Returns a request for a model of plain functions.

    Args:
        model: The model.
        params: Its parameters, or their shapes.
        example: A batch of it, of any number of rows, or its shapes.
        devices: The devices of the step.
        fixed: Arguments of `jaxpipe.pipeline` that plans must have: `mesh`, the sizes of its axes,
            `microbatches` and `chunks`.
        batch: Rows of a step. Default: those of `example`.
        memory_gb: The memory of a device that may be used, in 1e9 bytes.
        max_stages: The most ranks of a pipeline.
        schedule: The schedule that plans must have.

    Returns:
        The request.

    Raises:
        ValueError: If an argument is missing or is none of a model of one's own, or the mesh has
            other devices or axes.
    """
    fixed = dict(fixed)
    mesh = fixed.pop("mesh", None)
    counts = {name: fixed.pop(name) for name in ("microbatches", "chunks") if name in fixed}
    _check_own(model, params, example, **fixed)
    if model.has_kinds and model.layer_costs is None:
        model = replace(model, layer_costs=layer_flops(model, params, example))
    with trace_for(devices.platform):
        planned, work, tokens = _planned(model, params, example, devices)
    rows = batch or jax.tree.leaves(example)[0].shape[0]
    costs = None
    if model.layer_costs is not None:
        costs = tuple(float(model.layer_costs[layer.name]) for layer in work.kinds())
    if schedule:
        counts |= {"engine": engine_of_any_schedule().config_name, "schedule": schedule}
    space = Space(
        *(devices, rows, tokens, planned.num_layers, 0, 1, planned.vocab),
        max_stages or devices.num_devices,
        NOT_CHOSEN | counts | _fixed_axes(mesh, devices),
        policies=("full", "none"),
        costs=costs,
    )
    source = OwnSource(model, params, example, _num_layers(model, work))
    limit = devices.usable_bytes(memory_gb)
    return Request(devices, rows, tokens, limit, planned, work, source, space, 0, 0)


def _check_own(model: Model, params: PyTree, example: PyTree, **others: Any) -> None:
    """Checks the arguments that a model of the user's own needs, and those that it has not."""
    if params is None or example is None:
        raise ValueError("`model` is your own. Give its `params` and an `example` batch.")
    unread = [f"`{name}`" for name, value in others.items() if value is not None]
    if unread:
        raise ValueError(
            f"`model` is your own, which has no {', '.join(unread)}. The batch has the length of "
            "sequences, and `schedule`, `max_stages`, `mesh`, `microbatches` and `chunks` can be "
            "given."
        )


def _num_layers(model: Model, work: ModelWork) -> NumLayers:
    if not model.has_kinds:
        return work.num_layers
    counts = Counter(layer.name for layer in work.kinds())
    return tuple((kind, counts[kind]) for kind in cast(Mapping, model.layer))


@dataclass(frozen=True)
class _TracedLayer:
    """What a layer of a kind does with a token, and bytes that it keeps of one."""

    work: LayerWork
    weights: PyTree  # shapes of its own
    kept: float
    wgrad: float

    def sizes(self, itemsize: int) -> LayerSizes:
        """Returns sizes in elements of activations."""
        group = _group(self.weights)
        kept, wgrad = self.kept / itemsize, self.wgrad / itemsize
        return LayerSizes(self.work.name, _size(self.weights), group.largest, kept, wgrad)


def _planned(
    model: Model, params: PyTree, example: PyTree, devices: Devices
) -> tuple[PlannedModel, ModelWork, int]:
    """Returns the sizes of a model, its work, and the tokens of a row.

    If layers differ, the sizes are means over them, by which layouts are compared before they are
    set up; the work is that of each.
    """
    row, two = (_rows(example, count) for count in (1, 2))
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    differ, model = model.has_kinds, _with_kinds(model)
    kinds, groups = one_of_each_kind(model, params)
    xs, xs_of_two = (list(x_of_layers(model, kinds, groups, rows, key)) for rows in (row, two))
    tokens, itemsize = _tokens(xs[0]), max(1, round(_bytes(xs[0]) / _size(xs[0])))
    # Engines of one program hand over the largest x in place of every other.
    boundary_bytes = itemsize * max(1, round(max(map(_size, xs)) / tokens))
    traced: dict[str, _TracedLayer] = {}
    for kind, x, x_of_two in zip(kinds, xs, xs_of_two, strict=False):
        if kind not in traced:
            arguments = (x, row, key), (x_of_two, two, key)
            traced[kind] = _trace_layer(model, kind, groups, arguments, tokens, boundary_bytes)
    head = {"head": groups["head"], "embed": groups["embed"]} if model.tied else groups["head"]
    with trace_to_read():  # also of a loss with attention products are read, but not time
        loss = trace(model.loss, tokens, head, xs[-1], row, key)
    hidden = max(1, round(_size(xs[-1]) / tokens))
    vocab = round(sum(p.k * p.n * p.copies for p in loss.products) / hidden)
    shared = groups.get("shared", ())
    layers = [traced[kind] for kind in kinds]
    sizes_of_layers = tuple(layer.sizes(itemsize) for layer in layers)
    parameters = [_size(layer.weights) for layer in layers]
    read = sum(n * layer.work.weight_bytes for n, layer in zip(parameters, layers, strict=True))
    of_layers = _weight_bytes([layer.weights for layer in layers])
    of_boundary = _weight_bytes((groups["embed"], groups["head"], shared))
    planned = PlannedModel(
        name="own model",
        layer=(_group(layers[0].weights),),
        embed=(_group((groups["embed"], shared)),),
        head=(_group(groups["head"]),),
        outer=(),
        num_outer=0,
        num_layers=len(kinds),
        hidden=hidden,
        vocab=vocab,
        tensors=(),
        unnamed=(),
        scores=(),
        routed=None,
        expanded=(),
        of_layers=of_layers,
        of_boundary=of_boundary,
        state_of_layer=StateBytes(_MOMENTS * of_layers.weight),
        state_of_boundary=StateBytes(_MOMENTS * of_boundary.weight),
        gathered_bytes=read / max(1, sum(parameters)),
        activation_bytes=itemsize,
        on_cpu=devices.generation == "cpu",
        hoists_gathers=devices.generation != "cpu" and not devices.is_gpu,
        hoists_casts=True,
        layer_sizes=sizes_of_layers if differ else (),
    ).with_means([sizes_of_layers], len(kinds))
    sizes = _size((groups["embed"], shared)), _size(groups["head"])
    works = (
        replace(traced[kind].work, count=len([*run])) for kind, run in itertools.groupby(kinds)
    )
    return planned, ModelWork(tuple(works), hidden, max(1, vocab), *sizes), tokens


def _trace_layer(
    model: Model,
    kind: str,
    groups: dict[str, PyTree],
    arguments: tuple[tuple[PyTree, ...], tuple[PyTree, ...]],
    tokens: int,
    boundary_bytes: float,
) -> _TracedLayer:
    """Traces a layer with x, batch and key of one row and of two."""
    (of_row, of_two), own = arguments, groups["layers"][kind]
    function, read = layer_with_weights(model, kind, groups)
    run_layer = _without_aux(function, of_row[0])
    traced = trace(run_layer, tokens, read, *of_row)
    # What a second row adds: casts of weights are no work or memory of rows.
    moved = trace(run_layer, tokens, read, *of_two).moved_bytes - traced.moved_bytes
    kept, wgrad = (
        (count(run_layer, read, *of_two) - count(run_layer, read, *of_row)) / tokens
        for count in (residual_bytes, wgrad_residual_bytes)
    )
    work = LayerWork(
        name=kind,
        count=1,
        products=traced.products,
        attention=traced.attention,
        dense_parameters=_size(own),
        expert_parameters=0,
        num_experts=0,
        active_experts=0,
        activations=ActivationBytes(kept, kept, boundary_bytes),
        elementwise_bytes=moved,
        between_bytes=0,
        num_kernels=traced.num_equations,
        boundary_bytes=boundary_bytes,
        weight_bytes=bytes_as_read(run_layer, read, own, *of_row),
    )
    return _TracedLayer(work, own, kept, wgrad)


def _with_kinds(model: Model) -> Model:
    """Returns the model with a dict of layers, also if it has one kind."""
    if model.has_kinds:
        return model
    to_groups = model.to_groups

    def by_kind(params: PyTree) -> dict[str, PyTree]:
        groups = to_groups(params)
        return groups | {"layers": {_ONLY_KIND: groups["layers"]}}

    return replace(model, layer={_ONLY_KIND: model.layer}, to_groups=by_kind)


def _fixed_axes(mesh: Mapping[str, int] | None, devices: Devices) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh, of which those left out have one device."""
    if mesh is None:
        return {}
    unknown = {name: size for name, size in mesh.items() if name not in _AXES and size != 1}
    if unknown:
        raise ValueError(
            f"`mesh` is {dict(mesh)}, and for a model of your own the planner knows the axes "
            f"{', '.join(_AXES)}. Give these, without {', '.join(unknown)}."
        )
    if (size := math.prod(mesh.values())) != devices.num_devices:
        raise ValueError(
            f"`mesh` is {dict(mesh)}, of {size} devices, and {devices.name} has "
            f"{devices.num_devices}. Give sizes whose product is that."
        )
    return {axis: mesh.get(axis, 1) for axis in _AXES}


def _rows(example: PyTree, count: int) -> PyTree:
    """Returns the shapes of a batch of so many rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), example)


def _without_aux(layer: Callable, x: PyTree) -> Callable:
    """Returns a layer that returns x alone."""

    def run(*arguments: Any) -> PyTree:
        result = layer(*arguments)
        return result if jax.tree.structure(result) == jax.tree.structure(x) else result[0]

    return run


def _tokens(x: PyTree) -> int:
    """Returns the tokens of one row."""
    largest = max(jax.tree.leaves(x), key=lambda leaf: leaf.size)
    return largest.shape[1] if largest.ndim > 2 else 1


def _bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _group(tree: PyTree) -> WeightGroup:
    """Returns parameters, which the front door divides over `fsdp`."""
    sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
    return WeightGroup(sum(sizes), ("fsdp",), (), max(sizes, default=0))


def _weight_bytes(tree: PyTree) -> WeightBytes:
    """Returns the bytes of a parameter, which layers read as they are: the mean over all."""
    sums = floating(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree))
    grads = sum(leaf.size * max(_FLOAT32, leaf.dtype.itemsize) for leaf in jax.tree.leaves(sums))
    count, stored = max(1, _size(tree)), _bytes(tree)
    return WeightBytes(stored / count, grads / count, stored / count)
