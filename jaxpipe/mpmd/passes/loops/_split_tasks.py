"""Pass 5, `split_tasks`: splits every stage into its forward and its backward, whole or in halves.

Before: loops whose stages are one program each, forward and backward together.

After: loops whose stages have a `StageTask` for F, and for B or, if the schedule splits backwards,
for I and W. A task adds its gradients to the accumulators in place. A loop that has no backward has
the forwards of its schedule only.

Why here: what a stage computes and which values it sends is known since `cut_stages`. The ranks
of a loop's results are those of the tasks that accumulate them, which `assign_ranks` reads.

Tasks pass residuals to later tasks. These are the fewest bytes from which a later task can compute
the remaining values at little cost: see `jaxpipe.ir.transforms.partition`.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

from ....ir.graph import (
    Eqn,
    Graph,
    PrimitiveCall,
    Var,
    free_variables,
    has_print,
    is_light,
    variables,
)
from ....ir.transforms import accumulate, partition
from ....schedules import Op, language
from ...ir._mpmd_graph import MpmdGraph, PipelinedLoop, Stage, StageTask, replace_loops
from ...ir._reduce import Reduction


def split_tasks(graph: MpmdGraph) -> MpmdGraph:
    """Splits the stages of every loop into tasks; a task without outputs is left out."""
    return replace_loops(graph, _split_loop)


def _split_loop(loop: PipelinedLoop) -> Iterator[PipelinedLoop]:
    """Yields the loop with its tasks."""
    reductions = dict(zip(variables(loop.body.outputs), loop.reductions, strict=True))
    splits = language.splits_backwards(loop.schedule)
    stages = tuple(
        replace(stage, tasks=_tasks_of_stage(stage, loop.body, reductions, splits=splits))
        for stage in loop.stages
    )
    schedule = loop.schedule
    if not any(op is not Op.F for stage in stages for op in stage.tasks):
        schedule = language.forward_only(schedule)
    yield replace(loop, stages=stages, schedule=schedule)


def _tasks_of_stage(
    stage: Stage, body: Graph, reductions: Mapping[Var, Reduction], *, splits: bool
) -> dict[Op, StageTask]:
    """Returns the tasks of a stage."""
    graph, index = stage.graph, body.inputs[-1]
    always = frozenset(body.inputs)
    forward = [value not in stage.backward for value in graph.outputs]
    halves = partition(
        graph,
        forward,
        [
            "recomputable"
            if value in always
            else ("deferred" if value in stage.backward else "saved")
            for value in graph.inputs
        ],
    )
    parts = {Op.F: halves.first}
    if not all(forward):
        if splits:
            parts |= _split_backward(halves.second, stage, always)
        else:
            parts[Op.B] = halves.second
    tasks = {op: _accumulating_task(part, reductions, index) for op, part in parts.items()}
    return {op: task for op, task in tasks.items() if task.writes or task.accumulators}


def _split_backward(backward: Graph, stage: Stage, always: Set[Var]) -> dict[Op, Graph]:
    """Splits a backward into the gradients of activations (I) and the gradients of weights (W)."""
    shown = _prints_in_i(backward, stage.sent)
    first = [value in stage.sent or value in shown for value in backward.outputs]
    halves = partition(
        backward,
        first,
        [
            "recomputable" if v in always else ("dead" if v in stage.backward else "saved")
            for v in backward.inputs
        ],
    )
    return {Op.I: halves.first, Op.W: halves.second}


def _prints_in_i(backward: Graph, sent: frozenset[Var]) -> set[Var]:
    """Returns the tokens of prints whose operands I computes anyway; these print in I."""
    needed = sent.intersection(variables(backward.outputs))
    if not needed:
        return set()
    computed: set[Eqn] = set()
    inputs_of_i = set(needed)
    for eqn in reversed(backward.eqns):
        if inputs_of_i.intersection(eqn.outputs):
            computed.add(eqn)
            inputs_of_i.update(variables(eqn.inputs))
    shown: set[Var] = set()
    has = set(backward.inputs)
    for eqn in backward.eqns:
        ready = has.issuperset(variables(eqn.inputs))
        if eqn in computed or (ready and is_light(eqn)):
            has.update(eqn.outputs)
        if has_print(eqn) and (eqn in computed or ready):
            shown.update(eqn.outputs)
    return shown.difference(sent)


def _accumulating_task(graph: Graph, reductions: Mapping[Var, Reduction], index: Var) -> StageTask:
    """Returns a task that adds each gradient in place to its accumulator, where it is computed."""
    computed = set(variables(graph.outputs)).difference(graph.inputs)
    outputs = [value for value in dict.fromkeys(variables(graph.outputs)) if value in computed]
    writes = tuple(value for value in outputs if value not in reductions)
    results = [value for value in outputs if value in reductions]
    adds = [v for v in results if reductions[v].adds]
    folded = [v for v in results if not reductions[v].adds]

    starts = {value: Var(reductions[value].aval) for value in folded}
    ends = {value: Var(reductions[value].aval) for value in folded}
    updates = [
        Eqn(
            PrimitiveCall("with_result", partial(_accumulate_result, reductions[v])),
            (starts[v], v, index),
            (ends[v],),
        )
        for v in folded
    ]
    inputs = tuple(dict.fromkeys((*graph.inputs, index)))
    inner = Graph(
        (*inputs, *starts.values()), (*graph.eqns, *updates), (*writes, *ends.values(), *adds)
    )
    is_added = [False] * (len(writes) + len(ends)) + [True] * len(adds)
    added = accumulate(inner, is_added)
    used = set(free_variables(added.eqns, added.outputs))
    reads = tuple(value for value in inputs if value in used)
    accumulators = added.inputs[len(inputs) :]
    whole = Graph((*reads, *accumulators), added.eqns, added.outputs)
    return StageTask(whole, reads, writes, (*folded, *adds))


def _accumulate_result(reduction: Reduction, so_far: Any, new: Any, i: Any) -> list[Any]:
    return [reduction.update(so_far, new, i)]
