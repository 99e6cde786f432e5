"""Finds which stage every mark ends, also if some are rematerialized, constant or dead code."""

from collections.abc import Hashable, Iterable, Sequence

from ....ir.graph import Atom, Eqn, Graph, Literal, PrimitiveCall, Var, variables
from ...ir._eqns import (
    is_backward_mark,
    is_mark,
    params_of,
    part_of_mark,
    substitute_inputs,
    with_outputs,
)
from ...ir._fingerprint import ValueNumbering
from ...ir._marks import STAGE_END, identity
from ...ir._text import operands


def align_marks(
    body: Graph, num_stages: int, all_mark_ids: Sequence[int]
) -> tuple[Graph, dict[Eqn, int]]:
    """Returns the body without marks that end no stage, and the stage that each other mark ends.

    Marks are numbered in program order, and transposition reverses the order. If the results depend
    on only some of the marks, or if cotangents flow through only some, the ids that the marks carry
    identify them. Marks of parts carry the index of their part.
    """
    body = _without_recomputed_marks(_without_constant_marks(body))
    parts = {eqn: part_of_mark(eqn) for eqn in body.eqns if is_mark(eqn)}
    part_of_each = {eqn: part for eqn, part in parts.items() if part is not None}
    if part_of_each:
        return body, part_of_each
    _check_first_derivatives(parts)
    forward = [eqn for eqn in body.eqns if is_mark(eqn) and not is_backward_mark(eqn)]
    backward = [eqn for eqn in body.eqns if is_mark(eqn) and is_backward_mark(eqn)]
    mark_ids, possible = [_mark_id(eqn) for eqn in forward], (num_stages, num_stages - 1)
    if len(forward) not in possible or len(backward) not in (0, len(forward)):
        all_ids = list(all_mark_ids) or mark_ids
        if len(all_ids) in possible or len(forward) not in possible:
            mark_ids = all_ids
    if len(mark_ids) not in possible:
        raise ValueError(
            f"The loop has {len(mark_ids)} marks where stages end, and its schedule {num_stages} "
            f"stages. Mark the end of every stage but the last ({num_stages - 1} marks), or of "
            f"all of them ({num_stages})."
        )
    last = len(mark_ids) - 1
    stage_of_mark = _stages_by_id(forward, mark_ids)
    stage_of_mark |= {eqn: last - i for eqn, i in _stages_by_id(backward, mark_ids[::-1]).items()}
    last_marks = [eqn for eqn, i in stage_of_mark.items() if i == num_stages - 1]
    replacements: dict[Var, Atom] = {}
    eqns = []
    for eqn in body.eqns:
        if eqn in last_marks:
            (renamed_eqn,) = substitute_inputs([eqn], replacements)
            replacements.update(zip(eqn.outputs, renamed_eqn.inputs, strict=True))
        else:
            eqns.append(eqn)
    marks: dict[Eqn, int] = {}
    renamed = substitute_inputs(eqns, replacements)
    for old, new in zip(eqns, renamed, strict=True):
        if old in stage_of_mark:
            marks[new] = stage_of_mark[old]
    return with_outputs(body, renamed, replacements), marks


def _check_first_derivatives(marks: Iterable[Eqn]) -> None:
    """Checks that marks are those of a function and of its backward, and no other derivative's.

    A gradient penalty passes the stages four times: forward, back for the gradient, forward again
    for the derivative of that backward, and back. A schedule has two passes, F and B.
    """
    for eqn in marks:
        # Forward marks have order 0, and those of their backward at most 1.
        if params_of(eqn)["order"] > is_backward_mark(eqn):
            raise ValueError(
                "The loop differentiates through marks other than once by `jax.grad`, `jax.vjp` "
                "or `jax.value_and_grad`: a gradient penalty, `jax.hessian`, `jax.jvp` and "
                "`jax.linearize` across marks pass the stages more often than the one forward and "
                "the one backward that a schedule has. Take such derivatives inside a stage, or "
                "leave the marks out and give a schedule of one stage."
            )


def forward_mark_ids(body: Graph) -> list[int]:
    """Returns the ids of the forward marks in a body, in program order."""
    eqns = _without_recomputed_marks(_without_constant_marks(body)).eqns
    return [_mark_id(eqn) for eqn in eqns if is_mark(eqn) and not is_backward_mark(eqn)]


def _stages_by_id(marks: Sequence[Eqn], mark_ids: Sequence[int]) -> dict[Eqn, int]:
    """Returns, for each mark, the index of its id in `mark_ids`; both are in the same order."""
    stages: dict[Eqn, int] = {}
    start = 0
    for eqn in marks:
        assert _mark_id(eqn) in mark_ids[start:], "marks keep their order"
        stages[eqn] = mark_ids.index(_mark_id(eqn), start)
        start = stages[eqn] + 1
    return stages


def _mark_id(eqn: Eqn) -> int:
    return params_of(eqn)["mark_id"]


def _without_constant_marks(body: Graph) -> Graph:
    """Returns the body with constants removed from its marks.

    A constant, such as the cotangent of a loss, is available in every stage, so a mark on it has no
    effect.
    """
    replacements: dict[Var, Atom] = {}
    eqns = []
    for eqn in body.eqns:
        (eqn,) = substitute_inputs([eqn], replacements)
        if is_mark(eqn):
            atoms, params = operands(eqn), params_of(eqn)
            pairs = zip(eqn.outputs, atoms, strict=True)
            replacements.update((o, a) for o, a in pairs if isinstance(a, Literal))
            outputs = tuple(o for o in eqn.outputs if o not in replacements)
            eqn = Eqn(PrimitiveCall(STAGE_END, identity, params), tuple(variables(atoms)), outputs)
        eqns.append(eqn)
    return with_outputs(body, eqns, replacements)


def _without_recomputed_marks(body: Graph) -> Graph:
    """Returns `body` without marks in rematerialized code.

    Rematerialization of a stage starts at its input, which the stage still has. A second mark on
    the same values is therefore replaced by the outputs of the first.
    """
    value_ids = ValueNumbering(body.inputs)
    first: dict[tuple[Hashable, ...], Eqn] = {}
    replacements: dict[Var, Atom] = {}
    eqns = []
    for eqn in body.eqns:
        (eqn,) = substitute_inputs([eqn], replacements)
        output_ids = value_ids.add(eqn)
        if is_mark(eqn) and not is_backward_mark(eqn):
            original = first.setdefault(output_ids, eqn)
            if original is not eqn:
                replacements.update(zip(eqn.outputs, original.outputs, strict=True))
                continue
        eqns.append(eqn)
    return with_outputs(body, eqns, replacements)
