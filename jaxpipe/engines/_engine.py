"""Defines what every engine is given and what it can do: the records `PipelineSpec` and `Engine`.

The front door knows engines by these records only. S ranks, v stages on each, L layers, M
microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from ..autodiff import Remat, StagedModel, keep, recompute
from ..schedules import Costs, Schedule, Timeline
from ..schedules.language import stored_stages
from ..schedules.lock_step import Ticks
from ..sharding.layout import LayerLayout
from ..spmd import NO_OPTIONS, EngineOptions
from ..spmd.weight_gather import When as WhenOfStage
from ._memory import Buffers, PeakMemory, StepCounts, StepSizes

When = Literal[WhenOfStage, "layer"]
"""When parameters that are sharded over `fsdp` are gathered."""


ParamSpecs = tuple[tuple[str, PartitionSpec], ...]
"""Specs of parameters, without dims of stages and layers, by path."""


@dataclass(frozen=True)
class PipelineSpec:
    """One pipeline, whatever its model.

    Attributes:
        mesh: The mesh of all devices, with an axis `stage` of size S.
        layout: The layers of every stage, and the stages of every rank.
        num_microbatches: M, the microbatches of a call.
        schedule: The order of the actions of each rank. None without a pipeline.
        ticks: The schedule in lock-step, for an engine that runs it so.
        remat: A wrapper of stages, which decides what a forward stores for the backward.
        gather: When parameters that are sharded over `fsdp` are gathered, in one program: in every
            "tick", "once", once per "repeat", ahead of it, or by every "layer" that reads them.
        scan_layers: Whether the layers of a stage run in a `lax.scan`, or the number that each
            iteration runs. None: True if there are several.
        kinds: The name and the number of layers of each kind, in the order in which kinds run. ()
            for layers of one kind.
        order: The kind of every layer in the order in which they run. (): one kind after the other.
        param_specs: How parameters are sharded over other axes than `stage`, by their path in the
            groups of weights, such as `['stages']['up']`; without dims of stages and layers. All
            others are sharded over `fsdp`. Dims that are sharded over `fsdp` are gathered.
        whole_microbatches: Whether functions of the model are given whole microbatches, whose rows
            XLA divides over devices; false if each runs on the rows of a device.
        layer_remat: A wrapper of layers, as `remat` is one of stages.
        layer_specs: The spec of every trainable parameter of one layer, in a tree of these, by
            kind if there are kinds; for `gather="layer"`.
        num_calls: A, the number of times that M microbatches are run, whose results are summed.
        compiler_options: XLA's options for every program, by name. None: those of the table of
            flags.
        compute_dtype: The dtype to which floating-point parameters are cast before they are
            gathered; or `path -> dtype or None`, where `path` is such as `['layers']['up']`. None:
            they stay as they are.
        options: Options that not all engines have.
    """

    mesh: Mesh
    layout: LayerLayout
    num_microbatches: int
    schedule: Schedule | None = None
    ticks: Ticks | None = None
    remat: Remat = recompute
    gather: When = "tick"
    scan_layers: bool | int | None = None
    kinds: tuple[tuple[str, int], ...] = ()
    order: tuple[str, ...] = ()
    param_specs: ParamSpecs = ()
    whole_microbatches: bool = False
    layer_remat: Remat = keep
    layer_specs: PyTree = None
    num_calls: int = 1
    compiler_options: tuple[tuple[str, Any], ...] | None = None
    compute_dtype: Any = None
    options: EngineOptions = NO_OPTIONS

    @property
    def kinds_of_layers(self) -> tuple[str, ...]:
        """Returns the kind of every layer in the order in which they run; () without kinds."""
        return self.order or tuple(kind for kind, count in self.kinds for _ in range(count))

    def with_options(self, **options: Any) -> Self:
        """Returns the pipeline with these options, by their names in `EngineOptions`."""
        return replace(self, options=self.options._replace(**options))


class OwnSchedule(NamedTuple):
    """The schedule of an engine that runs no other.

    Attributes:
        family: Its name among `schedules.FAMILIES`.
        default_chunks: Stages per rank, unless the caller gives them.
    """

    family: str
    default_chunks: int


@dataclass(frozen=True)
class Storage:
    """How weights of stages are stored and moved, as functions of a pipeline's spec.

    Attributes:
        per_stage: Whether every stage has its own tree of weights on the devices of its rank. False
            if leaves stack all stages.
        stack: `(spec, leaves [L, ...]) -> stages` as the engine stores them: leaves [v, S, layers
            per stage, ...], or a list with a tree of leaves [layers, ...] for each stage in forward
            order.
        unstack: `(spec, stages) -> leaves [L, ...]`, the inverse of `stack`.
        share: `(spec, stages, shared) -> stages` with a copy of parameters that all layers share: a
            stage is `{"layers": stage, "shared": copy}`.
        own_copy: `stage -> shared`: the copy of a stage that `share` returned, as a stage is
            given it.
        sum_shared: `(spec, stages) -> (stages, shared)`, from gradients of what `share` returns to
            those of its arguments: the copies are summed over stages.
        layer_keys: `(spec, dropout keys, frozen) -> keys`, what the layers of a stage are given
            besides weights and inputs: a pair of a dropout key and frozen parameters. Leaves of
            dropout keys are [L, ...]; frozen parameters are stored as `stack` returns them.
        put: `(spec, weights, tied) -> weights` on the devices that hold them, sharded over `fsdp`.
        shardings: `(spec, weights, tied) -> shardings` of the weights that `put` returns.
        rank_bytes: `(spec, weights, tied) -> [S]` bytes of weights that a device of every rank
            stores.
        init: `(spec, make, tied) -> weights`: the weights that `make()` returns, made on the
            devices that hold them, so that no device ever has the whole model.
        put_like: `(spec, weights, like, tied) -> weights`, in a traced function: new arrays in
            groups, such as the moments of an optimizer, on the devices that hold `like`.
        gather: `(spec, tree) -> tree` of arrays that every device of the mesh has.
    """

    per_stage: bool
    stack: Callable[[PipelineSpec, Any], PyTree]
    unstack: Callable[[PipelineSpec, PyTree], Any]
    share: Callable[[PipelineSpec, PyTree, PyTree], PyTree]
    own_copy: Callable[[dict[str, PyTree]], PyTree]
    sum_shared: Callable[[PipelineSpec, PyTree], tuple[PyTree, PyTree]]
    layer_keys: Callable[[PipelineSpec, Any, PyTree], Any]
    put: Callable[[PipelineSpec, dict[str, Any], bool], dict[str, Any]]
    shardings: Callable[[PipelineSpec, dict[str, Any], bool], dict[str, Any]]
    rank_bytes: Callable[[PipelineSpec, dict[str, Any], bool], tuple[int, ...]]
    init: Callable[[PipelineSpec, Callable[[], dict[str, Any]], bool], dict[str, Any]]
    put_like: Callable[[PipelineSpec, dict[str, Any], dict[str, Any], bool], dict[str, Any]]
    gather: Callable[[PipelineSpec, Any], Any]

    def layer_ids(self, layout: LayerLayout) -> tuple[Any, ...]:
        """Returns which layer is where in stored stages."""
        return layout.stage_layer_ids if self.per_stage else layout.layer_ids

    def layers_by_kind(self, spec: PipelineSpec, stages: PyTree) -> PyTree:
        """Returns shapes of one layer, from those of stored stages; by kind if there are any."""
        trees, num_lead = (stages, 1) if self.per_stage else ([stages], 3)

        def one(layers: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[num_lead:], x.dtype), layers)

        if not spec.kinds:
            return one(trees[0])
        return {kind: one(next(t[kind] for t in trees if kind in t)) for kind, _ in spec.kinds}

    def stages_by_rank(self, schedule: Schedule | None) -> tuple[tuple[int, ...], ...] | None:
        """Returns the stages that each rank stores; None if leaves stack all stages."""
        return stored_stages(schedule) if schedule and self.per_stage else None


@dataclass(frozen=True)
class Engine:
    """A way to run a pipeline, as functions of its spec.

    If the spec has kinds, layers are a dict of those of each kind, and so are functions of a layer.

    Attributes:
        name: The name by which users select it.
        config_name: Its name in configs, as the value of `pipeline_engine`.
        runs_schedules: Whether it runs any schedule that it is given.
        options: The arguments of `pipeline` that this engine has, of those that not all have.
        storage: How it stores weights.
        prepare: `(schedule or None, num_ranks, num_microbatches, costs or None, memory_cap or None)
            -> (schedule, ticks)`: the schedule as the engine runs it, in the ticks that take least
            by these costs, with at most `memory_cap` microbatches stored on a rank. It raises a
            `ValueError` that names another engine if this one cannot run the schedule, and one
            that names the least cap if it cannot keep this one.
        layout: `(schedule or None, num_ranks, layers of every stage) -> LayerLayout`.
        stage: `(spec, layer) -> stage`, which runs the layers of one stage.
        value: `(spec, model, weights, batch_inputs, keys) -> (loss, metrics)`. Leaves of
            `batch_inputs` are [A * M, D, ...], where D is the number of devices that divide the
            rows of a microbatch, or 1 for whole microbatches. A function of `model` is given leaves
            [d, ...], for the d of these devices that it computes for. The groups of `weights` are
            "embed", "stages", "head" and, if embedding and loss read constants, "constants", the
            argument of `model.bind`.
        value_and_grad: `(spec, model, weights, batch_inputs, keys) -> ((loss, metrics), grads)`,
            with gradients like the first three groups of `weights`.
        step_bytes: `(spec, weights, tied) -> [S]` bytes of weights on a device of every rank during
            a step, with those that other ranks send it because several ranks run a stage.
        jit: `(spec, function, donate_argnums) -> function`: compiles a function that calls `value`
            or `value_and_grad`.
        timeline: `(spec, costs) -> timeline` of the actions of `value_and_grad`.
        buffers: `(spec) -> [S]` the entries of the buffers of every rank.
        expected_buffers: `(family or None, counts) -> Buffers` of the fullest rank, by closed
            forms: `buffers` without the tables of a schedule.
        memory: `(counts, buffers, sizes) -> PeakMemory` of a rank during `value_and_grad` and an
            update: what its buffers hold, and what exists beside them at the peak.
        may_divide: `(spec) -> whether` XLA may divide the rows of functions that mix them. Where
            ranks have branches, it may not.
        has_branches: `(spec) -> whether` a rank runs functions in a branch that others do not take.
            XLA's partitioner may move what they compute by a collective permute, for which devices
            of all ranks wait.
        sliced_stage: `(spec, layer) -> sliced_stage`, which runs the layers of one stage on one
            slice of each sequence, for `StagedModel.sliced_stage`. A layer is `(weights, x,
            inputs_m, key, past) -> (x, (aux, past))`. Leaves of `batch_inputs` are then [M * s, D,
            ...] for s slices. None: the engine runs no schedule with slices.
        program_per_rank: Whether ranks run programs of their own: each needs memory of its own, and
            none runs functions of the model for a bubble. False if all devices run one program.
        shares_loss: Whether every rank computes the loss of a share of the microbatches. False if
            the rank of the last stage computes all, unless `vocab_parallel` divides each.
        stage_by_stage: Whether a rank runs all microbatches of a stage before those of its next: it
            adds up gradients of that stage alone, while it moves weights and gradients of others.
        check_call: Raises a `ValueError` if `value` or `value_and_grad`, the name that it is given,
            may not be called here.
        own_schedule: The schedule that it runs, if it runs one and no other.
    """

    name: str
    config_name: str
    runs_schedules: bool
    options: frozenset[str]
    storage: Storage
    prepare: Callable[
        [Schedule | None, int, int, Costs | None, float | None],
        tuple[Schedule | None, Ticks | None],
    ]
    layout: Callable[[Schedule | None, int, tuple[int, ...]], LayerLayout]
    stage: Callable[[PipelineSpec, Any], Callable]
    value: Callable[[PipelineSpec, StagedModel, dict[str, Any], Any, Any], Any]
    value_and_grad: Callable[[PipelineSpec, StagedModel, dict[str, Any], Any, Any], Any]
    step_bytes: Callable[[PipelineSpec, dict[str, Any], bool], tuple[int, ...]]
    jit: Callable[[PipelineSpec, Callable, tuple[int, ...]], Callable]
    timeline: Callable[[PipelineSpec, Costs], Timeline]
    buffers: Callable[[PipelineSpec], tuple[Buffers, ...]]
    expected_buffers: Callable[[str | None, StepCounts], Buffers]
    memory: Callable[[StepCounts, Buffers, StepSizes], PeakMemory]
    may_divide: Callable[[PipelineSpec], bool]
    has_branches: Callable[[PipelineSpec], bool]
    sliced_stage: Callable[[PipelineSpec, Any], Callable] | None = None
    program_per_rank: bool = False
    shares_loss: bool = False
    stage_by_stage: bool = False
    check_call: Callable[[str], None] = lambda name: None
    own_schedule: OwnSchedule | None = None

    def usual_gather(self, layers_per_stage: int) -> When:
        """Returns when weights are gathered, for users who do not say it.

        A stage of several layers runs them in a loop, which reads all that were gathered before it:
        nothing is left to run beside their gathers, unless each layer has its own.
        """
        return "layer" if "gather" in self.options and layers_per_stage > 1 else "tick"

    @property
    def pipelines(self) -> bool:
        """Returns whether it pipelines at all, over the ranks of the axis `stage`."""
        return self.runs_schedules or self.own_schedule is not None

    @property
    def runs_ticks(self) -> bool:
        """Returns whether it runs any schedule as ticks of one program, which `prepare` returns."""
        return self.runs_schedules and not self.program_per_rank
