"""Candidates: every way to spread a model over devices that is worth a look, in plain numbers.

S ranks, v stages on each, M microbatches, L layers, N devices, B sequences of a step. What does not
divide is left out here to save time; the checks of a run have the last word (`_search`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from .. import sharding
from ..api.inspection import counts_by_cost
from ..engines import (
    CONFIG_ENGINES,
    NO_OPTIONS,
    Engine,
    EngineOptions,
    engine_of_any_schedule,
    most_bytes_for_several,
)
from ..schedules import FAMILIES
from ._devices import Devices, absent_devices
from ._model import OFFLOAD_INPUTS, Sizes, mesh_sizes

GatherMode = Literal["tick", "repeat", "once", "layer"]
RematScope = Literal["tick", "layer", "both"]

GATHERED_AXES = ("fsdp", "expert", "context")
_WEIGHTS = PartitionSpec((*GATHERED_AXES, "tensor"))
"""The axes that divide the weights of layers."""

_MAX_TENSOR = 16
_MAX_CHUNKS = 8
_ENDS = 2
"""Stages that may have no layer: the first has the embedding, and the last the head."""
_LONG = 4096
"""Tokens of a sequence that a device has at least where `context` is one of several choices."""
_UNEVEN = 0.1
"""The share of layers by which stages of several on a rank may exceed them, if some have fewer."""
_TILE_ROWS = 16
"""Rows of a tile of 16-bit values on TPUs."""
_MICROBATCHES_PER_RANK = (1, 2, 4, 8, 16)
POLICIES = ("full", "save_out_proj", "save_dot_except_mlp", "minimal_with_context")
"""Policies of rematerialization that plans choose from."""


class MemoryPolicy(NamedTuple):
    """The choices of a layout that decide what it keeps in memory: they change little of the work.

    Attributes:
        policy: The policy of rematerialization.
        scope: Whether it is applied to the stage of a tick, to each layer, or to both.
        gather: When weights are gathered.
    """

    policy: str
    scope: RematScope
    gather: GatherMode

    @property
    def remat(self) -> str:
        """Returns the policy of a stage in a tick."""
        return "none" if self.scope == "layer" else self.policy

    @property
    def layer_remat(self) -> str:
        """Returns the policy of each layer."""
        return "none" if self.scope == "tick" else self.policy


class StepLayout(NamedTuple):
    """A way to spread a training step over devices and time.

    Attributes:
        mesh: The size of every axis of the mesh, in the order of `AXES`.
        across: The axis along which slices lie; "" if there is one.
        engine_name: The name of the engine in configs.
        schedule: The schedule; "" for engines that have their own.
        chunks: v, the stages on each rank.
        counts: [stages] layers of every stage, in forward order.
        microbatches: M, the microbatches of a call.
        accumulation: Calls of the engine in a step.
        policy: The policy of rematerialization, which says what a layer keeps.
        scope: Whether it is applied to the stage of a tick, to each layer, or to both.
        gather: When weights are gathered.
        vocab_tiling: Parts in which logits are computed.
        options: Options of the engine.
        copies: The stages that each rank runs and another one stores.
        gathered_axes: Mesh axes over which weights are gathered.
        whole_experts: Whether a device stores whole experts, and not a slice of each.
        cuts_tiles: Whether such slices are no whole number of a TPU's tiles.
        most_for_several: The bytes of a gathered layer up to which a loop over layers runs several
            in an iteration.
    """

    mesh: tuple[int, ...]
    across: str
    engine_name: str
    schedule: str
    chunks: int
    counts: tuple[int, ...]
    microbatches: int
    accumulation: int
    policy: str
    scope: RematScope
    gather: GatherMode
    vocab_tiling: int
    options: EngineOptions = NO_OPTIONS
    copies: int = 0
    gathered_axes: tuple[str, ...] = GATHERED_AXES
    whole_experts: bool = False
    cuts_tiles: bool = False
    most_for_several: float = 0.0

    @property
    def engine(self) -> Engine:
        """Returns the engine."""
        return engine_named(self.engine_name)

    @property
    def family_name(self) -> str:
        """Returns the schedule, by its name also if it is the engine's own; "" if none is run."""
        own = self.engine.own_schedule
        return self.schedule or (own.family if own else "")

    @property
    def sizes(self) -> Sizes:
        """Returns the size of every mesh axis, by its name."""
        return mesh_sizes(self.mesh)

    @property
    def num_ranks(self) -> int:
        """Returns S."""
        return self.sizes["stage"]

    @property
    def layers_per_stage(self) -> int:
        """Returns the layers of the longest stage."""
        return max(self.counts)

    @property
    def memory_policy(self) -> MemoryPolicy:
        """Returns the policy, scope and gather of the layout as one record."""
        return MemoryPolicy(self.policy, self.scope, self.gather)

    @property
    def gathers(self) -> bool:
        """Returns whether weights are split by axes over which they are gathered."""
        return any(self.sizes[axis] > 1 for axis in self.gathered_axes)

    @property
    def num_shards(self) -> int:
        """Returns the number of device groups that have rows of their own."""
        return row_shards(self.sizes)


@lru_cache(maxsize=64)
def engine_named(name: str) -> Engine:
    """Returns the engine of a name in configs.

    Other names are taken for that of an engine which runs schedules: the checks of a run refuse
    them, and say which there are.
    """
    return CONFIG_ENGINES.get(name) or engine_of_any_schedule()


def splits_backward(candidate: StepLayout) -> bool:
    """Returns whether the schedule of a layout has backwards in two halves."""
    return candidate.schedule in FAMILIES and FAMILIES[candidate.schedule].splits_backward


def row_shards(sizes: Sizes) -> int:
    """Returns the number of device groups that have rows of their own."""
    return sizes["data"] * sizes["fsdp"] * sizes["expert"]


@dataclass(frozen=True)
class Space:
    """The sizes and limits from which candidates are made.

    Attributes:
        devices: The devices of the run.
        batch: B, sequences of a step.
        sequence: Tokens of a sequence.
        num_layers: L, those of the pipeline.
        vocab: The size of the vocabulary.
        max_stages: The most ranks of a pipeline.
        scan_layers: `(tensor) -> ` whether layers run in a loop, or how many in each iteration,
            beside an axis `tensor` of this size; None or True if the engine may choose.
        num_experts: Experts of a layer; 0 if there are none.
        num_kv_heads: Heads that `tensor` divides.
        fixed: Values that candidates must have, by the names of their fields and of mesh axes.
        policies: Policies of rematerialization to choose from.
        without: Ways to gather weights that are ruled out.
        unread_by: The given keys that an engine does not read, which rule it out, by its name in
            configs.
        options: Options of the engine, which has to have them.
        free_options: Names of other options, which a plan may choose.
        costs: The cost of each layer, by which stages are divided. None: all the same.
        gathered_axes: Mesh axes over which weights are gathered.
        hidden: D, the channels of an activation.
    """

    devices: Devices
    batch: int
    sequence: int
    num_layers: int
    vocab: int
    max_stages: int
    scan_layers: Callable[[int], bool | int | None]
    num_experts: int = 0
    num_kv_heads: int = 1
    fixed: dict[str, Any] = field(default_factory=dict)
    policies: tuple[str, ...] = POLICIES
    without: tuple[str, ...] = ()
    unread_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: EngineOptions = NO_OPTIONS
    free_options: frozenset[str] = frozenset()
    costs: tuple[float, ...] | None = None
    gathered_axes: tuple[str, ...] = GATHERED_AXES
    hidden: int = 0


@lru_cache(maxsize=10_000)
def imbalance(costs: tuple[float, ...] | None, counts: tuple[int, ...]) -> float:
    """Returns the cost of the dearest stage over the mean of all stages."""
    layers = iter(costs or (1.0,) * sum(counts))
    stages = [sum(itertools.islice(layers, count)) for count in counts]
    return max(stages) * len(stages) / sum(stages)


class LayoutGroup(NamedTuple):
    """Layouts that differ only in their memory policy.

    Attributes:
        first: A layout that has all their other fields; its own policy may be none of `policies`.
        policies: The memory policy of each.
    """

    first: StepLayout
    policies: tuple[MemoryPolicy, ...]

    def layout(self, index: int) -> StepLayout:
        """Returns the layout with the policy of this index."""
        return self.first._replace(**self.policies[index]._asdict())

    def layouts(self) -> Iterator[StepLayout]:
        """Yields the layouts."""
        return map(self.layout, range(len(self.policies)))


def layout_groups(space: Space) -> Iterator[LayoutGroup]:
    """Yields the candidates, in groups."""
    policies_of = cache(partial(_memory_policies, space))
    for mesh, across in _meshes(space):
        sizes = mesh_sizes(mesh)
        accumulation = space.fixed.get("accumulation", 1)
        rows, rest = divmod(space.batch // accumulation, row_shards(sizes))
        if rest or not rows or space.batch % accumulation:
            continue
        for name, schedule, chunks, counts in _pipelines(space, sizes["stage"]):
            engine = engine_named(name)
            # The devices of a rank belong to one process.
            of_rank = space.devices.num_devices // sizes["stage"]
            if engine.program_per_rank and space.devices.devices_per_host % of_rank:
                continue
            cuts_tiles = _cuts_tiles(space, sizes)
            divides = space.num_experts % (sizes["expert"] * sizes["fsdp"] * sizes["context"]) == 0
            # XLA's partitioner would gather all experts of a shard of `expert`, or add them up.
            gathers = engine.pipelines and not engine.program_per_rank and sizes["expert"] == 1
            saves = cuts_tiles and space.num_experts > 0 and divides and gathers
            whole_experts = space.fixed.get("whole_experts", saves)
            if whole_experts and not divides:
                continue
            most_for_several = 0.0 if engine.pipelines else _most_for_several(space, mesh, across)
            for microbatches in _microbatches(space, rows, sizes["stage"], engine):
                first = StepLayout(
                    mesh=mesh,
                    across=across,
                    engine_name=name,
                    schedule=schedule,
                    chunks=chunks,
                    counts=counts,
                    microbatches=microbatches,
                    accumulation=accumulation,
                    policy="full",
                    scope="layer",
                    gather="tick",
                    vocab_tiling=_vocab_tiling(space, rows // microbatches, sizes),
                    options=_options(space, engine, sizes),
                    copies=chunks if _is_on_two_ranks(schedule) else 0,
                    gathered_axes=space.gathered_axes,
                    whole_experts=whole_experts,
                    cuts_tiles=cuts_tiles,
                    most_for_several=most_for_several,
                )
                has_shards = row_shards(sizes) > sizes["data"]
                policies = policies_of(name, first.family_name, max(counts), has_shards)
                if policies:
                    yield LayoutGroup(first, policies)


def neighbours(candidate: StepLayout, space: Space) -> Iterator[StepLayout]:
    """Yields layouts that differ in one choice which `layout_groups` leaves out to save time."""
    engine, ranks = candidate.engine, candidate.num_ranks
    shared = candidate.options._replace(vocab_parallel=True)
    if (
        "vocab_parallel" in space.free_options & engine.options
        and shared != candidate.options
        and ranks > 1
        and space.vocab % ranks == 0
        and space.fixed.get("vocab_tiling", 1) == 1
    ):
        yield candidate._replace(options=shared, vocab_tiling=1)
    if not engine.runs_schedules or "schedule" in space.fixed:
        return
    for name, family in FAMILIES.items():
        chunks = "chunks" in family.takes and candidate.chunks > 1
        if family.is_usual or not (chunks or candidate.chunks == family.default_chunks):
            continue
        if family.ranks_divide_microbatches and candidate.microbatches % ranks:
            continue
        copies = candidate.chunks if _is_on_two_ranks(name) else 0
        yield candidate._replace(schedule=name, copies=copies)


def _options(space: Space, engine: Engine, sizes: Sizes) -> EngineOptions:
    """Returns options: those that are given, and ZeRO-1 where replicas can divide the state.

    It moves as many bytes as a sum over replicas, and needs less memory.
    """
    if sizes["data"] > 1 and "zero1" in space.free_options & engine.options:
        return space.options._replace(zero1=True)
    return space.options


def _cuts_tiles(space: Space, sizes: Sizes) -> bool:
    """Returns whether devices are TPUs, of whose tiles a slice of an expert is no whole number."""
    parts = sizes["fsdp"] * sizes["context"]
    is_cut = parts > 1 and space.hidden % (_TILE_ROWS * parts) != 0
    return is_cut and space.devices.platform == "tpu"


def _most_for_several(space: Space, mesh: tuple[int, ...], across: str) -> float:
    """Returns the bytes of a gathered layer up to which loops run several in an iteration."""
    devices = space.devices
    if devices.platform != "tpu" or sum(size > 1 for size in devices.shape) < 3:
        return 0.0
    scan = space.scan_layers(mesh_sizes(mesh)["tensor"])
    return _most_on_torus(devices, mesh, across, space.num_layers, scan)


@lru_cache(maxsize=10_000)
def _most_on_torus(
    devices: Devices, mesh: tuple[int, ...], across: str, layers: int, scan: bool | int | None
) -> float:
    dcn = {across: devices.num_slices} if across else {}
    sizes = {axis: size // dcn.get(axis, 1) for axis, size in mesh_sizes(mesh).items()}
    on_torus = sharding.make_mesh(sizes, dcn, devices=absent_devices(devices))
    return most_bytes_for_several(scan, layers, _WEIGHTS, on_torus)


def _meshes(space: Space) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields the sizes of the mesh axes, and the axis along which slices lie."""
    count, slices, fixed = space.devices.num_devices, space.devices.num_slices, space.fixed
    for stage in _choices(fixed, "stage", _divisors(count)):
        if stage > min(space.max_stages, space.num_layers):
            continue
        for tensor in _choices(fixed, "tensor", _tensor_sizes(space, count // stage)):
            rest = count // stage // max(1, tensor)
            for expert in _choices(fixed, "expert", _expert_sizes(space, rest)):
                alone = stage == tensor == 1
                contexts = _context_sizes(space, rest // expert, alone=alone)
                for context in _choices(fixed, "context", contexts):
                    rows = rest // expert // context
                    for fsdp in _choices(fixed, "fsdp", _divisors(rows)):
                        data = rows // fsdp
                        mesh = (data, stage, fsdp, tensor, expert, context)
                        if math.prod(mesh) == count and data == fixed.get("data", data):
                            yield from ((mesh, axis) for axis in _across(mesh, slices, fixed))


def _across(mesh: tuple[int, ...], slices: int, fixed: dict[str, Any]) -> Sequence[str]:
    if slices == 1:
        return ("",)
    sizes = mesh_sizes(mesh)
    axes = (fixed["across"],) if "across" in fixed else ("data", "stage", "fsdp")
    return [axis for axis in axes if sizes[axis] % slices == 0]


def _choices(fixed: dict[str, Any], name: str, usual: Sequence[Any]) -> Sequence[Any]:
    return (fixed[name],) if name in fixed else usual


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _tensor_sizes(space: Space, count: int) -> list[int]:
    most = min(_MAX_TENSOR, space.devices.devices_per_domain)
    heads = space.num_kv_heads
    return [size for size in _divisors(count) if size <= most and heads % size == 0]


def _expert_sizes(space: Space, count: int) -> list[int]:
    most = space.num_experts or 1
    return [size for size in _divisors(count) if size <= most and most % size == 0]


def _context_sizes(space: Space, count: int, *, alone: bool) -> list[int]:
    """Returns sizes of `context`: all if there are too few rows for all devices.

    Else sequences are divided into long parts, and only without a pipeline and divided products.
    """
    sizes = [size for size in _divisors(count) if space.sequence % size == 0]
    if count > space.batch:
        return sizes
    return [size for size in sizes if size == 1 or (alone and space.sequence >= size * _LONG)]


def _pipelines(space: Space, ranks: int) -> Iterator[tuple[str, str, int, tuple[int, ...]]]:
    """Yields names of engines with schedule, stages per rank and layers of every stage."""
    fixed, layers = space.fixed, space.num_layers
    usual = [name for name, e in CONFIG_ENGINES.items() if e.pipelines == (ranks > 1)]
    for name in _choices(fixed, "engine", usual):
        engine = engine_named(name)
        if space.unread_by.get(name):
            continue
        if not engine.pipelines:
            one = "counts" not in fixed and fixed.get("chunks", 1) == 1
            if ranks == 1 and not fixed.get("schedule") and one:
                yield name, "", 1, (layers,)
        elif ranks == 1 and "stage" not in fixed:
            continue
        elif not engine.runs_schedules:
            if not fixed.get("schedule"):
                for chunks in _choices(fixed, "chunks", _divisors(layers // ranks)):
                    counts = _counts(space, ranks * chunks)
                    if counts and (len({*counts}) == 1 or space.costs):
                        yield name, "", chunks, counts
        else:
            of_families = [name for name, family in FAMILIES.items() if family.is_usual]
            several = of_families[:1] if ranks == 1 else of_families
            for schedule in _choices(fixed, "schedule", several):
                for chunks in _chunks_of(schedule, fixed, layers, ranks):
                    if counts := _counts(space, ranks * chunks):
                        yield name, schedule, chunks, counts


def _is_on_two_ranks(schedule: str) -> bool:
    """Returns whether every stage of a schedule is on two ranks."""
    return schedule in FAMILIES and FAMILIES[schedule].placement == "both_ways"


def _chunks_of(schedule: str, fixed: dict[str, Any], layers: int, ranks: int) -> Sequence[int]:
    if schedule not in FAMILIES:
        return (fixed.get("chunks", 1),)
    if "chunks" not in FAMILIES[schedule].takes:
        usual = FAMILIES[schedule].default_chunks
        return (usual,) if fixed.get("chunks", usual) == usual else ()
    if "counts" in fixed:
        return _choices(fixed, "chunks", [len(fixed["counts"]) // ranks])
    usual = range(2, min(_MAX_CHUNKS, (layers + _ENDS) // ranks) + 1)
    most = {v: -(-layers // (v * ranks)) * v * ranks for v in usual}
    even = [v for v in usual if most[v] == layers]
    uneven = [v for v in usual if layers < most[v] <= (1 + _UNEVEN) * layers]
    return _choices(fixed, "chunks", even or uneven[-2:])


def _counts(space: Space, stages: int) -> tuple[int, ...]:
    """Returns layers per stage; () if others are given, or if there are too few layers.

    If none are given they differ by at most one, and the first and last stages have fewer; or they
    cost as much as possible the same.
    """
    layers = space.num_layers
    if counts := space.fixed.get("counts"):
        return counts if len(counts) == stages else ()
    each, more = divmod(layers, stages)
    requested = space.fixed.get("layers_per_stage")
    if space.costs and not requested:
        return _by_cost(space.costs, stages) if each else ()
    too_few = not each and stages - more > _ENDS
    if too_few or (requested and (each, more) != (requested, 0)):
        return ()
    if not more:
        return (each,) * stages
    # The ends also have the embedding and the head.
    start = (stages - more + 1) // 2
    return tuple(each + (start <= stage < start + more) for stage in range(stages))


_by_cost = lru_cache(counts_by_cost)


def _microbatches(space: Space, rows: int, ranks: int, engine: Engine) -> Sequence[int]:
    """Returns numbers of microbatches, of `rows` rows that each device group has."""
    if "microbatches" in space.fixed:
        requested = space.fixed["microbatches"]
        return (requested,) if rows % requested == 0 else ()
    fitting = _divisors(rows)
    if not engine.pipelines:
        return fitting
    own = engine.own_schedule
    in_rounds = own is not None and FAMILIES[own.family].ranks_divide_microbatches
    least = ranks * (1 + space.options.forwarding_delay)
    enough = [m for m in fitting if m >= least and (m % ranks == 0 or not in_rounds)]
    if not in_rounds and space.batch < space.devices.num_devices:  # ranks wait, or have nothing
        enough = enough or fitting[-1:]
    most = ranks * _MICROBATCHES_PER_RANK[-1]
    return [m for m in enough if m <= most] or enough[:1]


def _vocab_tiling(space: Space, rows: int, sizes: Sizes) -> int:
    """Returns into how many parts logits are cut so that they take little of the memory."""
    if "vocab_tiling" in space.fixed:
        return space.fixed["vocab_tiling"]
    length = space.sequence // sizes["context"]
    logits = 4 * rows * length * space.vocab // sizes["tensor"]
    tiles = 1
    while logits > space.devices.memory_bytes * tiles // 16 and length % (2 * tiles) == 0:
        tiles *= 2
    return tiles


def _memory_policies(
    space: Space, engine_name: str, family_name: str, layers_per_stage: int, has_shards: bool
) -> tuple[MemoryPolicy, ...]:
    """Returns every rematerialization and every way to gather weights of a layout."""
    fixed, engine = space.fixed, engine_named(engine_name)
    scopes: Sequence[RematScope] = ("layer",)
    if engine.pipelines:
        scopes = ("tick",) if layers_per_stage == 1 else ("layer", "both")
        if {"remat", "layer_remat"} & fixed.keys():
            scopes = ("tick", "layer", "both")
    usual = engine.usual_gather(layers_per_stage)
    gathers: Sequence[GatherMode] = (usual,)
    if "gather" in engine.options and has_shards:
        family = FAMILIES.get(family_name)
        gathers = ("once", usual, "repeat")
        if not (family and family.is_breadth_first):
            gathers = ("once", "layer")
    gathers = [gather for gather in gathers if gather == usual or gather not in space.without]
    policies = []
    for policy in _choices(fixed, "policy", space.policies):
        # Where a plan may choose to store everything, that is of a whole stage.
        stores_all = policy == "none" and policy in space.policies
        offloads = policy == OFFLOAD_INPUTS and engine.pipelines
        if offloads and engine.program_per_rank:
            continue  # what its programs leave for each other stays on the device
        chosen = _choices(fixed, "scope", ("layer",) if offloads else scopes)
        for scope in ("tick",) if stores_all else chosen:
            for gather in _choices(fixed, "gather", gathers):
                if not engine.pipelines and policy != "none":
                    scope = "layer"  # without a pipeline there is no tick
                policies.append(MemoryPolicy(policy, scope, gather))
    # An own model gives the two policies by themselves, and the trainer one with its scope.
    remats = fixed.get("remat"), fixed.get("layer_remat")
    return tuple(
        p for p in policies if remats[0] in (None, p.remat) and remats[1] in (None, p.layer_remat)
    )
