"""Pass 3, `hoist_invariants`: moves equations that no microbatch changes out of the loops.

Before: loops whose bodies have every equation that the user wrote in them.

After: loops without equations that read invariants of the loop only, such as casts of weights. They
run once, before the loop. The inputs of a body are the variables outside of the loop themselves.
A result that the only microbatch of a loop returns unchanged is no result of the loop any more.

Why here: as long as a body is one graph, an equation is hoisted once, whatever stages read its
outputs. After `cut_stages` it would be a part of several stages.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ....ir.graph import Atom, Eqn, Graph, Var, free_variables, has_print, is_move, variables
from ...ir._eqns import is_cast, is_mark, substitute_inputs, with_outputs
from ...ir._fingerprint import ValueNumbering, is_barrier
from ...ir._mpmd_graph import MpmdGraph, PipelinedLoop
from ...ir._reduce import Last


def hoist_invariants(graph: MpmdGraph) -> MpmdGraph:
    """Hoists invariant equations, such as casts of weights, out of every loop.

    Hoists an equation only if its outputs are no larger than its inputs. Equations without inputs,
    prints and pure data movement (reshape, transpose) stay in the loop: hoisting a data movement
    would keep an extra array alive.
    """
    nodes: list[Eqn | PipelinedLoop] = []
    replacements: dict[Var, Atom] = {}
    for node in graph.eqns:
        (node,) = substitute_inputs([node], replacements)
        if isinstance(node, PipelinedLoop):
            before, loop = _hoist_from(node)
            nodes += [*before, _drop_invariant_results(loop, replacements)]
        else:
            nodes.append(node)
    return with_outputs(graph, nodes, replacements)


def _hoist_from(loop: PipelinedLoop) -> tuple[list[Eqn], PipelinedLoop]:
    """Returns the equations that are hoisted out of a loop, and the loop without them."""
    body, index = loop.body, loop.index
    replacements: dict[Var, Atom] = dict(zip(loop.invariants, loop.inputs, strict=True))
    value_ids = ValueNumbering(body.inputs)
    first: dict[tuple[Hashable, ...], tuple[Var, ...]] = {}  # outputs of hoisted equations
    before: list[Eqn] = []
    inside: list[Eqn] = []
    invariant = set(replacements)
    for eqn in body.eqns:
        output_ids = value_ids.add(eqn)
        (out,) = substitute_inputs([eqn], replacements)
        if not _can_hoist(eqn, invariant):
            inside.append(out)
        elif is_barrier(eqn):
            replacements.update(zip(eqn.outputs, out.inputs, strict=True))
            invariant.update(eqn.outputs)
        else:
            if output_ids not in first:
                first[output_ids] = out.outputs
                before.append(out)
            replacements.update(zip(eqn.outputs, first[output_ids], strict=True))
            invariant.update(eqn.outputs)
    renewed = with_outputs(body, inside, replacements)
    before, inside = _sink_data_movement(before, renewed)
    inputs = tuple(v for v in free_variables(inside, renewed.outputs) if v is not index)
    body = replace(renewed, inputs=(*inputs, index), eqns=tuple(inside))
    return before, replace(loop, inputs=inputs, body=body)


def _drop_invariant_results(loop: PipelinedLoop, replacements: dict[Var, Atom]) -> PipelinedLoop:
    """Returns the loop without the results that its only microbatch returns unchanged.

    `replacements` maps these results to the inputs of the loop, so that they stay on the groups
    that hold them.
    """
    kept = []
    for i, (result, output) in enumerate(zip(loop.outputs, loop.body.outputs, strict=True)):
        is_unchanged = isinstance(output, Var) and output in loop.invariants
        if loop.reductions[i].operation is Last and is_unchanged:
            replacements[result] = output
        else:
            kept.append(i)
    return replace(
        loop,
        outputs=tuple(loop.outputs[i] for i in kept),
        body=replace(loop.body, outputs=tuple(loop.body.outputs[i] for i in kept)),
        reductions=tuple(loop.reductions[i] for i in kept),
        specs=tuple(loop.specs[i] for i in kept),
    )


def _can_hoist(eqn: Eqn, invariant: set[Var]) -> bool:
    """Returns whether an equation may be hoisted."""
    operands = variables(eqn.inputs)
    if not operands or is_mark(eqn) or has_print(eqn) or not invariant.issuperset(operands):
        return False
    size = sum(value.num_bytes for value in eqn.outputs)
    return size <= sum(value.num_bytes for value in operands)


def _sink_data_movement(before: Sequence[Eqn], body: Graph) -> tuple[list[Eqn], list[Eqn]]:
    """Returns the hoisted equations and those of the body, with pure data movement in the body.

    A reshaped weight outside of the loop would be an additional array in memory. Inside the body,
    the reshape fuses with the equation that reads it.
    """
    inside = list(body.eqns)
    needed = set(free_variables(inside, body.outputs))
    read_outside: set[Var] = set()  # values that the hoisted equations read
    hoisted: list[Eqn] = []
    for eqn in reversed(before):
        is_inside = needed.intersection(eqn.outputs) and is_move(eqn) and not is_cast(eqn)
        if is_inside:
            inside.insert(0, eqn)
            needed.update(variables(eqn.inputs))
        if not is_inside or read_outside.intersection(eqn.outputs):
            hoisted.insert(0, eqn)
            read_outside.update(variables(eqn.inputs))
    return hoisted, inside
