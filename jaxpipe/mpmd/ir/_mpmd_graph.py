"""Defines the graph that the first passes rewrite: equations, loops, and what is known of them.

A loop is a node that runs a body for every microbatch. `extract_loops` makes it from the primitive
`treduce`. `cut_stages` adds the stages of its body, and `split_tasks` the tasks of every stage;
`unroll_schedule` writes it out as instructions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from ...ir.graph import Atom, Eqn, Graph, Var
from ...schedules import Action, Op, Schedule, language
from ._program import RunTask, format_ranks, format_task_graph
from ._reduce import Reduction
from ._text import Names, format_eqn, format_graph, format_lambda, format_spec, indent


@dataclass(frozen=True)
class SlicedSchedule:
    """A schedule with slices of sequences, for a body whose marks carry the indices of parts."""

    schedule: Schedule


@dataclass(frozen=True)
class StageTask:
    """A program that runs once per microbatch.

    Attributes:
        graph: `(reads, accumulators so far) -> (writes, new accumulators)`.
        reads: The values it reads: invariants of the loop, the index of the microbatch, and values
            that other tasks wrote for the same microbatch.
        writes: The values it computes for other tasks.
        accumulators: The results of the loop's body that it accumulates over microbatches.
    """

    graph: Graph
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    accumulators: tuple[Var, ...]


@dataclass(frozen=True)
class Stage:
    """The program of one stage for one microbatch, forward and backward.

    Attributes:
        graph: `(values it reads) -> (values for other stages, its results of the body)`.
        backward: The inputs and outputs of `graph` that belong to the backward.
        sent: The outputs of `graph` that other stages read.
        tasks: The tasks of the stage by operation: F, and B or I and W. Empty before `split_tasks`.
    """

    graph: Graph
    backward: frozenset[Var]
    sent: frozenset[Var]
    tasks: Mapping[Op, StageTask] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PipelinedLoop:
    """A loop that runs a body for each of M microbatches, in the order of a schedule.

    It is a node of an `MpmdGraph`, beside `Eqn`, and like an equation equal only to itself.

    Attributes:
        inputs: The arguments of the loop: one for each invariant.
        body: `(invariants, index of the microbatch) -> results of the microbatch`.
        all_mark_ids: The ids of all forward marks of the body in program order, if its results do
            not depend on some of them; otherwise (), as the marks are in the body.
        stages: [num_parts] the stages of the body, () before `cut_stages`. If sequences are cut
            into slices, each is the part of a stage that runs one slice.
        specs: [num_outputs] the specs, within a group, of the results whose sharding the user
            constrains inside the body, None for the others.
        output_ranks: [num_outputs] the rank that accumulates each output, () before `cut_stages`.
            If several ranks run a stage, a result of it is an output of the body, and so of the
            loop, once for each of them.
    """

    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    body: Graph
    schedule: Schedule
    reductions: tuple[Reduction, ...]
    all_mark_ids: tuple[int, ...]
    stages: tuple[Stage, ...]
    specs: tuple[PartitionSpec | None, ...]
    output_ranks: tuple[int, ...] = ()

    @property
    def invariants(self) -> tuple[Var, ...]:
        """Returns the inputs of the body that are the same for every microbatch."""
        return self.body.inputs[:-1]

    @property
    def index(self) -> Var:
        """Returns the input of the body that is the index of the microbatch."""
        return self.body.inputs[-1]

    @property
    def num_microbatches(self) -> int:
        """Returns the number of microbatches M."""
        return self.schedule.num_microbatches

    @cached_property
    def num_slices(self) -> int:
        """Returns the number of slices of each sequence."""
        return language.num_slices(self.schedule)

    @property
    def num_parts(self) -> int:
        """Returns the length of `stages`: each stage of the schedule has a part for each slice."""
        return self.schedule.num_stages * self.num_slices

    def part_of(self, action: Action) -> int:
        """Returns the index in `stages` of what an action runs."""
        return action.stage * self.num_slices + (action.slice or 0)

    @cached_property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks that run each part of a stage; the first is the stage's owner."""
        ranks, owners = language.ranks_by_stage(self.schedule), language.owners(self.schedule)
        return tuple(
            (owners[stage], *(rank for rank in ranks[stage] if rank != owners[stage]))
            for stage in range(self.schedule.num_stages)
            for _ in range(self.num_slices)
        )

    @cached_property
    def microbatches(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Returns the microbatches for which a rank runs a part of a stage, by (part, rank)."""
        by_stage_and_rank: dict[tuple[int, int], list[int]] = {}
        for (stage, microbatch), rank in language.rank_by_microbatch(self.schedule).items():
            for i in range(self.num_slices):
                by_stage_and_rank.setdefault((stage * self.num_slices + i, rank), []).append(
                    microbatch
                )
        return {key: tuple(sorted(microbatches)) for key, microbatches in by_stage_and_rank.items()}

    @cached_property
    def input_ranks(self) -> tuple[frozenset[int], ...]:
        """Returns the ranks whose tasks read each input of the loop."""
        return self._ranks_of_readers(self.stage_ranks)

    @cached_property
    def owner_ranks(self) -> tuple[frozenset[int], ...]:
        """Returns the ranks that own a stage whose tasks read each input of the loop."""
        return self._ranks_of_readers([ranks[:1] for ranks in self.stage_ranks])

    def _ranks_of_readers(
        self, stage_ranks: Sequence[tuple[int, ...]]
    ) -> tuple[frozenset[int], ...]:
        readers: dict[Var, set[int]] = {invariant: set() for invariant in self.invariants}
        for ranks, stage in zip(stage_ranks, self.stages, strict=True):
            for value in {value for task in stage.tasks.values() for value in task.reads}:
                if value in readers:
                    readers[value].update(ranks)
        return tuple(frozenset(readers[invariant]) for invariant in self.invariants)

    def __str__(self) -> str:
        return "\n".join(_format_loop(self, Names()))


def _format_loop(loop: PipelinedLoop, names: Names) -> list[str]:
    """Returns the lines of a loop: its schedule, and only the newest of body, stages and tasks."""
    schedule = [f"rank {rank}: {line}" for rank, line in enumerate(str(loop.schedule).split("\n"))]
    inputs, outputs = names.join(loop.inputs), " ".join(map(names.typed, loop.outputs))
    if not loop.stages:
        inside = ["body =", *indent(format_graph(loop.body, names))]
    else:
        names.join(loop.body.inputs)  # invariants have the first numbers
        inside = [
            line
            for i, stage in enumerate(loop.stages)
            for line in (_format_tasks if stage.tasks else _format_stage)(i, stage, names)
        ]
    operations = ", ".join(repr(reduction.operation) for reduction in loop.reductions)
    specs = [
        f"{names(output)}={format_spec(spec)}"
        for output, spec in zip(loop.outputs, loop.specs, strict=True)
        if spec is not None
    ]
    return [
        f"{outputs} = pipelined_loop[",
        *indent(schedule),
        *indent([f"index = {names(loop.index)}"]),
        *indent(inside),
        *indent([f"reduce = {operations}"]),
        *(indent([f"specs = {' '.join(specs)}"]) if specs else []),
        f"] {inputs}".rstrip(),
    ]


def _format_stage(i: int, stage: Stage, names: Names) -> list[str]:
    lines = format_graph(stage.graph, names)
    return [
        f"stage {i} =",
        *indent(lines),
        *indent([f"backward: {_in_order(stage, stage.backward, names)}".rstrip()]),
        *indent([f"sent: {_in_order(stage, stage.sent, names)}".rstrip()]),
    ]


def _in_order(stage: Stage, chosen: frozenset[Var], names: Names) -> str:
    values: Sequence[Atom] = (*stage.graph.inputs, *stage.graph.outputs)
    return names.join(v for v in values if isinstance(v, Var) and v in chosen)


def _format_tasks(i: int, stage: Stage, names: Names) -> list[str]:
    lines: list[str] = []
    for op, task in stage.tasks.items():
        lines += [
            f"task {i}{op.name} =",
            *indent(format_graph(task.graph, names)),
            *indent([f"reads: {names.join(task.reads)}".rstrip()]),
            *indent([f"writes: {names.join(task.writes)}".rstrip()]),
            *indent([f"accumulators: {names.join(task.accumulators)}".rstrip()]),
        ]
    return lines


Ranks: TypeAlias = tuple[int, ...]
"""The ranks that hold or compute something, in ascending order."""


@dataclass(frozen=True)
class LoweringOptions:
    """What the caller asks of a function, beyond what its graph says.

    Attributes:
        to_schedule: `(the schedule that the user gave, num_microbatches) -> checked schedule`.
        in_specs: [num_inputs] the spec of each argument within a group, None if it is open.
        out_specs: [num_outputs] the spec of each result within a group, None if it is open.
        in_ranks: [num_inputs] the ranks that hold each argument before the call, None if any may
            be given it. Functions with loops do not read it.
        out_ranks: [num_outputs] the ranks of each result, None if they are open.
        donated_inputs: The indices of the arguments whose memory results may reuse.
        processes: [num_ranks] the index of the process of each rank, or () if all ranks share one.
    """

    num_ranks: int
    to_schedule: Callable[[Any, int], Schedule]
    in_specs: tuple[PartitionSpec | None, ...]
    out_specs: tuple[PartitionSpec | None, ...]
    in_ranks: tuple[Ranks | None, ...]
    out_ranks: tuple[Ranks | None, ...]
    donated_inputs: frozenset[int]
    processes: tuple[int, ...]
    mpmd_axis: str


@dataclass(frozen=True)
class RankAssignment:
    """The ranks that compute each value and the ranks that need it.

    Attributes:
        runs_on: The ranks that run each equation outside of loops, () if no rank needs it.
        needed_on: The ranks that need each value, which is computed there or sent there.
        produced_on: The ranks that have each value without receiving it: the ranks of its equation,
            or, for an input of the function, the ranks that are given it.
    """

    runs_on: Mapping[Eqn, Ranks] = field(default_factory=dict)
    needed_on: Mapping[Var, Ranks] = field(default_factory=dict)
    produced_on: Mapping[Var, Ranks] = field(default_factory=dict)


@dataclass(frozen=True)
class MpmdGraph:
    """A function of arrays with its loops as nodes, and what passes have found out about it.

    Attributes:
        ranks: The ranks of equations and values, empty before `assign_ranks`.
        specs: The specs of values within a group, as far as known; empty before
            `propagate_shardings`.
        fragments: [num_loops + 1] the programs of the equations before the first loop, between two
            loops, and after the last one; () before `outer_fragments`.
    """

    inputs: tuple[Var, ...]
    eqns: tuple[Eqn | PipelinedLoop, ...]
    outputs: tuple[Atom, ...]
    options: LoweringOptions
    ranks: RankAssignment = field(default_factory=RankAssignment)
    specs: Mapping[Var, PartitionSpec] = field(default_factory=dict)
    fragments: tuple[tuple[RunTask, ...], ...] = ()

    @property
    def loops(self) -> tuple[PipelinedLoop, ...]:
        """Returns the loops, in the order in which they run."""
        return tuple(eqn for eqn in self.eqns if isinstance(eqn, PipelinedLoop))

    def __str__(self) -> str:
        return "\n".join(_format_mpmd_graph(self))


def replace_loops(
    graph: MpmdGraph, rewrite: Callable[[PipelinedLoop], Iterable[Eqn | PipelinedLoop]]
) -> MpmdGraph:
    """Returns the graph with other nodes in place of each loop."""
    eqns: list[Eqn | PipelinedLoop] = []
    for eqn in graph.eqns:
        eqns += rewrite(eqn) if isinstance(eqn, PipelinedLoop) else [eqn]
    return replace(graph, eqns=tuple(eqns))


def _format_mpmd_graph(graph: MpmdGraph) -> list[str]:
    names = Names()
    needed = graph.ranks.needed_on

    def suffix(atom: Atom) -> str:
        return format_ranks(needed[atom]) if isinstance(atom, Var) and atom in needed else ""

    lines = format_lambda(
        graph.inputs, lambda: _format_nodes(graph, names), graph.outputs, names, suffix
    )
    if graph.specs:
        specs = (f"{names(value)}={format_spec(spec)}" for value, spec in graph.specs.items())
        lines.append(f"specs: {' '.join(specs)}")
    return lines


def _format_nodes(graph: MpmdGraph, names: Names) -> list[str]:
    """Returns the lines of the loops, and of the equations or, if there are any, the fragments."""
    lines: list[str] = []
    fragments = iter(graph.fragments)
    for run in next(fragments, ()):
        lines += format_task_graph(run, names)
    for eqn in graph.eqns:
        if isinstance(eqn, PipelinedLoop):
            lines += _format_loop(eqn, names)
            for run in next(fragments, ()):
                lines += format_task_graph(run, names)
        elif not graph.fragments:
            runs_on = graph.ranks.runs_on.get(eqn)
            lines += format_eqn(eqn, names, "" if runs_on is None else format_ranks(runs_on))
    return lines
