"""Splits a stage into tasks: its forward, and its backward whole or in two halves.

Tasks pass residuals to later tasks. These are the fewest bytes from which a later task can compute
the remaining values at little cost: see `ir.partition`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...ir._accumulate import accumulate
from ...ir._cost import is_light
from ...ir._graph import Eqn, Graph, PrimitiveCall, Var, free_variables, has_print, variables
from ...ir._partition import partition
from ...schedules import Op
from ..ir._reduce import Total
from ._split_stages import Stage

Kind = Any


@dataclass(frozen=True)
class Task:
    """A program that runs once per microbatch.

    Attributes:
        program: `(reads, sums so far) -> (writes, new sums)`.
        reads: The values it reads: invariants of the loop, the index of the microbatch, and values
            that other tasks wrote for the same microbatch.
        writes: The values it computes for other tasks.
        sums: The shares of results to which it adds.
    """

    program: Graph
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    sums: tuple[Var, ...]


def tasks_of(
    stage: Stage, *, body: Graph, totals: Mapping[Var, Total], splits: bool
) -> dict[Op, Task]:
    """Splits a stage into tasks; a task without outputs is left out.

    Args:
        stage: The stage to split.
        body: The body of the loop. Its inputs are available to every task.
        totals: How each share of a result is accumulated.
        splits: Whether the schedule splits backwards into I and W.

    Returns:
        The tasks by operation: F, and B or I and W.
    """
    program, index = stage.program, body.inputs[-1]
    always = set(body.inputs)
    forward = [value not in stage.backward for value in program.outputs]
    kinds: list[Kind] = [
        "free" if value in always else ("own" if value in stage.backward else "kept")
        for value in program.inputs
    ]
    halves = partition(program, forward, kinds)
    parts = {Op.F: halves.first}
    if not all(forward):
        if splits:
            parts |= _halves_of_backward(halves.second, stage, always)
        else:
            parts[Op.B] = halves.second
    tasks = {op: _task(part, totals, index) for op, part in parts.items()}
    return {op: task for op, task in tasks.items() if task.writes or task.sums}


def _halves_of_backward(backward: Graph, stage: Stage, always: set[Var]) -> dict[Op, Graph]:
    """Splits a backward into the gradients of activations (I) and the gradients of weights (W)."""
    shown = _shown_at_once(backward, stage.handed_on)
    first = [value in stage.handed_on or value in shown for value in backward.outputs]
    kinds: list[Kind] = [
        "free" if value in always else ("gone" if value in stage.backward else "kept")
        for value in backward.inputs
    ]
    halves = partition(backward, first, kinds)
    return {Op.I: halves.first, Op.W: halves.second}


def _shown_at_once(backward: Graph, handed_on: frozenset[Var]) -> set[Var]:
    """Returns the tokens of prints whose operands I computes anyway; these print in I."""
    needed = handed_on.intersection(variables(backward.outputs))
    if not needed:
        return set()
    computed: set[Eqn] = set()
    wanted = set(needed)
    for step in reversed(backward.steps):
        if wanted.intersection(step.outputs):
            computed.add(step)
            wanted.update(variables(step.inputs))
    shown: set[Var] = set()
    has = set(backward.inputs)
    for step in backward.steps:
        ready = has.issuperset(variables(step.inputs))
        if step in computed or (ready and is_light(step)):
            has.update(step.outputs)
        if has_print(step) and (step in computed or ready):
            shown.update(step.outputs)
    return shown.difference(handed_on)


def _task(program: Graph, totals: Mapping[Var, Total], index: Var) -> Task:
    """Returns a task that adds each gradient in place to its sum, where it is computed."""
    made = set(variables(program.outputs)).difference(program.inputs)
    outputs = [value for value in dict.fromkeys(variables(program.outputs)) if value in made]
    writes = tuple(value for value in outputs if value not in totals)
    results = [value for value in outputs if value in totals]
    adds = [v for v in results if totals[v].adds]
    others = [v for v in results if not totals[v].adds]

    starts = {value: Var(totals[value].aval) for value in others}
    ends = {value: Var(totals[value].aval) for value in others}
    updates = [
        Eqn(
            PrimitiveCall("with_result", partial(_updated, totals[v])),
            (starts[v], v, index),
            (ends[v],),
        )
        for v in others
    ]
    inputs = tuple(dict.fromkeys((*program.inputs, index)))
    inner = Graph(
        (*inputs, *starts.values()), (*program.steps, *updates), (*writes, *ends.values(), *adds)
    )
    is_added = [False] * (len(writes) + len(ends)) + [True] * len(adds)
    added = accumulate(inner, is_added)
    used = set(free_variables(added.steps, added.outputs))
    reads = tuple(value for value in inputs if value in used)
    sums = added.inputs[len(inputs) :]
    whole = Graph((*reads, *sums), added.steps, added.outputs)
    return Task(whole, reads, writes, (*others, *adds))


def _updated(total: Total, so_far: Any, new: Any, i: Any) -> list[Any]:
    return [total.with_result(so_far, new, i)]
