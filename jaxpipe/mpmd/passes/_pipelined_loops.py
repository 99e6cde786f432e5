"""Splits the loops of a traced function into tasks, after hoisting invariant equations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from ...ir.graph import (
    Atom,
    Eqn,
    Graph,
    PrimitiveCall,
    Var,
    free_variables,
    has_print,
    is_move,
    to_graph,
    variables,
)
from ...schedules import Op, Schedule, language
from ..ir._eqns import ADD, aval_of, is_mark, substitute_inputs, with_outputs
from ..ir._reduce import Last, ReduceOp, Reduction, is_add, reductions
from ._accumulators import accumulator_spec, constrained_results
from ._fingerprint import ValueNumbering, is_barrier
from ._split_stages import cut_into_stages
from ._tasks import StageTask, split_into_tasks
from ._unroll_scans import check_reachable, is_loop, unroll_scans

PIPELINED_LOOP = "pipelined_loop"


@dataclass(frozen=True, eq=False)
class PipelinedLoop:
    """A loop over microbatches that is split into tasks.

    Attributes:
        schedule: The order of actions on every rank.
        invariants: The inputs of the body that are the same for every microbatch.
        index: The input of the body that is the index of the microbatch.
        tasks: [num_stages] the tasks of each stage.
        reductions: How each share of a result is accumulated, in the order of the loop's outputs.
        specs: The specs, within a group, of those shares whose sharding the user constrains.
    """

    schedule: Schedule
    invariants: tuple[Var, ...]
    index: Var
    tasks: tuple[Mapping[Op, StageTask], ...]
    reductions: Mapping[Var, Reduction]
    specs: Mapping[Var, PartitionSpec]


def loop_of(eqn: Eqn) -> PipelinedLoop | None:
    """Returns the loop of an equation, None if it is no pipelined loop."""
    operation = eqn.operation
    if isinstance(operation, PrimitiveCall) and operation.name == PIPELINED_LOOP:
        return operation.params["loop"]
    return None


def loop_results(outer: Graph) -> list[Var]:
    """Returns the outputs of all loops: accumulators, equally sharded in all their versions."""
    return [value for eqn in outer.eqns if loop_of(eqn) is not None for value in eqn.outputs]


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
    outer = unroll_scans(outer)
    check_reachable(outer, "the function")
    eqns: list[Eqn] = []
    known: dict[Var, Atom] = {}
    for eqn in outer.eqns:
        (eqn,) = substitute_inputs([eqn], known)
        if is_loop(eqn):
            eqns += _pipeline_loop(eqn, schedule_of, known)
        else:
            if is_mark(eqn):
                raise ValueError(
                    "A stage is marked outside of a loop over microbatches. Call `treduce` around "
                    "it, or use `mpmd_jit_by_yield` for a function that has no loop."
                )
            eqns.append(eqn)
    return with_outputs(outer, eqns, known)


def _pipeline_loop(
    eqn: Eqn, schedule_of: Callable[[Any, int], Schedule], known: dict[Var, Atom]
) -> list[Eqn]:
    """Returns the equations that replace a loop, and maps results that need none in `known`."""
    assert isinstance(eqn.operation, PrimitiveCall)
    params = eqn.operation.params
    count = params["num_microbatches"]
    schedule = schedule_of(params["schedule"], count)
    whole = to_graph(params["jaxpr"], prints=True)
    check_reachable(whole, "a stage")
    before, body, inputs = _hoist_invariants(whole, eqn.inputs)
    eqn, body, operations = _drop_invariant_results(eqn, body, inputs, known)
    adds = list(map(is_add, operations))
    body, constraints = constrained_results(body, adds)
    with_dead_code = partial(to_graph, params["jaxpr"], keep_dead=True, prints=True)
    staged = cut_into_stages(body, schedule.num_stages, adds, with_dead_code)
    each = reductions([aval_of(atom) for atom in body.outputs], operations, count)
    shares = {
        share: reduction
        for shares, reduction in zip(staged.shares, each, strict=True)
        for share in shares
    }
    specs = {
        share: spec
        for shares, reduction, constraint in zip(staged.shares, each, constraints, strict=True)
        for share in shares
        if (spec := accumulator_spec(constraint, reduction)) is not None
    }
    splits = language.splits_backwards(schedule)
    tasks = tuple(
        split_into_tasks(stage, body=body, reductions=shares, splits=splits)
        for stage in staged.stages
    )
    if not any(op is not Op.F for of_stage in tasks for op in of_stage):
        schedule = language.forward_only(schedule)
    loop = PipelinedLoop(schedule, body.inputs[:-1], body.inputs[-1], tasks, shares, specs)
    outputs = {share: Var(reduction.aval) for share, reduction in shares.items()}
    for result, of_result in zip(eqn.outputs, staged.shares, strict=True):
        if len(of_result) == 1:
            outputs[of_result[0]] = result
    operation = PrimitiveCall(PIPELINED_LOOP, _refuse_to_run, {"loop": loop})
    pipelined = Eqn(operation, tuple(inputs), tuple(outputs.values()))
    sums = [
        added
        for result, of_result in zip(eqn.outputs, staged.shares, strict=True)
        for added in _sum_eqns([outputs[share] for share in of_result], result)
    ]
    return [*before, pipelined, *sums]


def _drop_invariant_results(
    eqn: Eqn, body: Graph, inputs: Sequence[Atom], known: dict[Var, Atom]
) -> tuple[Eqn, Graph, list[ReduceOp]]:
    """Returns the loop without the results that its only microbatch returns unchanged.

    `known` maps these results to the inputs of the loop, so that they stay on the groups that
    hold them.
    """
    assert isinstance(eqn.operation, PrimitiveCall)
    loop_inputs = dict(zip(body.inputs[:-1], inputs, strict=True))
    kept = []
    for result, output, operation in zip(
        eqn.outputs, body.outputs, eqn.operation.params["operations"], strict=True
    ):
        if operation is Last and isinstance(output, Var) and output in loop_inputs:
            known[result] = loop_inputs[output]
        else:
            kept.append((result, output, operation))
    results, outputs, operations = zip(*kept, strict=True) if kept else ((), (), ())
    return replace(eqn, outputs=results), replace(body, outputs=outputs), list(operations)


def _refuse_to_run(*inputs: Any) -> Sequence[Any]:
    raise AssertionError("a pipelined loop runs as tasks")


def _sum_eqns(shares: Sequence[Var], result: Var) -> list[Eqn]:
    """Returns the additions that compute `result` from its shares; none for a single share."""
    eqns, total = [], shares[0]
    for i, share in enumerate(shares[1:], 1):
        new = result if i == len(shares) - 1 else Var(result.aval)
        eqns.append(Eqn(ADD, (total, share), (new,)))
        total = new
    return eqns


def _hoist_invariants(body: Graph, inputs: Sequence[Atom]) -> tuple[list[Eqn], Graph, list[Var]]:
    """Hoists invariant equations, such as casts of weights, out of the loop.

    Hoists an equation only if its outputs are no larger than its inputs. Equations without inputs,
    prints and pure data movement (reshape, transpose) stay in the loop: hoisting a data movement
    would keep an extra array alive.

    Returns:
        The equations before the loop, the body of the loop, and the inputs of the body.
    """
    index = body.inputs[-1]
    known: dict[Var, Atom] = dict(zip(body.inputs[:-1], inputs, strict=True))
    numbers, first = ValueNumbering(body.inputs), {}
    before: list[Eqn] = []
    inside: list[Eqn] = []
    invariant = set(known)
    for eqn in body.eqns:
        number = numbers.of_step(eqn)
        (out,) = substitute_inputs([eqn], known)
        if not _can_hoist(eqn, invariant):
            inside.append(out)
        elif is_barrier(eqn):
            known.update(zip(eqn.outputs, out.inputs, strict=True))
            invariant.update(eqn.outputs)
        else:
            if number not in first:
                first[number] = out.outputs
                before.append(out)
            known.update(zip(eqn.outputs, first[number], strict=True))
            invariant.update(eqn.outputs)
    renewed = with_outputs(body, inside, known)
    before, inside = _sink_data_movement(before, renewed)
    given = [v for v in free_variables(inside, renewed.outputs) if v is not index]
    return before, replace(renewed, inputs=(*given, index), eqns=tuple(inside)), given


def _can_hoist(eqn: Eqn, invariant: set[Var]) -> bool:
    """Returns whether an equation may be hoisted."""
    given = variables(eqn.inputs)
    if not given or is_mark(eqn) or has_print(eqn) or not invariant.issuperset(given):
        return False
    size = sum(value.num_bytes for value in eqn.outputs)
    return size <= sum(value.num_bytes for value in given)


def _sink_data_movement(before: Sequence[Eqn], body: Graph) -> tuple[list[Eqn], list[Eqn]]:
    """Returns the hoisted equations and the body, with pure data movement back in the body.

    A reshaped weight outside of the loop would be an additional array in memory. Inside the body,
    the reshape fuses with the equation that reads it.
    """
    inside = list(body.eqns)
    needed = set(free_variables(inside, body.outputs))
    read_outside: set[Var] = set()  # values that the hoisted equations read
    hoisted: list[Eqn] = []
    for eqn in reversed(before):
        is_inside = needed.intersection(eqn.outputs) and is_move(eqn) and not _is_cast(eqn)
        if is_inside:
            inside.insert(0, eqn)
            needed.update(variables(eqn.inputs))
        if not is_inside or read_outside.intersection(eqn.outputs):
            hoisted.insert(0, eqn)
            read_outside.update(variables(eqn.inputs))
    return hoisted, inside


def _is_cast(eqn: Eqn) -> bool:
    operation = eqn.operation
    return isinstance(operation, PrimitiveCall) and operation.name == "convert_element_type"
