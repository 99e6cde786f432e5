"""Lowers a function with assigned ranks to a list of runs: outer programs, and loops by action."""

from collections.abc import Iterator, Mapping
from functools import partial

import jax

from ...ir._graph import Eqn, Graph, PrimitiveCall, Var
from ...schedules import Action, Op, language
from ..ir._program import Buffer, Code, Run
from ..ir._reduce import Total
from ._assign_ranks import Placement, rank_of_stage
from ._outer_fragments import segments
from ._pipelined_loops import PipelinedLoop, loop_of
from ._tasks import Task


def emit(outer: Graph, placement: Placement, num_ranks: int) -> Code:
    """Returns the runs of all ranks, without transfers.

    Args:
        outer: A function whose loops are split into tasks. None of its outputs is a constant.
        placement: The ranks of its equations and values.
        num_ranks: Number of pipeline ranks.

    Returns:
        A program of `Run` instructions, in an order in which each one follows those it reads from.
    """
    runs, loops = segments(outer, placement), [s for s in outer.steps if loop_of(s) is not None]
    instructions: list[Run] = list(runs[0])
    indices: dict[Buffer, int] = {}
    for step, after in zip(loops, runs[1:], strict=True):
        loop = loop_of(step)
        assert loop is not None
        count = loop.schedule.num_microbatches
        indices |= {Buffer(loop.index, m): m for m in range(count)}
        instructions += [*_starts(loop, step), *_actions(loop, step), *after]
    outputs = []
    for atom in outer.outputs:
        assert isinstance(atom, Var), "constants were copied"
        outputs.append((Buffer(atom), placement.needed_on[atom]))
    inputs = tuple((Buffer(value), placement.needed_on[value]) for value in outer.inputs)
    return Code(num_ranks, inputs, tuple(outputs), indices, tuple(instructions))


def _starts(loop: PipelinedLoop, step: Eqn) -> Iterator[Run]:
    """Yields one program per rank that creates its accumulators, with their initial values."""
    results = dict(zip(loop.totals, step.outputs, strict=True))
    by_rank: dict[int, list[Var]] = {}
    for stage, tasks in enumerate(loop.tasks):
        for task in tasks.values():
            by_rank.setdefault(rank_of_stage(loop, stage), []).extend(task.sums)
    for rank, shares in sorted(by_rank.items()):
        if shares:
            steps = tuple(_start(loop.totals[share]) for share in shares)
            outputs = tuple(step.outputs[0] for step in steps)
            writes = tuple(Buffer(results[share], 0) for share in shares)
            yield Run(rank, "start", Graph((), steps, outputs), (), writes)


def _start(total: Total) -> Eqn:
    return Eqn(PrimitiveCall("start", partial(_started, total)), (), (Var(total.aval),))


def _started(total: Total) -> list[jax.Array]:
    return [total.start()]


def name_of(action: Action) -> str:
    """Returns the name of a task as JaxPP writes it: operation, stage, microbatch (`fwd_0__3`)."""
    what = {Op.F: "fwd", Op.B: "bwd", Op.I: "bwd_i", Op.W: "bwd_w"}[action.op]
    return f"{what}_{action.stage}__{action.microbatch}"


def _actions(loop: PipelinedLoop, step: Eqn) -> Iterator[Run]:
    """Yields the runs of a loop, in a topological order of its schedule."""
    outside = {
        invariant: Buffer(atom)
        for invariant, atom in zip(loop.invariants, step.inputs, strict=True)
        if isinstance(atom, Var)
    }
    results = dict(zip(loop.totals, step.outputs, strict=True))
    versions = dict.fromkeys(results, 0)
    for rank, of_rank in language.topological_order(loop.schedule):
        for action in language.actions_of(of_rank):
            for part in _parts(action, loop.tasks[action.stage]):
                task = loop.tasks[action.stage].get(part.op)
                if task is not None:
                    yield _run(rank, part, task, loop, outside, results, versions)


def _parts(action: Action, tasks: Mapping[Op, Task]) -> list[Action]:
    """Returns I and W in place of a whole backward, if the stage has only these two tasks."""
    if action.op is Op.B and Op.B not in tasks:
        return [Action(action.stage, op, action.microbatch) for op in (Op.I, Op.W)]
    return [action]


def _run(
    rank: int,
    action: Action,
    task: Task,
    loop: PipelinedLoop,
    outside: Mapping[Var, Buffer],
    results: Mapping[Var, Var],
    versions: dict[Var, int],
) -> Run:
    microbatch = action.microbatch
    reads = [outside.get(value, Buffer(value, microbatch)) for value in task.reads]
    reads += [Buffer(results[share], versions[share]) for share in task.sums]
    writes = [Buffer(value, microbatch) for value in task.writes]
    for share in task.sums:
        versions[share] += 1
        is_last = versions[share] == loop.schedule.num_microbatches
        writes.append(Buffer(results[share], None if is_last else versions[share]))
    return Run(rank, name_of(action), task.program, tuple(reads), tuple(writes), (action,))
