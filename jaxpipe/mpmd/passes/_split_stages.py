"""Splits the body of a loop over microbatches at its marks into one program per stage.

S is the number of stages. The position of a value says where in the pipeline it is computed: 0 to
S - 1 in the forward, S to 2S - 1 in the backward, so positions p and 2S - 1 - p belong to the same
stage. A value that depends on no value that crosses a mark has no position: weights, the batch, and
values computed from them alone. Such a value is computed in the stages that read it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend import core

from ...ir.graph import (
    Atom,
    Eqn,
    Graph,
    Literal,
    PrimitiveCall,
    Var,
    has_print,
    is_light,
    print_tokens,
    variables,
)
from ..ir._eqns import (
    ADD,
    copy_eqn,
    eliminate_dead_code,
    is_backward_mark,
    is_mark,
    is_sum,
    is_transposed,
    substitute_inputs,
    with_outputs,
)
from ..ir._marks import STAGE_END, identity
from ._fingerprint import ValueNumbering

Positions = Mapping[Var, int]


@dataclass(frozen=True)
class Stage:
    """Program of one stage for one microbatch, forward and backward.

    Attributes:
        graph: `(values it reads) -> (values for other stages, its shares of results)`.
        backward: The inputs and outputs of `graph` that belong to the backward.
        sent: The outputs of `graph` that other stages read.
    """

    graph: Graph
    backward: frozenset[Var]
    sent: frozenset[Var]


@dataclass(frozen=True)
class StagedBody:
    """Stages of a body, and for every result of the body the shares that add up to it."""

    stages: tuple[Stage, ...]
    shares: tuple[tuple[Var, ...], ...]


def cut_into_stages(
    body: Graph, num_stages: int, adds: Sequence[bool], with_dead_code: Callable[[], Graph]
) -> StagedBody:
    """Splits a body at its marks.

    Args:
        body: `(loop invariants, index of the microbatch) -> results`.
        num_stages: Number of stages S.
        adds: [num_results] whether each result is summed over microbatches. Only such a result may
            be split into shares.
        with_dead_code: Returns the body including the equations that its results do not depend on.
            It is called only if the results depend on some of the marks but not on all.

    Returns:
        [num_stages] stages, and the shares of each result.

    Raises:
        ValueError: If the body does not have S or S - 1 marks, or if values run through the marks
            in another order.
    """
    body = _without_recomputed_marks(_without_constant_marks(body))
    body, marks = _stages_of_marks(body, num_stages, lambda: _mark_ids(with_dead_code()))
    positions = _positions(body, marks, num_stages)
    body, shares = _split_results(body, positions, adds, num_stages)
    positions = _positions(body, marks, num_stages)
    stages_of, uses = _stages_of_eqns(body, marks, positions, shares, num_stages)
    results = [*(value for share in shares for value in share), *print_tokens(body.eqns)]
    stages = tuple(
        _stage(i, body, positions, stages_of, uses, results, num_stages) for i in range(num_stages)
    )
    return StagedBody(stages, shares)


def _without_constant_marks(body: Graph) -> Graph:
    """Returns the body with constants removed from its marks.

    A constant, such as the cotangent of a loss, is available in every stage, so a mark on it has no
    effect.
    """
    known: dict[Var, Atom] = {}
    eqns = []
    for eqn in body.eqns:
        (eqn,) = substitute_inputs([eqn], known)
        if is_mark(eqn):
            assert isinstance(eqn.operation, PrimitiveCall)
            atoms, params = _operands(eqn), eqn.operation.params
            pairs = zip(eqn.outputs, atoms, strict=True)
            known.update((o, a) for o, a in pairs if isinstance(a, Literal))
            outputs = tuple(o for o in eqn.outputs if o not in known)
            eqn = Eqn(PrimitiveCall(STAGE_END, identity, params), tuple(variables(atoms)), outputs)
        eqns.append(eqn)
    return with_outputs(body, eqns, known)


def _operands(eqn: Eqn) -> list[Atom]:
    """Returns the operands of a mark in order: its inputs and the literals of its equation."""
    assert isinstance(eqn.operation, PrimitiveCall) and eqn.operation.equation is not None
    inputs = iter(eqn.inputs)

    def constant(literal: Any) -> Literal:
        return Literal(np.asarray(literal.val, literal.aval.dtype))

    invars = eqn.operation.equation.invars
    return [constant(x) if isinstance(x, core.Literal) else next(inputs) for x in invars]


def _mark_ids(body: Graph) -> list[int]:
    """Returns the ids of the forward marks in a body, in program order."""
    eqns = _without_recomputed_marks(_without_constant_marks(body)).eqns
    return [_mark_id(eqn) for eqn in eqns if is_mark(eqn) and not is_backward_mark(eqn)]


def _mark_id(eqn: Eqn) -> int:
    assert isinstance(eqn.operation, PrimitiveCall)
    return eqn.operation.params["mark_id"]


def _without_recomputed_marks(body: Graph) -> Graph:
    """Returns `body` without marks in rematerialized code.

    Rematerialization of a stage starts at its input, which the stage still has. A second mark on
    the same values is therefore replaced by the outputs of the first.
    """
    numbers, first, known = ValueNumbering(body.inputs), {}, {}
    eqns = []
    for eqn in body.eqns:
        (eqn,) = substitute_inputs([eqn], known)
        number = numbers.of_step(eqn)
        if is_mark(eqn) and not is_backward_mark(eqn):
            original = first.setdefault(number, eqn)
            if original is not eqn:
                known.update(zip(eqn.outputs, original.outputs, strict=True))
                continue
        eqns.append(eqn)
    return with_outputs(body, eqns, known)


def _stages_of_marks(
    body: Graph, num_stages: int, all_mark_ids: Callable[[], list[int]]
) -> tuple[Graph, dict[Eqn, int]]:
    """Returns the stage that every mark ends, and removes a mark after the last stage.

    Marks are numbered in program order, and transposition reverses the order. If the results depend
    on only some of the marks, or if cotangents flow through only some, the ids that the marks
    carry identify them.

    Raises:
        ValueError: If the marks are not as many as the stages.
    """
    forward = [eqn for eqn in body.eqns if is_mark(eqn) and not is_backward_mark(eqn)]
    backward = [eqn for eqn in body.eqns if is_mark(eqn) and is_backward_mark(eqn)]
    mark_ids, possible = [_mark_id(eqn) for eqn in forward], (num_stages, num_stages - 1)
    if len(forward) not in possible or len(backward) not in (0, len(forward)):
        all_ids = all_mark_ids()
        if len(all_ids) in possible or len(forward) not in possible:
            mark_ids = all_ids
    if len(mark_ids) not in possible:
        raise ValueError(
            f"The loop has {len(mark_ids)} marks where stages end, and its schedule {num_stages} "
            f"stages. Mark the end of every stage but the last ({num_stages - 1} marks), or of "
            f"all of them ({num_stages})."
        )
    last = len(mark_ids) - 1
    numbered = _align_marks(forward, mark_ids)
    numbered |= {eqn: last - i for eqn, i in _align_marks(backward, mark_ids[::-1]).items()}
    last_marks = [eqn for eqn, i in numbered.items() if i == num_stages - 1]
    known: dict[Var, Atom] = {}
    eqns = []
    for eqn in body.eqns:
        if eqn in last_marks:
            (renamed_eqn,) = substitute_inputs([eqn], known)
            known.update(zip(eqn.outputs, renamed_eqn.inputs, strict=True))
        else:
            eqns.append(eqn)
    marks: dict[Eqn, int] = {}
    renamed = substitute_inputs(eqns, known)
    for old, new in zip(eqns, renamed, strict=True):
        if old in numbered:
            marks[new] = numbered[old]
    return with_outputs(body, renamed, known), marks


def _align_marks(marks: Sequence[Eqn], mark_ids: Sequence[int]) -> dict[Eqn, int]:
    """Returns, for each mark, the index of its id in `mark_ids`; both are in the same order."""
    found: dict[Eqn, int] = {}
    start = 0
    for eqn in marks:
        assert _mark_id(eqn) in mark_ids[start:], "marks keep their order"
        found[eqn] = mark_ids.index(_mark_id(eqn), start)
        start = found[eqn] + 1
    return found


def _positions(body: Graph, marks: Mapping[Eqn, int], num_stages: int) -> Positions:
    """Returns the positions of all values that depend on a mark."""
    positions: dict[Var, int] = {}
    for eqn in body.eqns:
        position = max(
            (positions[v] for v in variables(eqn.inputs) if v in positions), default=None
        )
        if eqn in marks:
            stage = marks[eqn]
            is_backward = is_backward_mark(eqn)
            if position is not None and position > (
                2 * num_stages - 2 - stage if is_backward else stage
            ):
                raise ValueError(
                    f"Mark {stage} is given what comes from behind it. Mark stages in the order "
                    "in which values run through them."
                )
            position = 2 * num_stages - 1 - stage if is_backward else stage + 1
        if position is not None:
            positions.update(dict.fromkeys(eqn.outputs, position))
    return positions


def _stage_of(position: int, num_stages: int) -> int:
    return position if position < num_stages else 2 * num_stages - 1 - position


def _split_results(
    body: Graph, positions: Positions, adds: Sequence[bool], num_stages: int
) -> tuple[Graph, tuple[tuple[Var, ...], ...]]:
    """Returns `body` with results copied or, if they are sums over stages, split into shares.

    The gradient of a weight that several stages use is such a sum. Every stage accumulates its
    share over all microbatches, and the shares are added once, after the loop.
    """
    makers = {value: eqn for eqn in body.eqns for value in eqn.outputs}
    uses = Counter(variables([*(a for eqn in body.eqns for a in eqn.inputs), *body.outputs]))

    def terms(atom: Atom) -> list[Atom]:
        eqn = makers.get(atom) if isinstance(atom, Var) else None
        if eqn is None or uses[eqn.outputs[0]] > 1 or not is_sum(eqn):
            return [atom]
        return [term for part in eqn.inputs for term in terms(part)]

    def stage(atom: Atom) -> int:
        position = positions.get(atom, 0) if isinstance(atom, Var) else 0
        return _stage_of(position, num_stages)

    eqns = list(body.eqns)
    shares: list[tuple[Var, ...]] = []
    for output, may_share in zip(body.outputs, adds, strict=True):
        parts: dict[int, list[Atom]] = {}
        for term in terms(output) if may_share else [output]:
            parts.setdefault(stage(term), []).append(term)
        if len(parts) == 1:
            parts = {0: [output]}
        share = []
        for atoms in parts.values():
            total = atoms[0]
            for atom in atoms[1:]:
                added = Var(output.aval) if isinstance(output, Var) else None
                assert added is not None, "a constant is no sum"
                eqns.append(Eqn(ADD, (total, atom), (added,)))
                total = added
            eqns.append(copy_eqn(total))
            share.append(eqns[-1].outputs[0])
        shares.append(tuple(share))
    outputs = (*(value for share in shares for value in share), *print_tokens(eqns))
    return eliminate_dead_code(Graph(body.inputs, tuple(eqns), outputs)), tuple(shares)


def _stages_of_eqns(
    body: Graph,
    marks: Mapping[Eqn, int],
    positions: Positions,
    shares: Sequence[Sequence[Var]],
    num_stages: int,
) -> tuple[dict[Eqn, set[int]], dict[Var, set[int]]]:
    """Returns the stages that run each equation, and the stages that read each value."""
    stages_of: dict[Eqn, set[int]] = {}
    uses: defaultdict[Var, set[int]] = defaultdict(set)
    results = {value for share in shares for value in share}
    print_stages = _stages_of_prints(body, marks)
    for eqn in reversed(body.eqns):
        if eqn in marks:
            stage = marks[eqn] + is_backward_mark(eqn)
            stages = {stage}
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
            stage = marks[eqn] + (not is_backward_mark(eqn))
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


def _stage(
    stage: int,
    body: Graph,
    positions: Positions,
    stages_of: Mapping[Eqn, set[int]],
    uses: Mapping[Var, set[int]],
    results: Sequence[Var],
    num_stages: int,
) -> Stage:
    """Returns the program of one stage."""
    eqns = [eqn for eqn in body.eqns if stage in stages_of[eqn]]
    made = {value for eqn in eqns for value in eqn.outputs}
    sent = [
        value for eqn in eqns for value in eqn.outputs if uses.get(value, set()) - stages_of[eqn]
    ]
    outputs = (*sent, *(value for value in results if value in made))
    needed = dict.fromkeys(v for eqn in eqns for v in variables(eqn.inputs) if v not in made)
    backward = _backward_values(eqns, positions, stage, num_stages)
    backward.update(value for value in needed if positions.get(value, 0) >= num_stages)
    shared = [eqn for eqn in eqns if len(stages_of[eqn]) > 1]
    graph = Graph(tuple(needed), tuple(_with_new_outputs(eqns, shared)), outputs)
    return Stage(graph, frozenset(backward), frozenset(sent))


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
