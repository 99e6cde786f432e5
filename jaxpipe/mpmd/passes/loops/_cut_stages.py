"""Pass 4, `cut_stages`: cuts the body of every loop at its marks into one program per stage.

Before: loops whose bodies are one graph with marks in it.

After: loops with a `Stage` for each stage of the schedule, which has its forward and its backward.
Marks have no meaning any more: they return their operands. A result that is a sum over stages, such
as the gradient of a weight that several stages use, has become several results of the loop, one for
each of these stages: its shares. The shares are added once, after the loop. A result of a stage
that several ranks run, each for some of the microbatches, has become one result for each of these
ranks, which are combined after the loop. Sharding constraints on summed results of a microbatch
have become specs of the loop's results.

Why here: invariants have been hoisted, so no stage computes what does not depend on the microbatch.
The split into tasks, the next pass, works on one stage at a time.

S is the number of stages. The position of a value says where in the pipeline it is computed: 0 to
S - 1 in the forward, S to 2S - 1 in the backward, so positions p and 2S - 1 - p belong to the same
stage. A value that depends on no value that crosses a mark has no position: weights, the batch, and
values computed from them alone. Such a value is computed in the stages that read it.

If the schedule cuts sequences into s slices, S counts the parts of stages: part `stage * s + slice`
runs one slice. Marks then carry the index of a part, on what it reads of other parts and on what
these read of it. A gradient of a weight passes from the backward of one part to that of the slice
before, and the part of the first slice accumulates it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ....ir.graph import (
    Atom,
    Eqn,
    Graph,
    PrimitiveCall,
    Var,
    aval_of,
    count_uses,
    has_print,
    is_light,
    print_tokens,
    variables,
)
from ....schedules import language
from ...ir._eqns import (
    chain_eqns,
    combine_eqns,
    copy_eqn,
    eliminate_dead_code,
    is_backward_mark,
    is_cast,
    is_sum,
    is_transposed,
    part_of_mark,
    substitute_inputs,
)
from ...ir._mpmd_graph import MpmdGraph, PipelinedLoop, Stage, replace_loops
from ._align_marks import align_marks
from ._constraints import accumulator_spec, constrained_results

Positions = Mapping[Var, int]


def cut_stages(graph: MpmdGraph) -> MpmdGraph:
    """Cuts the body of every loop at its marks, and adds up the shares of its results."""
    return replace_loops(graph, _cut_loop)


def _cut_loop(loop: PipelinedLoop) -> Iterator[Eqn | PipelinedLoop]:
    """Yields the loop with its stages, and the additions of the shares of its results."""
    adds = [reduction.adds for reduction in loop.reductions]
    body, constrained_specs = constrained_results(loop.body, adds)
    num_stages, num_slices = loop.num_parts, loop.num_slices
    # How many parts of a stage hand on one sum. Ws may be in any order.
    num_joined = 1 if language.splits_backwards(loop.schedule) else num_slices
    body, marks = align_marks(body, num_stages, loop.all_mark_ids)
    positions = _positions(body, marks, num_stages, num_slices)
    body, shares_of_results = _split_results(body, positions, adds, num_stages, num_joined)
    positions = _positions(body, marks, num_stages, num_slices)
    stages = tuple(_stages(body, marks, positions, num_stages))
    stage_of = {v: i for i, stage in enumerate(stages) for v in stage.graph.outputs}
    reductions, results, outputs, ranks, specs = [], [], [], [], []
    combinations: list[Eqn] = []
    sums: list[Eqn] = []
    for shares, result, reduction, spec in zip(
        shares_of_results, loop.outputs, loop.reductions, constrained_specs, strict=True
    ):
        own = [result] if len(shares) == 1 else [Var(result.aval) for _ in shares]
        for share, value in zip(shares, own, strict=True):
            stage = stage_of[share]
            on = loop.stage_ranks[stage]
            parts = [value] if len(on) == 1 else [Var(value.aval) for _ in on]
            microbatches = [loop.microbatches[stage, rank] for rank in on]
            combinations += combine_eqns(parts, value, reduction, microbatches)
            outputs += parts
            results += [share] * len(on)
            ranks += on
            reductions += [reduction] * len(on)
            specs += [accumulator_spec(spec, reduction)] * len(on)
        sums += chain_eqns(own, result)
    yield replace(
        loop,
        outputs=tuple(outputs),
        body=replace(body, outputs=tuple(results)),
        reductions=tuple(reductions),
        stages=stages,
        specs=tuple(specs),
        output_ranks=tuple(ranks),
    )
    yield from combinations
    yield from sums


def _positions(
    body: Graph, marks: Mapping[Eqn, int], num_stages: int, num_slices: int
) -> Positions:
    """Returns the positions of all values that depend on a mark."""
    positions: dict[Var, int] = {}
    # Where slices are parts, the backwards of several parts begin with the loss.
    with_loss = range(num_stages - num_slices if num_slices > 1 else num_stages, num_stages)
    for eqn in body.eqns:
        position = max(
            (positions[v] for v in variables(eqn.inputs) if v in positions), default=None
        )
        if eqn in marks:
            stage, ends = marks[eqn], part_of_mark(eqn) is None
            behind = 2 * num_stages - 1 - stage if is_backward_mark(eqn) else stage + ends
            if position is not None and position > behind - ends:
                raise ValueError(
                    f"Mark {stage} is given what comes from behind it. Mark stages in the order "
                    "in which values run through them."
                )
            position = behind
        elif position is not None and position in with_loss and is_transposed(eqn):
            position = 2 * num_stages - 1 - position
        if position is not None:
            positions.update(dict.fromkeys(eqn.outputs, position))
    return positions


def _stage_of(position: int, num_stages: int) -> int:
    return position if position < num_stages else 2 * num_stages - 1 - position


def _split_results(
    body: Graph, positions: Positions, adds: Sequence[bool], num_stages: int, num_joined: int
) -> tuple[Graph, list[list[Var]]]:
    """Returns the body whose outputs are the shares of its results, and those of each result.

    Results are copied or, if they are sums over stages, split into shares.

    The gradient of a weight that several stages use is such a sum. Every stage accumulates its
    share over all microbatches, and the shares are added once, after the loop.
    """
    makers = {value: eqn for eqn in body.eqns for value in eqn.outputs}
    uses = count_uses(body)
    eqns = list(body.eqns)
    positions = dict(positions)

    def terms(atom: Atom) -> list[Atom]:
        eqn = makers.get(atom) if isinstance(atom, Var) else None
        if eqn is None or uses[eqn.outputs[0]] > 1:
            return [atom]
        if is_sum(eqn):
            return [term for part in eqn.inputs for term in terms(part)]
        if is_cast(eqn) and len(parts := terms(eqn.inputs[0])) > 1:
            return [cast(part, eqn) for part in parts]
        return [atom]

    def cast(part: Atom, eqn: Eqn) -> Var:
        # A sum of gradients is cast to float32 before microbatches are summed: each share is.
        new = Var(eqn.outputs[0].aval)
        eqns.append(Eqn(eqn.operation, (part,), (new,)))
        positions[new] = position(part)
        return new

    def position(atom: Atom) -> int:
        return positions.get(atom, 0) if isinstance(atom, Var) else 0

    shares: list[list[Var]] = []
    for output, may_share in zip(body.outputs, adds, strict=True):
        parts: dict[int, list[Atom]] = {}
        for term in terms(output) if may_share else [output]:
            stage = _stage_of(position(term), num_stages)
            parts.setdefault(stage // num_joined, []).append(term)
        if len(parts) == 1 and num_joined == 1:
            parts = {0: [output]}
        shares.append([])
        for atoms in parts.values():
            if num_joined > 1:
                atoms = sorted(atoms, key=position)
            total = Var(aval_of(output))
            eqns += chain_eqns(atoms, total)
            eqns.append(copy_eqn(total if len(atoms) > 1 else atoms[0]))
            shares[-1] += eqns[-1].outputs
    outputs = tuple(value for share in shares for value in share)
    return eliminate_dead_code(Graph(body.inputs, tuple(eqns), outputs)), shares


def _stages_of_eqns(
    body: Graph, marks: Mapping[Eqn, int], positions: Positions, num_stages: int
) -> tuple[dict[Eqn, set[int]], dict[Var, set[int]]]:
    """Returns the stages that run each equation, and the stages that read each value."""
    stages_of: dict[Eqn, set[int]] = {}
    uses: defaultdict[Var, set[int]] = defaultdict(set)
    results = set(body.outputs)
    print_stages = _stages_of_prints(body, marks)
    for eqn in reversed(body.eqns):
        if eqn in marks:
            stages = {marks[eqn] + (is_backward_mark(eqn) and part_of_mark(eqn) is None)}
        elif eqn.outputs[0] in positions:
            stages = {_stage_of(positions[eqn.outputs[0]], num_stages)}
        else:
            stages = set().union(*(uses[value] for value in eqn.outputs))
            if not stages and eqn in print_stages:
                stages = {print_stages[eqn]}
            if not stages:
                assert results.intersection(eqn.outputs)
                stages = {0}
            if len(stages) > 1 and (eqn in print_stages or not _is_cheaper_than_transfer(eqn)):
                stages = {min(stages)}
        stages_of[eqn] = stages
        for value in variables(eqn.inputs):
            uses[value] |= stages
    return stages_of, uses


def _stages_of_prints(body: Graph, marks: Mapping[Eqn, int]) -> dict[Eqn, int]:
    """Returns, for each equation that prints, the stage in which the user wrote it."""
    print_stages: dict[Eqn, int] = {}
    stage = 0
    for eqn in body.eqns:
        if eqn in marks:
            stage = marks[eqn] + (not is_backward_mark(eqn) and part_of_mark(eqn) is None)
        elif has_print(eqn):
            print_stages[eqn] = stage
    return print_stages


_MAX_DUPLICATED_BYTES = 4096


def _is_cheaper_than_transfer(eqn: Eqn) -> bool:
    """Returns whether computing an equation in two stages is cheaper than sending its outputs."""
    if is_light(eqn):
        return True
    moved = [*variables(eqn.inputs), *eqn.outputs]
    num_bytes = sum(v.num_bytes for v in moved)
    return isinstance(eqn.operation, PrimitiveCall) and num_bytes <= _MAX_DUPLICATED_BYTES


def _stages(
    body: Graph, marks: Mapping[Eqn, int], positions: Positions, num_stages: int
) -> Iterator[Stage]:
    """Yields the program of every stage."""
    stages_of, uses = _stages_of_eqns(body, marks, positions, num_stages)
    results = [*variables(body.outputs), *print_tokens(body.eqns)]
    for stage in range(num_stages):
        eqns = [eqn for eqn in body.eqns if stage in stages_of[eqn]]
        values = [(eqn, value) for eqn in eqns for value in eqn.outputs]
        computed = {value for _, value in values}
        sent = [value for eqn, value in values if uses.get(value, set()) - stages_of[eqn]]
        outputs = (*sent, *(value for value in results if value in computed))
        read = (value for eqn in eqns for value in variables(eqn.inputs))
        needed = dict.fromkeys(value for value in read if value not in computed)
        backward = _backward_values(eqns, positions, stage, num_stages)
        backward.update(value for value in needed if positions.get(value, 0) >= num_stages)
        shared = [eqn for eqn in eqns if len(stages_of[eqn]) > 1]
        graph = Graph(tuple(needed), tuple(_with_new_outputs(eqns, shared)), outputs)
        yield Stage(graph, frozenset(backward), frozenset(sent))


def _with_new_outputs(eqns: Sequence[Eqn], shared: Sequence[Eqn]) -> list[Eqn]:
    """Returns the equations of a stage, with new variables for the outputs of shared equations."""
    own: dict[Var, Atom] = {v: Var(v.aval) for eqn in shared for v in eqn.outputs}
    renamed = []
    for eqn in substitute_inputs(eqns, own):
        outputs = tuple(own.get(value, value) for value in eqn.outputs)
        renamed.append(replace(eqn, outputs=outputs))
    return renamed


def _backward_values(
    eqns: Sequence[Eqn], positions: Positions, stage: int, num_stages: int
) -> set[Var]:
    """Returns the values of a stage that belong to its backward.

    The last stage has no backward mark. Its backward begins at the equations that JAX transposed.
    """
    backward: set[Var] = set()
    is_last = stage == num_stages - 1
    for eqn in eqns:
        position = positions.get(eqn.outputs[0], stage)
        of_last = is_last and (is_transposed(eqn) or not backward.isdisjoint(variables(eqn.inputs)))
        # A print in rematerialized code belongs to the backward: the forward has its own copy.
        is_again = has_print(eqn) and is_transposed(eqn)
        if position >= num_stages or of_last or is_again:
            backward.update(eqn.outputs)
    return backward
