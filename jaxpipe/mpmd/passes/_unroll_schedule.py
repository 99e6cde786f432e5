"""Unrolls schedules: writes loops as one task per action, between the fragments outside of them."""

from collections.abc import Iterator, Mapping
from functools import partial

import jax

from ...ir.graph import Eqn, Graph, PrimitiveCall, Var
from ...schedules import Action, Op, language
from ..ir._program import Buffer, MpmdProgram, RunTask
from ..ir._reduce import Reduction
from ._assign_ranks import RankAssignment, rank_of_stage
from ._outer_fragments import outer_fragments
from ._pipelined_loops import PipelinedLoop, loop_of
from ._tasks import StageTask


def unroll_schedule(outer: Graph, assignment: RankAssignment, num_ranks: int) -> MpmdProgram:
    """Returns the tasks of all ranks, without transfers.

    Args:
        outer: A function whose loops are split into tasks. None of its outputs is a constant.
        assignment: The ranks of its equations and values.
        num_ranks: Number of pipeline ranks.

    Returns:
        A program of `RunTask` instructions, in an order in which each one follows those it reads
        from.
    """
    fragments, loops = (
        outer_fragments(outer, assignment),
        [s for s in outer.eqns if loop_of(s) is not None],
    )
    instructions: list[RunTask] = list(fragments[0])
    indices: dict[Buffer, int] = {}
    for eqn, after in zip(loops, fragments[1:], strict=True):
        loop = loop_of(eqn)
        assert loop is not None
        count = loop.schedule.num_microbatches
        indices |= {Buffer(loop.index, m): m for m in range(count)}
        instructions += [*_init_tasks(loop, eqn), *_run_tasks(loop, eqn), *after]
    outputs = []
    for atom in outer.outputs:
        assert isinstance(atom, Var), "constants were copied"
        outputs.append((Buffer(atom), assignment.needed_on[atom]))
    inputs = tuple((Buffer(value), assignment.needed_on[value]) for value in outer.inputs)
    return MpmdProgram(num_ranks, inputs, tuple(outputs), indices, tuple(instructions))


def _init_tasks(loop: PipelinedLoop, eqn: Eqn) -> Iterator[RunTask]:
    """Yields one task per rank that creates its accumulators, with their initial values."""
    results = dict(zip(loop.reductions, eqn.outputs, strict=True))
    by_rank: dict[int, list[Var]] = {}
    for stage, tasks in enumerate(loop.tasks):
        for task in tasks.values():
            by_rank.setdefault(rank_of_stage(loop, stage), []).extend(task.sums)
    for rank, shares in sorted(by_rank.items()):
        if shares:
            eqns = tuple(_init_eqn(loop.reductions[share]) for share in shares)
            outputs = tuple(eqn.outputs[0] for eqn in eqns)
            writes = tuple(Buffer(results[share], 0) for share in shares)
            yield RunTask(rank, "start", Graph((), eqns, outputs), (), writes)


def _init_eqn(reduction: Reduction) -> Eqn:
    return Eqn(
        PrimitiveCall("start", partial(_init_accumulator, reduction)), (), (Var(reduction.aval),)
    )


def _init_accumulator(reduction: Reduction) -> list[jax.Array]:
    return [reduction.init()]


def task_name(action: Action) -> str:
    """Returns the name of a task as JaxPP writes it: operation, stage, microbatch (`fwd_0__3`)."""
    what = {Op.F: "fwd", Op.B: "bwd", Op.I: "bwd_i", Op.W: "bwd_w"}[action.op]
    return f"{what}_{action.stage}__{action.microbatch}"


def _run_tasks(loop: PipelinedLoop, eqn: Eqn) -> Iterator[RunTask]:
    """Yields the tasks of a loop, in a topological order of its schedule."""
    invariants = {
        invariant: Buffer(atom)
        for invariant, atom in zip(loop.invariants, eqn.inputs, strict=True)
        if isinstance(atom, Var)
    }
    results = dict(zip(loop.reductions, eqn.outputs, strict=True))
    versions = dict.fromkeys(results, 0)
    for rank, scheduled in language.topological_order(loop.schedule):
        for action in language.actions_of(scheduled):
            for part in _split_action(action, loop.tasks[action.stage]):
                task = loop.tasks[action.stage].get(part.op)
                if task is not None:
                    yield _run_task(rank, part, task, loop, invariants, results, versions)


def _split_action(action: Action, tasks: Mapping[Op, StageTask]) -> list[Action]:
    """Returns I and W in place of a whole backward, if the stage has only these two tasks."""
    if action.op is Op.B and Op.B not in tasks:
        return [Action(action.stage, op, action.microbatch) for op in (Op.I, Op.W)]
    return [action]


def _run_task(
    rank: int,
    action: Action,
    task: StageTask,
    loop: PipelinedLoop,
    invariants: Mapping[Var, Buffer],
    results: Mapping[Var, Var],
    versions: dict[Var, int],
) -> RunTask:
    microbatch = action.microbatch
    reads = [invariants.get(value, Buffer(value, microbatch)) for value in task.reads]
    reads += [Buffer(results[share], versions[share]) for share in task.sums]
    writes = [Buffer(value, microbatch) for value in task.writes]
    for share in task.sums:
        versions[share] += 1
        is_last = versions[share] == loop.schedule.num_microbatches
        writes.append(Buffer(results[share], None if is_last else versions[share]))
    return RunTask(rank, task_name(action), task.graph, tuple(reads), tuple(writes), (action,))
