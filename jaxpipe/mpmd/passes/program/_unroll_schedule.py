"""Pass 10, `unroll_schedule`: writes a function as the tasks of all ranks, one per action.

Before: a graph with loops, and fragments between them.

After: an `MpmdProgram` of `RunTask` instructions: the fragments of the first segment, then for each
loop one task per rank that creates its accumulators, the tasks of the schedule in a topological
order, and the fragments of the next segment. Buffers of a loop have a version for each microbatch.

Why here: all that is decided about equations and loops has been decided. What follows, transfers,
fused programs and the life of buffers, depends on the order of instructions.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax

from ....ir.graph import Eqn, Graph, PrimitiveCall, Var, variables
from ....schedules import Action, Op, language
from ...api._tasks import Task
from ...ir._mpmd_graph import MpmdGraph, PipelinedLoop, Stage
from ...ir._program import Buffer, BufferOnRanks, MpmdProgram, RunTask
from ...ir._reduce import Reduction


def unroll_schedule(graph: MpmdGraph) -> MpmdProgram:
    """Returns the tasks of all ranks, without transfers, each after those it reads from."""
    options, needed_on = graph.options, graph.ranks.needed_on
    instructions = list(graph.fragments[0])
    indices: dict[Buffer, int] = {}
    for i, (loop, after) in enumerate(zip(graph.loops, graph.fragments[1:], strict=True)):
        indices |= {Buffer(loop.index, m): m for m in range(loop.num_microbatches)}
        instructions += [*_init_tasks(loop, i), *_tasks_of_schedule(loop, i), *after]
    return MpmdProgram(
        options.num_ranks,
        tuple(BufferOnRanks(Buffer(v), graph.ranks.produced_on[v]) for v in graph.inputs),
        tuple(BufferOnRanks(Buffer(v), needed_on[v]) for v in variables(graph.outputs)),
        indices,
        tuple(instructions),
        schedules=tuple(loop.schedule for loop in graph.loops),
        specs=graph.specs,
        donated_inputs=options.donated_inputs,
        processes=options.processes,
        has_transfers=False,
    )


ResultOnRank: TypeAlias = tuple[Var, int]
"""A result of the body of a loop, and a rank that accumulates it."""


def _accumulated_in(loop: PipelinedLoop) -> dict[ResultOnRank, Var]:
    """Maps each result of the body, on each of its ranks, to the result of the loop."""
    results = zip(variables(loop.body.outputs), loop.output_ranks, strict=True)
    return dict(zip(results, loop.outputs, strict=True))


def _init_tasks(loop: PipelinedLoop, loop_index: int) -> Iterator[RunTask]:
    """Yields one task per rank that creates its accumulators, with their initial values."""
    results = _accumulated_in(loop)
    reductions = dict(zip(results, loop.reductions, strict=True))
    by_rank: dict[int, list[ResultOnRank]] = {}
    for ranks, stage in zip(loop.stage_ranks, loop.stages, strict=True):
        for rank in ranks:
            for task in stage.tasks.values():
                by_rank.setdefault(rank, []).extend((v, rank) for v in task.accumulators)
    for rank, accumulated in sorted(by_rank.items()):
        if accumulated:
            starts = [reductions[result] for result in accumulated]
            outputs = tuple(Var(reduction.aval) for reduction in starts)
            eqns = tuple(
                Eqn(PrimitiveCall("start", partial(_init_accumulator, reduction)), (), (output,))
                for reduction, output in zip(starts, outputs, strict=True)
            )
            writes = tuple(Buffer(results[result], 0) for result in accumulated)
            yield RunTask(rank, "start", Graph((), eqns, outputs), (), writes, loop=loop_index)


def _init_accumulator(reduction: Reduction) -> list[jax.Array]:
    return [reduction.init()]


def _tasks_of_schedule(loop: PipelinedLoop, loop_index: int) -> Iterator[RunTask]:
    """Yields the tasks of a loop, in a topological order of its schedule."""
    invariants = {
        invariant: Buffer(atom)
        for invariant, atom in zip(loop.invariants, loop.inputs, strict=True)
        if isinstance(atom, Var)
    }
    results = _accumulated_in(loop)
    num_updates = dict.fromkeys(results, 0)

    def run_task(rank: int, action: Action) -> RunTask:
        part, microbatch = loop.part_of(action), action.microbatch
        task = loop.stages[part].tasks[action.op]
        accumulated = [(value, rank) for value in task.accumulators]
        reads = [invariants.get(value, Buffer(value, microbatch)) for value in task.reads]
        reads += [Buffer(results[result], num_updates[result]) for result in accumulated]
        writes = [Buffer(value, microbatch) for value in task.writes]
        for result in accumulated:
            num_updates[result] += 1
            is_last = num_updates[result] == len(loop.microbatches[part, rank])
            writes.append(Buffer(results[result], None if is_last else num_updates[result]))
        return RunTask(
            rank=rank,
            name=str(Task.of(action)),
            graph=task.graph,
            reads=tuple(reads),
            writes=tuple(writes),
            actions=(action,),
            loop=loop_index,
        )

    for rank, scheduled in language.topological_order(loop.schedule):
        for action in language.actions_of(scheduled):
            stage = loop.stages[loop.part_of(action)]
            for part in _split_action(action, stage):
                if part.op in stage.tasks:
                    yield run_task(rank, part)


def _split_action(action: Action, stage: Stage) -> list[Action]:
    """Returns I and W in place of a whole backward, if the stage has only these two tasks."""
    if action.op is Op.B and Op.B not in stage.tasks:
        return [replace(action, op=op) for op in (Op.I, Op.W)]
    return [action]
