"""The time of a step of a candidate, by `jaxpipe.cost`, as its engine runs it.

`jaxpipe.cost` lets every rank go on as soon as it can. Engines of one program begin a tick
together, so the time of the schedule is that of its ticks. S ranks, v stages on each, M
microbatches.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ...cost.training_step import (
    Efficiency,
    Layout,
    Prediction,
    StageSeconds,
    efficiency,
    predict,
)
from ...devices import GROUPED_PRODUCTS
from ...schedules import makespan
from ...schedules.lock_step import has_forwards_first, num_ticks
from ...xla.compiler_flags import FLAGS, LARGE_VMEM, StepTraits
from .._candidates import (
    GatherMode,
    LayoutGroup,
    MemoryPolicy,
    StepLayout,
    engine_named,
    imbalance,
    row_shards,
    splits_backward,
)
from .._devices import device_hardware
from .._model import OFFLOAD_INPUTS, PlannedModel, mesh_sizes
from .._request import PreparedPipeline, Request
from ._engine_time import (
    data_reduction_seconds,
    engine_seconds,
    expert_reduction_seconds,
    exposed_host_seconds,
    reduced_bytes,
    tick_scatter_seconds,
)

_COMMUNICATION = (
    "tensor",
    "fsdp",
    "gradient_reduction",
    "point_to_point",
    "experts",
    "context",
    "host",
)

_GATHERS_ON_SPARSE_CORES = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
_SCATTERS_ON_SPARSE_CORES = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"

_HIDDEN_ON_TPUS = tuple(kind for kind in Layout().overlap if kind != "fsdp")
"""Without flags XLA:TPU gathers weights and scatters gradients while nothing else runs, as the
programs show that it compiles for these layouts."""

_WITH_LARGE_VMEM = 0.9
"""What products take with larger tiles of what they take without, by cycles of seven programs of
llama2-7b on v5p (tests/planner/test_plan_time.py). Results are then written beside the work."""

_HALF, _TF32 = 2, 0.5
"""Bytes of bfloat16, and the rate of TF32, in which GPUs multiply float32, as a share of its rate:
156 of 312 TFLOP/s on A100, 495 of 989 on H100, by NVIDIA's data sheets."""

_WITHOUT_NAMES = 0.14
"""The share of a forward that no policy but `none` keeps: norms, rotary positions, activation
functions, and the kernel of attention, which also returns what its backward reads."""

_PASSES = 3
"""A gather of weights for the forward, another for the backward, and a scatter of gradients."""

_GATHERED_BYTES = 2
"""Bytes of a weight that is gathered for products."""


@dataclass(frozen=True)
class PredictedTime:
    """The predicted time of a step.

    Attributes:
        seconds: The time of a step, in seconds.
        parts: Its seconds by kind; they add up to `seconds`. "bubble" are the seconds in which
            even the busiest rank waits.
        tokens_per_second: The tokens of a step, on all devices, over its seconds.
        mfu: Model FLOPs utilization, a fraction.
        bubble_fraction: The part of the step in which even the busiest rank waits.
        exposed: Seconds of communication beside which nothing runs, by kind.
    """

    seconds: float
    parts: dict[str, float]
    tokens_per_second: float
    mfu: float
    bubble_fraction: float
    exposed: dict[str, float]


def least_seconds(group: LayoutGroup, request: Request) -> list[float]:
    """Returns the work of the model alone in a step, which is quick, for each policy of a group.

    It is the part of `rough_seconds` without what engines and compilers add.
    """
    first, seconds = group.first, []
    wholes: dict[object, float] = {}
    times, several = _step_factor(first, request), first.layers_per_stage > 1
    for kept in group.policies:
        alike = kept.gather, kept.policy == "none"
        if alike not in wholes:
            wholes[alike] = _work_seconds(first._replace(**kept._asdict()), request).work
        share = _work_share(kept, several, request.model)
        seconds.append(times * (share * wholes[alike]))
    return seconds


def _step_factor(candidate: StepLayout, request: Request) -> float:
    """Returns the factor from a rank's work in one call to that of a step with its bubbles."""
    if not candidate.engine.pipelines:
        return candidate.accumulation
    S, M, v = candidate.num_ranks, candidate.microbatches, candidate.chunks
    waiting = (1 + candidate.options.forwarding_delay) * (S - 1) / (M * v)
    if splits_backward(candidate):
        waiting *= 0.6
    return candidate.accumulation * (1 + waiting) * imbalance(request.space.costs, candidate.counts)


def rough_seconds(candidate: StepLayout, request: Request) -> float:
    """Returns the seconds of a step with the least bubble that the counts allow."""
    whole, reduction, exposed = _work_seconds(candidate, request)
    several = candidate.layers_per_stage > 1
    work = _work_share(candidate.memory_policy, several, request.model) * whole
    flags = compiler_flags(candidate, request)
    hides = _SCATTERS_ON_SPARSE_CORES in flags
    sums = engine_seconds(candidate, request, flags)
    sums += expert_reduction_seconds(candidate, request, hides_scatters=hides)
    sums += max(0.0, hides * tick_scatter_seconds(candidate, request) - exposed)
    sums += max(reduction, data_reduction_seconds(candidate, request))
    sums += exposed_host_seconds(candidate, request, work)
    return _step_factor(candidate, request) * work + candidate.accumulation * sums


class _WorkSeconds(NamedTuple):
    """Seconds of a rank without bubbles.

    Attributes:
        work: All seconds but those of `reduction`: without rematerialization if the policy is
            `none`, else with that of `full`.
        reduction: Seconds of the sums of gradients over replicas.
        exposed: Seconds in `work` of exposed gathers and scatters over `fsdp`.
    """

    work: float
    reduction: float
    exposed: float


def _work_seconds(candidate: StepLayout, request: Request) -> _WorkSeconds:
    gather = "once" if _gather(candidate) in ("once", "repeat") else "layer"
    whole, reduction, exposed = _unpipelined_seconds(_unpipelined(candidate, request, gather))
    ranks = candidate.num_ranks
    return _WorkSeconds(whole / ranks, reduction / ranks, exposed / ranks)


@lru_cache(maxsize=1_000)
def _work_share(kept: MemoryPolicy, several_layers: bool, model: PlannedModel) -> float:
    """Returns the fraction of `_WorkSeconds.work` that a policy leaves: a forward is a quarter."""
    if kept.policy == "none":
        return 1.0
    return 0.75 + 0.25 * recomputed_fraction(kept, several_layers, model)


def step_time(candidate: StepLayout, request: Request, run: PreparedPipeline) -> PredictedTime:
    """Returns the time of a step."""
    flags = compiler_flags(candidate, request)
    layout = _layout(_unpipelined(candidate, request, _gather(candidate)))
    if candidate.engine.pipelines:
        schedule = run.pipeline.schedule or candidate.family_name
        first, *rest = candidate.counts  # layers outside of the pipeline run beside its ends
        counts = [first + request.before, *rest]
        counts[-1] += request.after
        layout = replace(
            layout,
            schedule=schedule,
            chunks=candidate.chunks,
            layers_per_stage=tuple(counts),
            summed_bytes=reduced_bytes(candidate),
            # A share of the microbatches takes a rank as long as a share of the vocabulary.
            vocab_parallel=candidate.engine.shares_loss or candidate.options.vocab_parallel,
        )
    kind = device_hardware(request.devices)
    reached = _efficiency(request, flags)
    step = predict(request.work, layout, kind, reached=reached)
    recomputed = recomputed_fraction(
        candidate.memory_policy, candidate.layers_per_stage > 1, request.model
    )
    if recomputed not in (0, 1):
        other = predict(request.work, replace(layout, remat="selective"), kind, reached=reached)
        step = _between(other, step, recomputed)
    parts = dict(step.parts)
    parts["other_compute"] += engine_seconds(candidate, request, flags)
    reduction = data_reduction_seconds(candidate, request)
    parts["gradient_reduction"] = max(parts["gradient_reduction"], reduction)
    # Without rematerialization the forward keeps what it gathers.
    keeps = not candidate.engine.pipelines and candidate.policy == "none"
    parts["fsdp"] *= (_PASSES - keeps) / _PASSES
    if candidate.engine.stage_by_stage and "fsdp" in layout.overlap:
        parts["fsdp"] = _exposed_between_stages(candidate, parts, layout)
    hides = _SCATTERS_ON_SPARSE_CORES in flags
    parts["fsdp"] += expert_reduction_seconds(candidate, request, hides_scatters=hides)
    parts["fsdp"] = max(parts["fsdp"], hides * tick_scatter_seconds(candidate, request))
    ticks = _tick_seconds(run, step)
    if ticks is not None:
        parts["bubble"] = max(0.0, parts["bubble"] + ticks - _schedule_seconds(step, candidate))
    work = parts["products"] + parts["other_compute"] + parts["attention_scores"]
    parts["host"] = exposed_host_seconds(candidate, request, work, _num_moves(candidate, run))
    for name in parts:
        parts[name] *= 1 if name == "optimizer" else candidate.accumulation
    seconds = sum(parts.values())
    tokens = request.batch * request.sequence
    return PredictedTime(
        seconds=seconds,
        parts=parts,
        tokens_per_second=tokens / seconds,
        mfu=step.model_flops_utilization * step.seconds * candidate.accumulation / seconds,
        bubble_fraction=parts["bubble"] / seconds,
        exposed={name: parts[name] for name in _COMMUNICATION if parts[name] > 0},
    )


def _num_moves(candidate: StepLayout, run: PreparedPipeline) -> float | None:
    """Returns the number of times that a schedule moves residuals to the host, and also back."""
    ticks = run.pipeline.ticks
    if ticks is None or candidate.policy != OFFLOAD_INPUTS:
        return None
    # Where forwards come first, a tick of one of two loops moves one way.
    return (num_ticks(ticks) + 1) / 2 if has_forwards_first(ticks) else num_ticks(ticks)


def _exposed_between_stages(
    candidate: StepLayout, parts: dict[str, float], layout: Layout
) -> float:
    """Returns the exposed seconds of gathers and scatters that run beside the ticks of a stage."""
    if candidate.gather not in ("once", "repeat"):
        return parts["fsdp"]
    sent = _GATHERED_BYTES + (layout.scattered_bytes or _GATHERED_BYTES)
    before = _GATHERED_BYTES / sent * (candidate.gather == "once")
    beside = max(0.0, (1 - before) * parts["fsdp"] - parts["products"])
    return before * parts["fsdp"] + beside


def _schedule_seconds(step: Prediction, candidate: StepLayout) -> float:
    """Returns the seconds from the first action to the last, as `jaxpipe.cost` has them."""
    after = step.parts["gradient_reduction"] + step.parts["optimizer"]
    if candidate.gather in ("once", "repeat"):
        after += step.parts["fsdp"]
    return step.seconds - after


def _tick_seconds(run: PreparedPipeline, step: Prediction) -> float | None:
    """Returns the seconds of all ticks; None if ranks do not wait for each other in ticks."""
    engine = run.engine
    if not engine.pipelines or engine.program_per_rank:
        return None
    seconds = StageSeconds(step.forward, step.input, step.weight, step.transfer)
    return float(makespan(engine.timeline(run.pipeline, seconds.costs(run.pipeline.schedule))))


def recomputed_fraction(kept: MemoryPolicy, several_layers: bool, model: PlannedModel) -> float:
    """Returns the fraction of a forward that is computed again: 1 for `full`, 0 for `none`.

    Returns:
        A fraction, by the channels of the tensors that the policy keeps, and what none keeps. It is
        twice as much if the policy is applied to a stage of several layers and to each of them.
    """
    if kept.policy == "none":
        return 0.0
    times = 2 if kept.scope == "both" and several_layers else 1
    if kept.policy in ("full", OFFLOAD_INPUTS):
        return 1.0 * times
    return times * (1.0 - (1.0 - _WITHOUT_NAMES) * _kept_share(model, kept.policy))


@lru_cache(maxsize=1_000)
def _kept_share(model: PlannedModel, policy: str) -> float:
    """Returns the share of the channels that a backward reads which a policy keeps."""
    every = sum(tensor.channels for _, tensor in model.read)
    return sum(tensor.channels for tensor in model.saved(policy)) / max(1, every)


def _between(low: Prediction, high: Prediction, share: float) -> Prediction:
    """Returns a prediction between two, or beyond the second if `share` is more than 1."""

    def mix(a: float, b: float) -> float:
        return a + share * (b - a)

    def rows(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(map(mix, a, b))

    seconds = mix(low.seconds, high.seconds)
    return replace(
        high,
        seconds=seconds,
        parts={name: mix(low.parts[name], high.parts[name]) for name in high.parts},
        tokens_per_second=high.tokens_per_second * high.seconds / seconds,
        model_flops_utilization=high.model_flops_utilization * high.seconds / seconds,
        forward=rows(low.forward, high.forward),
        input=rows(low.input, high.input),
        weight=rows(low.weight, high.weight),
    )


def _scattered_bytes(
    candidate: StepLayout, request: Request, flags: frozenset[str]
) -> float | None:
    """Returns the bytes of a gradient that is scattered; None: those of a weight."""
    if not candidate.engine.pipelines or candidate.engine.program_per_rank:
        return None
    sent = reduced_bytes(candidate)
    # Without SparseCores TPUs expose all of it. These plans were compared with cycles (1.12 s of
    # row C of docs/benchmarks.md) when scatters counted as 2 bytes, and links as slower: 1.04 s.
    hides = _SCATTERS_ON_SPARSE_CORES in flags or device_hardware(request.devices).is_gpu
    return sent if hides else sent / 2


def _gather(candidate: StepLayout) -> GatherMode:
    """Returns when weights are gathered: without a pipeline every layer gathers its own."""
    is_chosen = candidate.engine.pipelines and candidate.gathers
    return candidate.gather if is_chosen else "layer"


class _Unpipelined(NamedTuple):
    """The settings on which the time of a step without a pipeline depends.

    Attributes:
        gather: When weights are gathered.
        flags: Names of the compiler's flags.
        scattered_bytes: Bytes of a gradient that is scattered; None: those of a gathered weight.
        keeps_all: Whether a backward computes nothing again.
    """

    request: Request
    mesh: tuple[int, ...]
    across: str
    microbatches: int
    accumulation: int
    gather: GatherMode
    flags: frozenset[str]
    scattered_bytes: float | None
    keeps_all: bool


def _unpipelined(candidate: StepLayout, request: Request, gather: GatherMode) -> _Unpipelined:
    flags = compiler_flags(candidate, request)
    return _Unpipelined(
        request,
        candidate.mesh,
        candidate.across,
        candidate.microbatches,
        candidate.accumulation,
        gather,
        flags,
        _scattered_bytes(candidate, request, flags),
        keeps_all=candidate.policy == "none",
    )


def _layout(step: _Unpipelined) -> Layout:
    """Returns the layout of a step without a pipeline, as `jaxpipe.cost` has it."""
    request = step.request
    rows = (
        request.batch // row_shards(mesh_sizes(step.mesh)) // step.accumulation // step.microbatches
    )
    slices = request.devices.num_slices
    data, stage, fsdp, tensor, expert, context = step.mesh
    on_sparse_cores = _GATHERS_ON_SPARSE_CORES in step.flags
    exposes = device_hardware(request.devices).torus_axes and not on_sparse_cores
    return Layout(
        data=data,
        stage=stage,
        fsdp=fsdp,
        tensor=tensor,
        expert=expert,
        context=context,
        microbatches=step.microbatches,
        rows=rows,
        sequence=request.sequence,
        remat="none" if step.keeps_all else "full",
        gather=step.gather,
        scattered_bytes=step.scattered_bytes,
        hosts=slices if slices > 1 else 0,
        # Slices are farthest apart.
        order=tuple(sorted(Layout().order, key=lambda axis: axis != step.across)),
        sequence_parallel=bool(request.model.between),
        experts_gather=True,
        context_gathers=True,
        shared_optimizer=False,
        overlap=_HIDDEN_ON_TPUS if exposes else Layout().overlap,
        # XLA:TPU writes two rings of all devices, one each way, beside a gather on SparseCores
        # ("ICI_RING_TYPE_UNIDIR_CW" of 256 devices of v5p:8x8x8, libtpu 0.0.48.1).
        gathers_in_one_ring=on_sparse_cores,
    )


def compiler_flags(candidate: StepLayout, request: Request) -> frozenset[str]:
    """Returns the names of the flags that have an effect on a step."""
    return _engine_flags(candidate.engine_name, request)


@lru_cache(maxsize=8)  # of few engines and requests
def _engine_flags(engine_name: str, request: Request) -> frozenset[str]:
    device, engine = device_hardware(request.devices), engine_named(engine_name)
    traits = StepTraits(
        request.devices.platform,
        device.device_kinds[0],
        engine.config_name,
        pipelines=engine.pipelines,
        program_per_rank=engine.program_per_rank,
        has_experts=bool(request.model.experts),
        sequence_parallel=bool(request.model.between),
        default_flags=request.default_flags,
    )
    return frozenset(flag.option for flag in FLAGS if flag.has_effect(traits))


def _efficiency(request: Request, flags: frozenset[str]) -> Efficiency:
    device = device_hardware(request.devices)
    reached = efficiency(device, "bf16")
    if reached.attention_by_heads:  # our kernels were measured there, too
        reached = replace(reached, experts=GROUPED_PRODUCTS / reached.products)
    if LARGE_VMEM in flags:
        reached = replace(reached, products=reached.products / _WITH_LARGE_VMEM, writing=0.0)
    if device.is_gpu and request.model.activation_bytes > _HALF:
        shares = {
            name: _TF32 * getattr(reached, name) for name in ("products", "head", "attention")
        }
        reached = replace(reached, **shares)
    return reached


@lru_cache(maxsize=1_000_000)
def _unpipelined_seconds(step: _Unpipelined) -> _WorkSeconds:
    """Returns the seconds of all microbatches on a rank that has all layers."""
    request, layout = step.request, _layout(step)
    kind = device_hardware(request.devices)
    whole = predict(request.work, layout, kind, reached=_efficiency(request, step.flags))
    reduction = whole.parts["gradient_reduction"]
    return _WorkSeconds(whole.seconds - reduction, reduction, whole.parts["fsdp"])
