"""Splits the body of a loop over microbatches at its marks into one program per stage.

S is the number of stages. The place of a value is the position in the pipeline at which it is
computed: 0 to S - 1 in the forward, S to 2S - 1 in the backward, so places p and 2S - 1 - p belong
to the same stage. A value that depends on no value that crosses a mark has no place: weights, the
batch, and values computed from them alone. Such a value is computed in the stages that read it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend import core

from ...ir._cost import is_light
from ...ir._graph import (
    Atom,
    Eqn,
    Graph,
    Literal,
    PrimitiveCall,
    Var,
    has_print,
    print_tokens,
    variables,
)
from ..ir._marks import NAME, same
from ..ir._scopes import is_transposed
from ..ir._steps import ADD, copy_of, is_sum, live, substituted, with_outputs
from ._fingerprint import Numbers

Places = Mapping[Var, int]


@dataclass(frozen=True)
class Stage:
    """Program of one stage for one microbatch, forward and backward.

    Attributes:
        program: `(values it reads) -> (values for other stages, its shares of results)`.
        backward: The inputs and outputs of `program` that belong to the backward.
        handed_on: The outputs of `program` that other stages read.
    """

    program: Graph
    backward: frozenset[Var]
    handed_on: frozenset[Var]


@dataclass(frozen=True)
class Staged:
    """Stages of a body, and for every result of the body the shares that add up to it."""

    stages: tuple[Stage, ...]
    shares: tuple[tuple[Var, ...], ...]


def cut_into_stages(
    body: Graph, num_stages: int, adds: Sequence[bool], written: Callable[[], Graph]
) -> Staged:
    """Splits a body at its marks.

    Args:
        body: `(loop invariants, index of the microbatch) -> results`.
        num_stages: Number of stages S.
        adds: [num_results] whether each result is summed over microbatches. Only such a result may
            be split into shares.
        written: Returns the body including the equations that its results do not depend on. It is
            called only if the results depend on some of the marks but not on all.

    Returns:
        [num_stages] stages, and the shares of each result.

    Raises:
        ValueError: If the body does not have S or S - 1 marks, or if values run through the marks
            in another order.
    """
    body = _without_recomputed_marks(_of_values(body))
    body, marks = _number_marks(body, num_stages, lambda: _marks_in(written()))
    places = _places(body, marks, num_stages)
    body, shares = _shares(body, places, adds, num_stages)
    places = _places(body, marks, num_stages)
    homes, uses = _homes(body, marks, places, shares, num_stages)
    results = [*(value for share in shares for value in share), *print_tokens(body.steps)]
    stages = tuple(
        _stage(i, body, places, homes, uses, results, num_stages) for i in range(num_stages)
    )
    return Staged(stages, shares)


def is_mark(step: Eqn) -> bool:
    """Returns whether an equation marks the end of a stage."""
    return isinstance(step.operation, PrimitiveCall) and step.operation.name == NAME


def _is_backward_mark(step: Eqn) -> bool:
    assert isinstance(step.operation, PrimitiveCall)
    return step.operation.params["backward"]


def _of_values(body: Graph) -> Graph:
    """Returns the body with constants removed from its marks.

    A constant, such as the cotangent of a loss, is available in every stage, so a mark on it has no
    effect.
    """
    known: dict[Var, Atom] = {}
    steps = []
    for step in body.steps:
        (step,) = substituted([step], known)
        if is_mark(step):
            assert isinstance(step.operation, PrimitiveCall)
            atoms, params = _marked(step), step.operation.params
            pairs = zip(step.outputs, atoms, strict=True)
            known.update((o, a) for o, a in pairs if isinstance(a, Literal))
            outputs = tuple(o for o in step.outputs if o not in known)
            step = Eqn(PrimitiveCall(NAME, same, params), tuple(variables(atoms)), outputs)
        steps.append(step)
    return with_outputs(body, steps, known)


def _marked(step: Eqn) -> list[Atom]:
    """Returns the operands of a mark in order: its inputs and the literals of its equation."""
    assert isinstance(step.operation, PrimitiveCall) and step.operation.equation is not None
    inputs = iter(step.inputs)

    def constant(literal: Any) -> Literal:
        return Literal(np.asarray(literal.val, literal.aval.dtype))

    invars = step.operation.equation.invars
    return [constant(x) if isinstance(x, core.Literal) else next(inputs) for x in invars]


def _marks_in(body: Graph) -> list[int]:
    """Returns the numbers of the forward marks in a body, in program order."""
    steps = _without_recomputed_marks(_of_values(body)).steps
    return [_number(step) for step in steps if is_mark(step) and not _is_backward_mark(step)]


def _number(step: Eqn) -> int:
    assert isinstance(step.operation, PrimitiveCall)
    return step.operation.params["number"]


def _without_recomputed_marks(body: Graph) -> Graph:
    """Removes marks from rematerialized code.

    Rematerialization of a stage starts at its input, which the stage still has. A second mark on
    the same values is therefore replaced by the outputs of the first.
    """
    numbers, first, known = Numbers(body.inputs), {}, {}
    steps = []
    for step in body.steps:
        (step,) = substituted([step], known)
        number = numbers.of_step(step)
        if is_mark(step) and not _is_backward_mark(step):
            original = first.setdefault(number, step)
            if original is not step:
                known.update(zip(step.outputs, original.outputs, strict=True))
                continue
        steps.append(step)
    return with_outputs(body, steps, known)


def _number_marks(
    body: Graph, num_stages: int, written: Callable[[], list[int]]
) -> tuple[Graph, dict[Eqn, int]]:
    """Returns the stage that every mark ends, and removes a mark after the last stage.

    Marks are numbered in program order, and transposition reverses the order. If the results depend
    on only some of the marks, or if cotangents flow through only some, the numbers that the marks
    carry identify them.
    """
    forward = [step for step in body.steps if is_mark(step) and not _is_backward_mark(step)]
    backward = [step for step in body.steps if is_mark(step) and _is_backward_mark(step)]
    numbers, possible = [_number(step) for step in forward], (num_stages, num_stages - 1)
    if len(forward) not in possible or len(backward) not in (0, len(forward)):
        all_numbers = written()
        if len(all_numbers) in possible or len(forward) not in possible:
            numbers = all_numbers
    if len(numbers) not in possible:
        raise ValueError(
            f"The loop has {len(numbers)} marks where stages end, and its schedule {num_stages} "
            f"stages. Mark the end of every stage but the last ({num_stages - 1} marks), or of "
            f"all of them ({num_stages})."
        )
    last = len(numbers) - 1
    numbered = _aligned(forward, numbers)
    numbered |= {step: last - i for step, i in _aligned(backward, numbers[::-1]).items()}
    behind = [step for step, i in numbered.items() if i == num_stages - 1]
    known: dict[Var, Atom] = {}
    steps = []
    for step in body.steps:
        if step in behind:
            (now,) = substituted([step], known)
            known.update(zip(step.outputs, now.inputs, strict=True))
        else:
            steps.append(step)
    marks: dict[Eqn, int] = {}
    renamed = substituted(steps, known)
    for old, new in zip(steps, renamed, strict=True):
        if old in numbered:
            marks[new] = numbered[old]
    return with_outputs(body, renamed, known), marks


def _aligned(marks: Sequence[Eqn], numbers: Sequence[int]) -> dict[Eqn, int]:
    """Returns, for each mark, the index of its number in `numbers`; both are in the same order."""
    found: dict[Eqn, int] = {}
    start = 0
    for step in marks:
        assert _number(step) in numbers[start:], "marks keep their order"
        found[step] = numbers.index(_number(step), start)
        start = found[step] + 1
    return found


def _places(body: Graph, marks: Mapping[Eqn, int], num_stages: int) -> Places:
    """Returns the places of all values that depend on a mark."""
    places: dict[Var, int] = {}
    for step in body.steps:
        place = max((places[v] for v in variables(step.inputs) if v in places), default=None)
        if step in marks:
            stage = marks[step]
            back = _is_backward_mark(step)
            if place is not None and place > (2 * num_stages - 2 - stage if back else stage):
                raise ValueError(
                    f"Mark {stage} is given what comes from behind it. Mark stages in the order "
                    "in which values run through them."
                )
            place = 2 * num_stages - 1 - stage if back else stage + 1
        if place is not None:
            places.update(dict.fromkeys(step.outputs, place))
    return places


def _stage_of(place: int, num_stages: int) -> int:
    return place if place < num_stages else 2 * num_stages - 1 - place


def _shares(
    body: Graph, places: Places, adds: Sequence[bool], num_stages: int
) -> tuple[Graph, tuple[tuple[Var, ...], ...]]:
    """Copies every result, and splits results that are sums over several stages into shares.

    The gradient of a weight that several stages use is such a sum. Every stage accumulates its
    share over all microbatches, and the shares are added once, after the loop.
    """
    makers = {value: step for step in body.steps for value in step.outputs}
    uses = Counter(variables([*(a for step in body.steps for a in step.inputs), *body.outputs]))

    def terms(atom: Atom) -> list[Atom]:
        step = makers.get(atom) if isinstance(atom, Var) else None
        if step is None or uses[step.outputs[0]] > 1 or not is_sum(step):
            return [atom]
        return [term for part in step.inputs for term in terms(part)]

    def stage(atom: Atom) -> int:
        place = places.get(atom, 0) if isinstance(atom, Var) else 0
        return _stage_of(place, num_stages)

    steps = list(body.steps)
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
                steps.append(Eqn(ADD, (total, atom), (added,)))
                total = added
            steps.append(copy_of(total))
            share.append(steps[-1].outputs[0])
        shares.append(tuple(share))
    outputs = (*(value for share in shares for value in share), *print_tokens(steps))
    return live(Graph(body.inputs, tuple(steps), outputs)), tuple(shares)


def _homes(
    body: Graph,
    marks: Mapping[Eqn, int],
    places: Places,
    shares: Sequence[Sequence[Var]],
    num_stages: int,
) -> tuple[dict[Eqn, set[int]], dict[Var, set[int]]]:
    """Returns the stages that run each equation, and the stages that read each value."""
    homes: dict[Eqn, set[int]] = {}
    uses: defaultdict[Var, set[int]] = defaultdict(set)
    results = {value for share in shares for value in share}
    written = _written(body, marks)
    for step in reversed(body.steps):
        if step in marks:
            stage = marks[step] + _is_backward_mark(step)
            home = {stage}
        elif step.outputs[0] in places:
            home = {_stage_of(places[step.outputs[0]], num_stages)}
        else:
            home = set().union(*(uses[value] for value in step.outputs))
            if not home and step in written:
                home = {written[step]}
            if not home:
                assert results.intersection(step.outputs)
                home = {0}
            if len(home) > 1 and (step in written or not _is_quick(step)):
                home = {min(home)}
        homes[step] = home
        for value in variables(step.inputs):
            uses[value] |= home
    return homes, uses


def _written(body: Graph, marks: Mapping[Eqn, int]) -> dict[Eqn, int]:
    """Returns, for each equation that prints, the stage in which the user wrote it."""
    written: dict[Eqn, int] = {}
    stage = 0
    for step in body.steps:
        if step in marks:
            stage = marks[step] + (not _is_backward_mark(step))
        elif has_print(step):
            written[step] = stage
    return written


_FEW_BYTES = 4096


def _is_quick(step: Eqn) -> bool:
    """Returns whether computing an equation in two stages is cheaper than sending its outputs."""
    if is_light(step):
        return True
    moved = [*variables(step.inputs), *step.outputs]
    num_bytes = sum(v.num_bytes for v in moved)
    return isinstance(step.operation, PrimitiveCall) and num_bytes <= _FEW_BYTES


def _stage(
    stage: int,
    body: Graph,
    places: Places,
    homes: Mapping[Eqn, set[int]],
    uses: Mapping[Var, set[int]],
    results: Sequence[Var],
    num_stages: int,
) -> Stage:
    """Returns the program of one stage."""
    steps = [step for step in body.steps if stage in homes[step]]
    made = {value for step in steps for value in step.outputs}
    handed_on = [
        value for step in steps for value in step.outputs if uses.get(value, set()) - homes[step]
    ]
    outputs = (*handed_on, *(value for value in results if value in made))
    needed = dict.fromkeys(v for step in steps for v in variables(step.inputs) if v not in made)
    back = _backward_values(steps, places, stage, num_stages)
    back.update(value for value in needed if places.get(value, 0) >= num_stages)
    shared = [step for step in steps if len(homes[step]) > 1]
    program = Graph(tuple(needed), tuple(_own(steps, shared)), outputs)
    return Stage(program, frozenset(back), frozenset(handed_on))


def _own(steps: Sequence[Eqn], shared: Sequence[Eqn]) -> list[Eqn]:
    """Returns the equations of a stage, with new variables for the outputs of shared equations."""
    own: dict[Var, Atom] = {v: Var(v.aval) for step in shared for v in step.outputs}
    renamed = []
    for step in substituted(steps, own):
        outputs = tuple(own.get(value, value) for value in step.outputs)
        renamed.append(replace(step, outputs=outputs))
    return renamed


def _backward_values(steps: Sequence[Eqn], places: Places, stage: int, num_stages: int) -> set[Var]:
    """Returns the values of a stage that belong to its backward.

    The last stage has no backward mark. Its backward begins at the equations that JAX transposed.
    """
    back: set[Var] = set()
    is_last = stage == num_stages - 1
    for step in steps:
        place = places.get(step.outputs[0], stage)
        of_last = is_last and (is_transposed(step) or not back.isdisjoint(variables(step.inputs)))
        # A print in rematerialized code belongs to the backward: the forward has its own copy.
        is_again = has_print(step) and is_transposed(step)
        if place >= num_stages or of_last or is_again:
            back.update(step.outputs)
    return back
