"""Splits the loops of a traced function into tasks, after hoisting invariant equations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from ... import schedules
from ...ir._cost import is_move
from ...ir._graph import (
    Atom,
    Eqn,
    Graph,
    PrimitiveCall,
    Var,
    free_variables,
    has_print,
    to_graph,
    variables,
)
from ...schedules import Op, Schedule, language
from ..ir._reduce import Last, Total, is_add, totals
from ..ir._reduce import Op as Operation
from ..ir._steps import ADD, aval_of, substituted, with_outputs
from ._accumulators import constrained_results, spec_of_total
from ._fingerprint import Numbers, is_barrier
from ._split_stages import cut_into_stages, is_mark
from ._tasks import Task, tasks_of
from ._unroll_scans import check_reachable, is_loop, unrolled

LOOP = "pipelined_loop"


@dataclass(frozen=True, eq=False)
class PipelinedLoop:
    """A loop over microbatches that is split into tasks.

    Attributes:
        schedule: The order of actions on every rank.
        invariants: The inputs of the body that are the same for every microbatch.
        index: The input of the body that is the index of the microbatch.
        tasks: [num_stages] the tasks of each stage.
        totals: How each share of a result is accumulated, in the order of the loop's outputs.
        specs: The specs, within a group, of those shares whose sharding the user constrains.
    """

    schedule: Schedule
    invariants: tuple[Var, ...]
    index: Var
    tasks: tuple[Mapping[Op, Task], ...]
    totals: Mapping[Var, Total]
    specs: Mapping[Var, PartitionSpec]


def loop_of(step: Eqn) -> PipelinedLoop | None:
    """Returns the loop of an equation, None if it is no pipelined loop."""
    operation = step.operation
    if isinstance(operation, PrimitiveCall) and operation.name == LOOP:
        return operation.params["loop"]
    return None


def loop_results(outer: Graph) -> list[Var]:
    """Returns the outputs of all loops: accumulators, equally sharded in all their versions."""
    return [value for step in outer.steps if loop_of(step) is not None for value in step.outputs]


def pipeline_loops(outer: Graph, schedule_of: Callable[[Any, int], Schedule]) -> Graph:
    """Splits every loop over microbatches into tasks, and adds up the shares of its results.

    Args:
        outer: A traced function.
        schedule_of: `(the user's schedule, num_microbatches) -> schedule`, which it checks.

    Returns:
        The function with a pipelined loop in place of every loop over microbatches.

    Raises:
        ValueError: If a stage is marked outside of a loop, or if a loop or a mark is inside another
            construct, such as `lax.cond`.
    """
    outer = unrolled(outer)
    check_reachable(outer, "the function")
    steps: list[Eqn] = []
    known: dict[Var, Atom] = {}
    for step in outer.steps:
        (step,) = substituted([step], known)
        if is_loop(step):
            steps += _pipelined(step, schedule_of, known)
        else:
            if is_mark(step):
                raise ValueError(
                    "A stage is marked outside of a loop over microbatches. Call `treduce` around "
                    "it, or use `mpmd_jit_by_yield` for a function that has no loop."
                )
            steps.append(step)
    return with_outputs(outer, steps, known)


def _pipelined(
    step: Eqn, schedule_of: Callable[[Any, int], Schedule], known: dict[Var, Atom]
) -> list[Eqn]:
    """Returns the equations that replace a loop, and maps results that need none in `known`."""
    assert isinstance(step.operation, PrimitiveCall)
    params = step.operation.params
    count = params["num_microbatches"]
    schedule = schedule_of(params["schedule"], count)
    whole = to_graph(params["jaxpr"], prints=True)
    check_reachable(whole, "a stage")
    before, body, inputs = _hoisted(whole, step.inputs)
    step, body, operations = _without_invariants(step, body, inputs, known)
    adds = list(map(is_add, operations))
    body, constraints = constrained_results(body, adds)
    written = partial(to_graph, params["jaxpr"], keep_dead=True, prints=True)
    staged = cut_into_stages(body, schedule.num_stages, adds, written)
    each = totals([aval_of(atom) for atom in body.outputs], operations, count)
    shares = {
        share: total for shares, total in zip(staged.shares, each, strict=True) for share in shares
    }
    specs = {
        share: spec
        for shares, total, constraint in zip(staged.shares, each, constraints, strict=True)
        for share in shares
        if (spec := spec_of_total(constraint, total)) is not None
    }
    splits = language.splits_backwards(schedule)
    tasks = tuple(
        tasks_of(stage, body=body, totals=shares, splits=splits) for stage in staged.stages
    )
    if not any(op is not Op.F for of_stage in tasks for op in of_stage):
        schedule = schedules.forward_only(schedule)
    loop = PipelinedLoop(schedule, body.inputs[:-1], body.inputs[-1], tasks, shares, specs)
    outputs = {share: Var(total.aval) for share, total in shares.items()}
    for result, of_result in zip(step.outputs, staged.shares, strict=True):
        if len(of_result) == 1:
            outputs[of_result[0]] = result
    operation = PrimitiveCall(LOOP, _never, {"loop": loop})
    pipelined = Eqn(operation, tuple(inputs), tuple(outputs.values()))
    sums = [
        added
        for result, of_result in zip(step.outputs, staged.shares, strict=True)
        for added in _sum_of([outputs[share] for share in of_result], result)
    ]
    return [*before, pipelined, *sums]


def _without_invariants(
    step: Eqn, body: Graph, inputs: Sequence[Atom], known: dict[Var, Atom]
) -> tuple[Eqn, Graph, list[Operation]]:
    """Returns the loop without the results that its only microbatch returns unchanged.

    `known` maps these results to the inputs of the loop, so that they stay on the groups that
    hold them.
    """
    assert isinstance(step.operation, PrimitiveCall)
    outside = dict(zip(body.inputs[:-1], inputs, strict=True))
    kept = []
    for result, output, operation in zip(
        step.outputs, body.outputs, step.operation.params["operations"], strict=True
    ):
        if operation is Last and isinstance(output, Var) and output in outside:
            known[result] = outside[output]
        else:
            kept.append((result, output, operation))
    results, outputs, operations = zip(*kept, strict=True) if kept else ((), (), ())
    return replace(step, outputs=results), replace(body, outputs=outputs), list(operations)


def _never(*inputs: Any) -> Sequence[Any]:
    raise AssertionError("a loop in tasks runs on ranks")


def _sum_of(shares: Sequence[Var], result: Var) -> list[Eqn]:
    """Returns the additions that compute `result` from its shares; none for a single share."""
    steps, total = [], shares[0]
    for i, share in enumerate(shares[1:], 1):
        new = result if i == len(shares) - 1 else Var(result.aval)
        steps.append(Eqn(ADD, (total, share), (new,)))
        total = new
    return steps


def _hoisted(body: Graph, inputs: Sequence[Atom]) -> tuple[list[Eqn], Graph, list[Var]]:
    """Hoists invariant equations, such as casts of weights, out of the loop.

    Hoists an equation only if its outputs are no larger than its inputs. Equations without inputs,
    prints and pure data movement (reshape, transpose) stay in the loop: hoisting a data movement
    would keep an extra array alive.

    Returns:
        The equations before the loop, the body of the loop, and the inputs of the body.
    """
    index = body.inputs[-1]
    known: dict[Var, Atom] = dict(zip(body.inputs[:-1], inputs, strict=True))
    numbers, first = Numbers(body.inputs), {}
    before: list[Eqn] = []
    inside: list[Eqn] = []
    invariant = set(known)
    for step in body.steps:
        number = numbers.of_step(step)
        (out,) = substituted([step], known)
        if not _can_come_out(step, invariant):
            inside.append(out)
        elif is_barrier(step):
            known.update(zip(step.outputs, out.inputs, strict=True))
            invariant.update(step.outputs)
        else:
            if number not in first:
                first[number] = out.outputs
                before.append(out)
            known.update(zip(step.outputs, first[number], strict=True))
            invariant.update(step.outputs)
    renewed = with_outputs(body, inside, known)
    before, inside = _with_moves_inside(before, renewed)
    given = [v for v in free_variables(inside, renewed.outputs) if v is not index]
    return before, replace(renewed, inputs=(*given, index), steps=tuple(inside)), given


def _can_come_out(step: Eqn, invariant: set[Var]) -> bool:
    """Returns whether an equation may be hoisted."""
    given = variables(step.inputs)
    if not given or is_mark(step) or has_print(step) or not invariant.issuperset(given):
        return False
    size = sum(value.num_bytes for value in step.outputs)
    return size <= sum(value.num_bytes for value in given)


def _with_moves_inside(before: Sequence[Eqn], body: Graph) -> tuple[list[Eqn], list[Eqn]]:
    """Returns the hoisted equations and the body, with pure data movement back in the body.

    A reshaped weight outside of the loop would be an additional array in memory. Inside the body,
    the reshape fuses with the equation that reads it.
    """
    inside = list(body.steps)
    needed = set(free_variables(inside, body.outputs))
    outside: set[Var] = set()  # values that the hoisted equations read
    stay: list[Eqn] = []
    for step in reversed(before):
        is_inside = needed.intersection(step.outputs) and is_move(step) and not _is_cast(step)
        if is_inside:
            inside.insert(0, step)
            needed.update(variables(step.inputs))
        if not is_inside or outside.intersection(step.outputs):
            stay.insert(0, step)
            outside.update(variables(step.inputs))
    return stay, inside


def _is_cast(step: Eqn) -> bool:
    operation = step.operation
    return isinstance(operation, PrimitiveCall) and operation.name == "convert_element_type"
