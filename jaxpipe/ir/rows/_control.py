"""Follows rows through calls, branches, loops and functions with derivatives of their own.

A rule is `(walk, equation of all rows, the same of a block, relations) -> relations`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var
from jax.interpreters import partial_eval

from ..._compat import ClosedJaxpr, rematerialized_jaxpr, scan_sizes
from ..graph import bind, closed_jaxpr, jaxpr_of
from ._relations import (
    Mixed,
    MixesRowsError,
    Relation,
    RowIds,
    Rows,
    Sum,
    Whole,
    Zero,
    dual,
    is_within,
    join,
    zero_as,
)
from ._walk import ANOTHER_PROGRAM, Walk

ControlRule = Callable[[Walk, JaxprEqn, JaxprEqn, tuple[Relation, ...]], list[Relation]]


def _inner(
    walk: Walk, a: JaxprEqn, b: JaxprEqn, param: str, relations: Sequence[Relation]
) -> list[Relation]:
    """Returns the relations of the results of the jaxprs that a parameter of both equations is."""
    return walk.of_jaxprs(closed_jaxpr(a.params[param]), closed_jaxpr(b.params[param]), relations)


def _call(walk: Walk, a: JaxprEqn, b: JaxprEqn, relations: tuple[Relation, ...]) -> list[Relation]:
    return _inner(walk, a, b, "jaxpr" if "jaxpr" in a.params else "call_jaxpr", relations)


def _rematerialized(
    walk: Walk, a: JaxprEqn, b: JaxprEqn, relations: tuple[Relation, ...]
) -> list[Relation]:
    whole, part = (rematerialized_jaxpr(equation.params) for equation in (a, b))
    if whole is None or part is None:
        raise MixesRowsError("it calls a function of a kind that is not known")
    return walk.of_jaxprs(closed_jaxpr(whole), closed_jaxpr(part), relations)


def _cond(walk: Walk, a: JaxprEqn, b: JaxprEqn, relations: tuple[Relation, ...]) -> list[Relation]:
    index, *operands = relations
    if index not in (Whole(), Zero()):
        raise MixesRowsError("a condition depends on rows")
    branches = [
        walk.of_jaxprs(closed_jaxpr(x), closed_jaxpr(y), operands)
        for x, y in zip(a.params["branches"], b.params["branches"], strict=True)
    ]
    results = branches[0]
    for branch in branches[1:]:
        results = [join(x, y) for x, y in zip(results, branch, strict=True)]
    return results


def _while(walk: Walk, a: JaxprEqn, b: JaxprEqn, relations: tuple[Relation, ...]) -> list[Relation]:
    num_cond, num_body = a.params["cond_nconsts"], a.params["body_nconsts"]
    if (num_cond, num_body) != (b.params["cond_nconsts"], b.params["body_nconsts"]):
        raise MixesRowsError(ANOTHER_PROGRAM)
    of_cond = relations[:num_cond]
    of_body = relations[num_cond : num_cond + num_body]

    def body(carry: Sequence[Relation]) -> list[Relation]:
        return _inner(walk, a, b, "body_jaxpr", [*of_body, *carry])

    carry = _fixpoint(body, relations[num_cond + num_body :])
    (going_on,) = _inner(walk, a, b, "cond_jaxpr", [*of_cond, *carry])
    if going_on not in (Whole(), Zero()):
        raise MixesRowsError("the number of iterations of a loop depends on rows")
    return carry


def _fixpoint(
    body: Callable[[Sequence[Relation]], list[Relation]], carry: Sequence[Relation]
) -> list[Relation]:
    """Returns relations that hold before and after every iteration of a loop."""
    while True:
        after = body(carry)
        new = [join(x, y) for x, y in zip(carry, after[: len(carry)], strict=True)]
        if new == list(carry):
            return new
        carry = new


def _scan(walk: Walk, a: JaxprEqn, b: JaxprEqn, relations: tuple[Relation, ...]) -> list[Relation]:
    sizes = num_consts, num_carry = scan_sizes(a.params)
    if scan_sizes(b.params) != sizes or a.params["reverse"] != b.params["reverse"]:
        raise MixesRowsError(ANOTHER_PROGRAM)
    end = num_consts + num_carry
    consts, carry, xs = relations[:num_consts], relations[num_consts:end], relations[end:]
    if a.params["length"] != b.params["length"]:
        return _scan_over_rows(walk, a, b, consts, carry, xs)
    slices = [_shifted(x, -1) for x in xs]

    def body(carry: Sequence[Relation]) -> list[Relation]:
        return _inner(walk, a, b, "jaxpr", [*consts, *carry, *slices])

    carry = _fixpoint(body, carry)
    return [*carry, *(_shifted(y, 1) for y in body(carry)[num_carry:])]


def _shifted(relation: Relation, by: int) -> Relation:
    """Returns the relation of slices along dim 0 (`by` -1), or of a stack of such slices (1)."""
    match relation:
        case Rows(dim, scale, uniform, is_squeezed=False) if dim + by >= 0:
            return Rows(dim + by, scale, uniform)
        case Rows():
            return Mixed("a loop goes over rows")
        case RowIds():
            return Mixed("a loop counts rows")
    return relation


def _scan_over_rows(
    walk: Walk,
    a: JaxprEqn,
    b: JaxprEqn,
    consts: Sequence[Relation],
    carry: Sequence[Relation],
    xs: Sequence[Relation],
) -> list[Relation]:
    """Returns the relations of a loop over rows: every iteration is one of the loop of a block."""
    # In the body, `Whole` means equal in these two iterations. Everything else is unknown there,
    # and so is what is carried from one row to the next.
    if a.params["length"] != walk.num_blocks * b.params["length"]:
        raise MixesRowsError("a loop depends on the number of rows")
    mixed = Mixed("a loop carries something from row to row")

    def equal(relation: Relation) -> Relation:
        if isinstance(relation, Mixed) or relation in (Whole(), Zero()):
            return relation
        return Mixed("a loop over rows reads other rows")

    def equal_slice(relation: Relation) -> Relation:
        match relation:
            case Rows(0, 0, is_squeezed=False):
                return Whole()
            case Zero() | Mixed():
                return relation
        return Mixed("a loop over rows reads something else")

    operands = [*map(equal, consts), *([mixed] * len(carry)), *map(equal_slice, xs)]
    # Of what an iteration adds to a carry, the summand is looked at.
    wholes, parts = (
        _summands(closed_jaxpr(e.params["jaxpr"]), len(consts), len(carry)) for e in (a, b)
    )
    # Cotangents of one iteration are no sums over blocks, as those of `Whole` are elsewhere.
    in_body = walk.without("custom_vjp_call")
    results = in_body.of_jaxprs(wholes[0], parts[0], operands)

    def stacked(relation: Relation) -> Relation:
        if relation == Whole():
            return Rows(0)
        return relation if isinstance(relation, Zero | Mixed) else mixed

    def carried(i: int, before: Relation, after: Relation) -> Relation:
        if isinstance(after, Mixed):
            return after
        adds_up = i in wholes[1] and i in parts[1] and isinstance(before, Zero | Sum)
        return join(Sum(), before) if adds_up and after in (Whole(), Zero()) else mixed

    sums = [carried(i, *pair) for i, pair in enumerate(zip(carry, results, strict=False))]
    return [*sums, *map(stacked, results[len(carry) :])]


def _summands(
    body: ClosedJaxpr, num_consts: int, num_carry: int
) -> tuple[ClosedJaxpr, frozenset[int]]:
    """Returns the body of a loop with what it adds to a carry in place of the sum, and which."""
    jaxpr, sums = body.jaxpr, frozenset[int]()
    outputs = list(jaxpr.outvars)
    for i, x in enumerate(jaxpr.invars[num_consts : num_consts + num_carry]):
        uses = [e for e in jaxpr.eqns if x in e.invars]
        is_sum = len(uses) == 1 and uses[0].primitive.name in ("add", "add_any")
        if is_sum and uses[0].outvars[0] is outputs[i] and uses[0].invars.count(x) == 1:
            outputs[i] = next(y for y in uses[0].invars if y is not x)
            sums |= {i}
    return ClosedJaxpr(jaxpr.replace(outvars=outputs), body.consts), sums


def _custom_derivative(
    walk: Walk, a: JaxprEqn, b: JaxprEqn, relations: tuple[Relation, ...]
) -> list[Relation]:
    """Follows rows through a function, and through its own rule of tangents or cotangents."""
    results = _without_zeros(walk, a, b, _call(walk, a, b, relations))
    if any(isinstance(r, Mixed) for r in results) or not any(map(_has_tangent, a.invars)):
        return results
    name, derivative = a.primitive.name, DERIVATIVES[a.primitive.name]
    differentiated = [r for r, x in zip(relations, a.invars, strict=True) if _has_tangent(x)]
    required = [r for r, x in zip(results, a.outvars, strict=True) if _is_inexact(x)]
    if name == "custom_vjp_call":
        duals = [dual(r) for r in differentiated]
        differentiated, required = [dual(r) for r in required], duals
    derived = walk.with_rules(_IN_DERIVATIVES).of_jaxprs(
        derivative(a), derivative(b), [*_of_variables(a, relations), *differentiated]
    )
    pairs = zip(derived, required, strict=True)
    # Zeros are constants, whose derivatives are not used.
    used = [(g, w) for g, w in pairs if not isinstance(w, Zero | RowIds)]
    if all(not isinstance(w, Mixed) and is_within(g, w) for g, w in used):
        return results
    rule = "rule of a `custom_jvp`" if name == "custom_jvp_call" else "backward of a `custom_vjp`"
    return [Mixed(f"the {rule} mixes rows")] * len(results)


def _without_zeros(walk: Walk, a: JaxprEqn, b: JaxprEqn, results: list[Relation]) -> list[Relation]:
    """Returns relations of results with a rule of their own: zeros may have gradients, too."""
    shapes: list[Any] = [(x.aval, y.aval) for x, y in zip(a.outvars, b.outvars, strict=True)]
    return [
        zero_as(x.shape, y.shape, walk.num_blocks) if isinstance(r, Zero) else r
        for r, (x, y) in zip(results, shapes, strict=True)
    ]


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.aval.dtype, jnp.inexact)


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Var) and _is_inexact(x)


def _of_variables(equation: JaxprEqn, relations: Sequence[Relation]) -> list[Relation]:
    pairs = zip(relations, equation.invars, strict=True)
    return [r for r, x in pairs if not isinstance(x, Literal)]


def _differentiable(equation: JaxprEqn) -> tuple[Callable, list[Any], list[int]]:
    """Returns the inexact results as a function of inexact operands and of all operands."""
    run = bind(equation, jaxpr_of(equation.params["call_jaxpr"]))
    shapes = [_shape_of(x.aval) for x in equation.invars if isinstance(x, Var)]
    at = [i for i, x in enumerate(shapes) if jnp.issubdtype(x.dtype, jnp.inexact)]
    kept = [i for i, x in enumerate(equation.outvars) if _is_inexact(x)]

    def of_inexact(operands: Sequence[Any], *inexact: Any) -> list[Any]:
        merged = list(operands)
        for i, x in zip(at, inexact, strict=True):
            merged[i] = x
        results = run(*merged)
        return [results[i] for i in kept]

    return of_inexact, shapes, at


def _jvp(equation: JaxprEqn) -> ClosedJaxpr:
    of_inexact, shapes, at = _differentiable(equation)

    def jvp(*arguments: Any) -> list[Any]:
        operands, tangents = arguments[: len(shapes)], arguments[len(shapes) :]
        inexact = tuple(operands[i] for i in at)
        return jax.jvp(lambda *x: of_inexact(operands, *x), inexact, tangents)[1]

    return jax.make_jaxpr(jvp)(*shapes, *(shapes[i] for i in at))


def _vjp(equation: JaxprEqn) -> ClosedJaxpr:
    of_inexact, shapes, at = _differentiable(equation)

    def vjp(*arguments: Any) -> Sequence[Any]:
        operands, cotangents = arguments[: len(shapes)], arguments[len(shapes) :]
        _, pull = jax.vjp(lambda *x: of_inexact(operands, *x), *(operands[i] for i in at))
        return pull(list(cotangents))

    results = [_shape_of(x.aval) for x in equation.outvars if _is_inexact(x)]
    return jax.make_jaxpr(vjp)(*shapes, *results)


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


DERIVATIVES: dict[str, Callable[[JaxprEqn], ClosedJaxpr]] = {
    "custom_jvp_call": _jvp,
    "custom_vjp_call": _vjp,
}
"""Programs of the derivatives of functions with rules of their own."""

_CALLS = "jit closed_call call eval_jaxpr remat2"

CONTROL: dict[str, ControlRule] = {
    **dict.fromkeys(_CALLS.split(), _call),
    "call_hi_primitive": _rematerialized,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    **dict.fromkeys(DERIVATIVES, _custom_derivative),
}

# A derivative is not differentiated again, and may call its function, as that of `jax.nn.relu`.
_IN_DERIVATIVES: dict[str, ControlRule] = dict.fromkeys(DERIVATIVES, _call)


def compare(
    whole: ClosedJaxpr,
    part: ClosedJaxpr,
    relations: Sequence[Relation],
    num_blocks: int,
    *,
    draws: dict[tuple[int, ...], set[int | None]] | None = None,
    ids_are_rows: bool = False,
) -> list[Relation]:
    """Returns the relations of the results of a function.

    With `ids_are_rows` what is computed of no rows, such as the number of each, may differ between
    blocks: then only what meets other rows is `Mixed`.

    `draws` collects the shapes of random bits that a block draws by one key, with their dims of
    rows. The relations are then those of a function that draws for the block what all rows would
    draw.
    """
    used_outputs = [True] * len(whole.jaxpr.outvars)
    if len(used_outputs) != len(part.jaxpr.outvars):
        return [Mixed(ANOTHER_PROGRAM)] * len(used_outputs)
    a, b = (_without_dead(closed, used_outputs) for closed in (whole, part))
    walk = Walk(num_blocks, CONTROL, draws, ids_are_rows=ids_are_rows)
    return walk.of_jaxprs(a, b, relations)


def _without_dead(closed: ClosedJaxpr, used_outputs: list[bool]) -> ClosedJaxpr:
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used_outputs, instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)
