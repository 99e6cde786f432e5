"""A model of plain functions as a planner sees it: its layer is traced, and its products counted.

L layers. Tokens are the positions of x [rows, ..., channels] between layers; rows, if it has none.
If layers have a `jax.shard_map` over `expert` of their own, its devices are those of the trace, and
each has rows of its own.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from .. import sharding
from ..api import Model, PipelinedModel, pipeline
from ..api.inspection import (
    NumLayers,
    layer_with_weights,
    one_of_each_kind,
    residual_bytes,
    wgrad_residual_bytes,
    x_of_layers,
)
from ..autodiff.backward import floating
from ..autodiff.staged_model import Past, layers_per_iteration
from ..cost.work import ActivationBytes, LayerWork, ModelWork
from ..kernels import trace_to_read
from ..schedules import FAMILIES
from ..sharding.specs import axes_of, axes_of_dim
from ..xla.compile_report import CompileReport
from ._candidates import StepLayout
from ._devices import Devices
from ._fusions import fused_layer
from ._model import (
    Axes,
    LayerSizes,
    PlannedModel,
    StateBytes,
    Tensor,
    WeightBytes,
    WeightGroup,
)
from ._request import PreparedPipeline, Values
from ._trace import bytes_as_read, trace

_FLOAT32 = 4
_MOMENTS = 2  # of AdamW
_ONLY_KIND = "layer"

Specs = Mapping[str, PartitionSpec]
"""The specs of parameters that have one, by their paths in groups."""

MakeModel = Callable[[Mesh | None], tuple[Model, PyTree]]
"""Makes a model and its parameters, or their shapes, for a mesh; without one the plain program."""


@dataclass(frozen=True)
class OwnSource:
    """A model of plain functions: layouts are arguments of `jaxpipe.pipeline`.

    Attributes:
        model: The user's model, or the one that `make` returned to be traced.
        params: Its parameters, or their shapes.
        example: A batch, or its shapes.
        num_layers: L; or a pair for each kind of layers, its name and number of layers.
        options: Other arguments of `jaxpipe.pipeline`.
        num_slices: The number of slices of TPUs.
        make: A function that makes the model for a mesh; None if it is the same for all.
    """

    model: Model
    params: PyTree
    example: PyTree
    num_layers: NumLayers
    options: Values
    num_slices: int
    make: MakeModel | None
    is_own = True

    def settings(self, candidate: StepLayout) -> Values:
        """Returns arguments by name; `mesh` has sizes, and `remat` the name of a policy."""
        engine = candidate.engine
        settings: Values = self.options | {
            "mesh": {
                axis: size
                for axis, size in candidate.sizes.items()
                if size > 1 or axis == "stage" or (axis == "data" and candidate.options.zero1)
            },
            "schedule": candidate.family_name or None,
            "microbatches": candidate.microbatches,
            "remat": candidate.memory_policy.remat,
            "layer_remat": candidate.memory_policy.layer_remat,
        }
        if candidate.across:
            settings["dcn"] = {candidate.across: self.num_slices}
        if candidate.accumulation > 1:
            settings["accumulate"] = candidate.accumulation
        settings |= candidate.options.changed
        if "gather" in engine.options:
            settings["gather"] = candidate.gather
        family = FAMILIES.get(candidate.family_name)
        if candidate.chunks > 1 and family and "chunks" in family.takes:
            settings["chunks"] = candidate.chunks
        if engine.runs_schedules:
            settings["engine"] = engine.name
        if engine.runs_schedules or (engine.pipelines and self.model.has_kinds):
            settings["layers_per_stage"] = candidate.counts
        return settings

    def prepare(self, candidate: StepLayout, devices: Sequence[Any]) -> PreparedPipeline:
        """Returns the pipeline as its engine would run it."""
        pipe = self._pipeline(self.model, *self._arguments(self.settings(candidate), devices))
        spec = pipe.plan(self.num_layers)
        if not spec.kinds:  # else runs of kinds are checked when they are traced
            layers_per_iteration(spec.layout.layers_per_stage, spec.scan_layers)
        return PreparedPipeline(pipe.engine, spec)

    def compile(self, settings: Values, num_rows: int, devices: Sequence[Any]) -> CompileReport:
        """Compiles a train step with AdamW."""
        import optax

        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params)
        pipe = self.pipeline(settings, devices)
        return pipe.compile(params, _rows(self.example, num_rows), optimizer=optax.adamw(1e-3))

    def pipeline(self, settings: Values, devices: Sequence[Any]) -> PipelinedModel:
        """Returns the pipeline that `jaxpipe.pipeline` makes with the settings."""
        mesh, arguments = self._arguments(settings, devices)
        model = self.model if self.make is None else self.make(mesh)[0]
        return self._pipeline(model, mesh, arguments)

    def _arguments(self, settings: Values, devices: Sequence[Any]) -> tuple[Mesh, Values]:
        """Returns the mesh and the other arguments of `jaxpipe.pipeline`."""
        arguments = {name: settings[name] for name in settings if name not in ("mesh", "dcn")}
        dcn = settings.get("dcn", {})
        inside = {axis: size // dcn.get(axis, 1) for axis, size in settings["mesh"].items()}
        return sharding.make_mesh(inside, dcn, devices=devices), arguments

    def _pipeline(self, model: Model, mesh: Mesh, arguments: Values) -> PipelinedModel:
        return pipeline(model, mesh=mesh, **arguments)


def made_model(made: Any) -> tuple[Model, PyTree]:
    """Returns the checked model that a function of a mesh has made."""
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Model):
        return made
    raise ValueError(
        f"`model` is called with a mesh, and returns a {type(made).__name__}. Let it return a "
        "`Model` and its parameters; a module becomes a `Model` by `jaxpipe.equinox.model`, "
        "`jaxpipe.nnx.model` or `jaxpipe.linen.model`."
    )


def num_layers(model: Model, work: ModelWork) -> NumLayers:
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
    live: float
    past: float

    def sizes(self, itemsize: int) -> LayerSizes:
        """Returns sizes in elements of activations."""
        group = _group(self.weights)
        elements = (size / itemsize for size in (self.kept, self.wgrad, self.live))
        return LayerSizes(self.work.name, _size(self.weights), group.largest, *elements)


class _TracedRows(NamedTuple):
    """The tokens of a row that is traced, and the devices that share experts and weights."""

    row_tokens: int
    shards: int
    tensor: int
    specs: Specs
    devices: Devices

    def divided_dims(self, weights: PyTree) -> list[int | None]:
        """Returns the dim of each weight of a stage of one layer that `tensor` divides."""
        paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(weights))
        names = (f"['stages']{jax.tree_util.keystr(path)}" for path in paths)
        specs = (self.specs.get(name, PartitionSpec()) for name in names)
        return [
            next((i for i, dim in enumerate(spec) if "tensor" in axes_of_dim(dim)), None)
            for spec in specs
        ]


def planned_model(
    model: Model,
    params: PyTree,
    example: PyTree,
    devices: Devices,
    specs: Specs,
    axes: Mapping[str, int],
    plain: tuple[Model, PyTree],
) -> tuple[PlannedModel, ModelWork, int]:
    """Returns the sizes of a model, its work, and the tokens of a row.

    Products are those of the plain program: one of shards of experts does not say which of the rows
    that a device gathers are for its own. If layers differ, the sizes are means over them, by which
    layouts are compared before they are set up; the work is that of each.
    """
    shards, tensor = axes.get("expert", 1), axes.get("tensor", 1)
    few = [_rows(example, count * shards) for count in (1, 2, 3)]
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    differ, model = model.has_kinds, _with_kinds(model)
    kinds, groups = one_of_each_kind(model, params)
    row, xs_of = few[0], [list(x_of_layers(model, kinds, groups, rows, key)) for rows in few]
    xs = xs_of[0]
    tokens, itemsize = _tokens(xs[0]), max(1, round(_bytes(xs[0]) / _size(xs[0])))
    traced_tokens = tokens * shards
    # Engines of one program hand over the largest x in place of every other.
    boundary_bytes = itemsize * max(1, round(max(map(_size, xs)) / traced_tokens))
    target = _TracedRows(tokens, shards, tensor, specs, devices)
    traced: dict[str, _TracedLayer] = {}
    for kind, *x_of in zip(kinds, *xs_of, strict=False):
        if kind not in traced:
            arguments = [(x, rows, key) for x, rows in zip(x_of, few, strict=True)]
            traced[kind] = _trace_layer(model, kind, groups, arguments, target)
    head = {"head": groups["head"], "embed": groups["embed"]} if model.tied else groups["head"]
    with trace_to_read():  # also of a loss with attention products are read, but not time
        loss = trace(model.loss, traced_tokens, head, xs[-1], row, key)
    hidden = max(1, round(_size(xs[-1]) / traced_tokens))
    vocab = round(sum(p.k * p.n * p.copies for p in loss.products) / hidden)
    if not any("tensor" in group.stored for group in _groups(groups["head"], "['head']", specs)):
        vocab *= tensor  # each of whose devices has all of them
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
        embed=(
            *_groups(groups["embed"], "['embed']", specs),
            *_groups(shared, "['shared']", specs),
        ),
        head=_groups(groups["head"], "['head']", specs),
        num_layers=len(kinds),
        hidden=hidden,
        vocab=vocab,
        of_layers=of_layers,
        of_boundary=of_boundary,
        state_of_layer=StateBytes(_MOMENTS * of_layers.weight),
        state_of_boundary=StateBytes(_MOMENTS * of_boundary.weight),
        gathered_bytes=read / max(1, sum(parameters)),
        activation_bytes=itemsize,
        platform=devices.platform,
        hoists_casts=True,
        layer_sizes=sizes_of_layers if differ else (),
        past=Tensor(fmean(layer.past for layer in layers) / itemsize),
        logit_bytes=loss.itemsize,
    ).with_means([sizes_of_layers], len(kinds))
    if specs:
        planned = replace(planned, layer=_groups(layers[0].weights, "['stages']", specs))
    sizes = _size((groups["embed"], shared)), _size(groups["head"])
    of_kinds = {
        kind: replace(one.work, boundary_bytes=boundary_bytes) for kind, one in traced.items()
    }
    if shards > 1:
        (kind,) = of_kinds
        of_kinds = {kind: _with_experts(of_kinds[kind], planned, shards, plain, example)}
    works = (replace(of_kinds[kind], count=len([*run])) for kind, run in itertools.groupby(kinds))
    return planned, ModelWork(tuple(works), hidden, max(1, vocab), *sizes), tokens


def _with_experts(
    work: LayerWork,
    planned: PlannedModel,
    shards: int,
    plain: tuple[Model, PyTree],
    example: PyTree,
) -> LayerWork:
    """Returns the work of a layer whose devices share experts: products are the plain program's."""
    model, params = plain
    model, row = _with_kinds(model), _rows(example, 1)
    kinds, groups = one_of_each_kind(model, params)
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    x = next(x_of_layers(model, kinds, groups, row, key))
    function, read = layer_with_weights(model, kinds[0], groups)
    traced = trace(_without_aux(function, x), _tokens(x), read, x, row, key)
    of_experts = sum(round(group.parameters) for group in planned.experts)
    return replace(
        work,
        products=traced.products,
        attention=traced.attention,
        dense_parameters=work.dense_parameters - of_experts,
        expert_parameters=of_experts,
        num_experts=shards,
        active_experts=1,
    )


def _trace_layer(
    model: Model,
    kind: str,
    groups: dict[str, PyTree],
    arguments: Sequence[tuple[PyTree, ...]],
    target: _TracedRows,
) -> _TracedLayer:
    """Traces a layer with x, batch and key of one, two and three rows for each shard of experts."""
    tokens, parts = target.shards * target.row_tokens, target.tensor
    (of_row, of_two, _), own = arguments, groups["layers"][kind]
    function, read = layer_with_weights(model, kind, groups)
    run_layer = _without_aux(function, of_row[0])
    stage = {"layers": own, "shared": groups["shared"]} if model.shared else read
    dims = target.divided_dims(stage)
    traced = trace(run_layer, tokens, read, *of_row, dims=dims, parts=parts)
    # What another row adds: casts of weights are no work or memory of rows.
    rows = [(run_layer, read, *arguments) for arguments in (of_row, of_two)]
    sizes = ((residual_bytes(*row), wgrad_residual_bytes(*row)) for row in rows)
    on_gpu = target.devices.is_gpu
    fused = fused_layer(run_layer, read, *arguments[1:], on_gpu=on_gpu, dims=dims, parts=parts)
    kept, wgrad = (fused.kept_share * (two - one) / tokens for one, two in zip(*sizes, strict=True))
    work = LayerWork(
        name=kind,
        products=traced.products,
        attention=traced.attention,
        dense_parameters=_size(own),
        activations=ActivationBytes(kept, kept, 0),
        elementwise_bytes=parts * fused.moved / tokens,
        backward_elementwise_bytes=parts * fused.moved_back / tokens,
        between_bytes=0,
        num_kernels=fused.num_kernels,
        boundary_bytes=0,
        # Half of what is gathered, or scattered, is counted for each way.
        expert_boundary_bytes=traced.gathered_bytes / target.shards / 2,
        tensor_sums=traced.num_sums,
        weight_bytes=bytes_as_read(run_layer, read, own, *of_row),
    )
    past = _past_bytes(function, read, of_row) / tokens if function.takes_past else 0.0
    return _TracedLayer(
        work=work, weights=own, kept=kept, wgrad=wgrad, live=fused.live / tokens, past=past
    )


def _past_bytes(layer: Callable, weights: PyTree, arguments: tuple[PyTree, ...]) -> int:
    """Returns the bytes that a layer gives to `past.append`, of a whole sequence."""

    def appended(*arguments: Any) -> PyTree:
        return layer(*arguments, Past())[1].new

    return _bytes(jax.eval_shape(appended, weights, *arguments))


def _with_kinds(model: Model) -> Model:
    """Returns the model with a dict of layers, also if it has one kind."""
    if model.has_kinds:
        return model
    to_groups = model.to_groups

    def by_kind(params: PyTree) -> dict[str, PyTree]:
        groups = to_groups(params)
        return groups | {"layers": {_ONLY_KIND: groups["layers"]}}

    return replace(model, layer={_ONLY_KIND: model.layer}, to_groups=by_kind)


def _groups(tree: PyTree, path: str, specs: Specs) -> tuple[WeightGroup, ...]:
    """Returns parameters by the mesh axes that divide them: `fsdp`, or those of a spec alone."""
    by_axes: dict[Axes, list[Any]] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        spec = specs.get(path + jax.tree_util.keystr(keys), PartitionSpec("fsdp"))
        axes = tuple(sorted(axes_of(spec)))
        by_axes.setdefault(axes, []).append(leaf)
    return tuple(_group(leaves, axes) for axes, leaves in by_axes.items()) or (_group(()),)


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
    """Returns the tokens of one row: positions, of all dims between rows and channels."""
    largest = max(jax.tree.leaves(x), key=lambda leaf: leaf.size)
    return math.prod(largest.shape[1:-1])


def _bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _group(tree: PyTree, axes: Axes = ("fsdp",)) -> WeightGroup:
    """Returns parameters that these axes divide; over `fsdp` they are gathered to be read."""
    sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
    gathered = tuple(axis for axis in axes if axis != "fsdp")
    return WeightGroup(sum(sizes), axes, gathered, max(sizes, default=0))


def _weight_bytes(tree: PyTree) -> WeightBytes:
    """Returns the bytes of a parameter, which layers read as they are: the mean over all."""
    sums = floating(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree))
    grads = sum(leaf.size * max(_FLOAT32, leaf.dtype.itemsize) for leaf in jax.tree.leaves(sums))
    count, stored = max(1, _size(tree)), _bytes(tree)
    return WeightBytes(stored / count, grads / count, stored / count)
