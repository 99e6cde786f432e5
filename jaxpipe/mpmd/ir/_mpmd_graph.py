"""Defines the graph that the first passes rewrite: equations, loops, and what is known of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from ...ir.graph import Atom, Eqn, Var
from ...schedules import Schedule
from ._loop import PipelinedLoop, format_loop
from ._program import RunTask, format_ranks, format_task_graph
from ._text import Names, format_eqn, format_lambda, format_spec

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
            lines += format_loop(eqn, names)
            for run in next(fragments, ()):
                lines += format_task_graph(run, names)
        elif not graph.fragments:
            runs_on = graph.ranks.runs_on.get(eqn)
            lines += format_eqn(eqn, names, "" if runs_on is None else format_ranks(runs_on))
    return lines
