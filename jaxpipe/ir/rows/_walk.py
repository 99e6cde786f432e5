"""Follows the rows of a batch through a function, in two programs of it at once.

One program is the function of n * D rows, the other the same function of n rows, a block. They are
walked in lock-step, which also shows what depends on the number of rows: constants, loops, and
Python that reads shapes. Whatever is not understood is `Mixed`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..._compat import ClosedJaxpr
from ._arithmetic import ARITHMETIC, Rule
from ._data_movement import MOVES, reshaped
from ._relations import (
    EquationPair,
    Mixed,
    MixesRowsError,
    Relation,
    Rows,
    Whole,
    Zero,
    at_source,
    has_shapes,
    row_dim,
)

_RULES: dict[str, Rule] = ARITHMETIC | MOVES

ANOTHER_PROGRAM = "with another number of rows the function is another program"

_NOT_REPEATABLE = {"rng_uniform", "infeed", "io_callback", "debug_callback", "outfeed"}
"""Primitives that may return something else when they are called again."""

Partners = dict[Var, tuple[Var, Relation]]
"""From a variable of the program of all rows to that of a block, and how they are related."""


class Walk:
    """A walk through two programs, whose numbers of rows have the ratio D."""

    def __init__(
        self,
        num_blocks: int,
        control: Mapping[str, Callable[..., list[Relation]]],
        draws: dict[tuple[int, ...], set[int | None]] | None = None,
        *,
        ids_are_rows: bool = False,
    ):
        self.num_blocks = num_blocks
        self._control = control
        self._draws = draws
        self._ids_are_rows = ids_are_rows

    def without(self, name: str) -> "Walk":
        """Returns a walk that does not know a primitive."""
        control = {k: f for k, f in self._control.items() if k != name}
        return self._with_control(control)

    def _with_control(self, control: Mapping[str, Callable[..., list[Relation]]]) -> "Walk":
        return Walk(self.num_blocks, control, self._draws, ids_are_rows=self._ids_are_rows)

    def with_rules(self, rules: Mapping[str, Callable[..., list[Relation]]]) -> "Walk":
        """Returns a walk with other rules for some primitives."""
        return self._with_control({**self._control, **rules})

    def of_jaxprs(
        self, whole: ClosedJaxpr, part: ClosedJaxpr, relations: Sequence[Relation]
    ) -> list[Relation]:
        """Returns the relations of the results of two jaxprs, from those of their arguments."""
        a, b = whole.jaxpr, part.jaxpr
        counts = [(len(j.invars), len(j.constvars), len(j.outvars)) for j in (a, b)]
        if counts[0] != counts[1] or counts[0][0] != len(relations):
            return [Mixed(ANOTHER_PROGRAM)] * counts[0][2]
        partners: Partners = {}
        for x, y, relation in zip(a.invars, b.invars, relations, strict=True):
            partners[x] = y, self._checked(relation, x, y)
        constants = zip(a.constvars, b.constvars, whole.consts, part.consts, strict=True)
        for x, y, one, other in constants:
            partners[x] = y, self._checked(self._of_constants(one, other), x, y)
        reason = self._walk(a, b, partners)
        return [
            self._read(x, y, partners, reason) for x, y in zip(a.outvars, b.outvars, strict=True)
        ]

    def _walk(self, a: Jaxpr, b: Jaxpr, partners: Partners) -> Mixed:
        """Adds the relations of all variables; returns that of those that have no partner."""
        equations = list(b.eqns)
        reason, i = Mixed(ANOTHER_PROGRAM), 0
        for equation in a.eqns:
            other = equations[i] if i < len(equations) else None
            if other is not None and self._are_partners(equation, other, partners):
                for x, y, relation in self._of_equations(equation, other, partners):
                    partners[x] = y, self._checked(relation, x, y)
                i += 1
                continue
            skipped = self._without_partner(equation, partners)
            if skipped is None:
                # What follows has no partners. Its results are unknown, whatever they are.
                return Mixed(reason.reason, source_line(equation))
            partners[equation.outvars[0]] = skipped
        return reason

    def _are_partners(self, a: JaxprEqn, b: JaxprEqn, partners: Partners) -> bool:
        counts = [(len(e.invars), len(e.outvars), e.primitive.name) for e in (a, b)]
        if counts[0] != counts[1]:
            return False
        for x, y in zip(a.invars, b.invars, strict=True):
            if isinstance(x, Literal) or isinstance(y, Literal):
                if not (isinstance(x, Literal) and isinstance(y, Literal)):
                    return False
            elif x not in partners or partners[x][0] is not y:
                return False
        return True

    def _without_partner(self, a: JaxprEqn, partners: Partners) -> tuple[Var, Relation] | None:
        """Returns the partner of a broadcast or reshape that JAX leaves out in a block of a row."""
        if len(a.invars) != 1 or isinstance(a.invars[0], Literal) or a.invars[0] not in partners:
            return None
        partner, relation = partners[a.invars[0]]
        shapes: list[Any] = [a.invars[0].aval, a.outvars[0].aval, partner.aval]
        before, shape, one = (aval.shape for aval in shapes)
        is_reshape = a.primitive.name == "reshape" and not a.params["dimensions"]
        if is_reshape and isinstance(relation, Rows):
            rows = reshaped(relation, before, shape, one, self.num_blocks)
            return None if rows is None else (partner, rows)
        dim = row_dim(shape, one, self.num_blocks)
        if a.primitive.name != "broadcast_in_dim" or dim is None or one[dim] != 1:
            return None
        if tuple(a.params["broadcast_dimensions"]) != tuple(range(len(shape))):
            return None
        match relation:
            case Whole(scale):
                return partner, Rows(dim, scale, is_uniform=True)
            case Zero():
                return partner, relation
        return None

    def _of_equations(
        self, a: JaxprEqn, b: JaxprEqn, partners: Partners
    ) -> list[tuple[Var, Var, Relation]]:
        relations = tuple(
            self._read(x, y, partners, Mixed(ANOTHER_PROGRAM))
            for x, y in zip(a.invars, b.invars, strict=True)
        )
        results = self._results(a, b, relations)
        results = [at_source(relation, lambda: source_line(a)) for relation in results]
        return list(zip(a.outvars, b.outvars, results, strict=True))

    def _results(self, a: JaxprEqn, b: JaxprEqn, relations: tuple[Relation, ...]) -> list[Relation]:
        name, count = a.primitive.name, len(a.outvars)
        try:
            if name in self._control:
                return self._control[name](self, a, b, relations)
            if name == "select_n" and isinstance(relations[0], Zero):
                return [relations[1]]  # the case 0 everywhere
            mixed = next((r for r in relations if isinstance(r, Mixed)), None)
            if mixed is not None:
                return [mixed] * count
            step = EquationPair(a, b, relations, self.num_blocks)
            if self._ids_are_rows and all(isinstance(r, Whole | Zero) for r in relations):
                dims = map(step.row_dim_out, range(count))
                return [Whole() if dim is None else Rows(dim) for dim in dims]
            if name == "random_bits" and self._draws is not None and relations == (Whole(),):
                dim = step.row_dim_out()
                self._draws.setdefault(tuple(b.params["shape"]), set()).add(dim)
                return [Whole() if dim is None else Rows(dim)]
            return relations_of(step)
        except MixesRowsError as error:
            return [Mixed(str(error))] * count

    def _read(self, x: Any, y: Any, partners: Partners, otherwise: Mixed) -> Relation:
        if isinstance(x, Literal) and isinstance(y, Literal):
            return self._of_constants(x.val, y.val)
        if isinstance(x, Literal) or isinstance(y, Literal) or x not in partners:
            return otherwise
        partner, relation = partners[x]
        return relation if partner is y else otherwise

    def _checked(self, relation: Relation, x: Any, y: Any) -> Relation:
        """Returns a relation, `Mixed` if its values have not the shapes that it says."""
        if x.aval.dtype != y.aval.dtype:
            return Mixed("a dtype depends on the number of rows")
        if has_shapes(relation, x.aval.shape, y.aval.shape, self.num_blocks):
            return relation
        return Mixed("a shape depends on the number of rows")

    def _of_constants(self, one: Any, other: Any) -> Relation:
        """Returns the relation of two constants, which were captured or computed by Python."""
        if one is other:
            is_zero = np.isscalar(one) and not isinstance(one, str) and one == 0
            return Zero() if is_zero else Whole()
        if self._ids_are_rows and jnp.shape(one) == jnp.shape(other):
            return Whole()
        if isinstance(one, Tracer) or isinstance(other, Tracer):
            return Mixed("a captured array is another one for another number of rows")
        if jnp.issubdtype(jax.typeof(one).dtype, jax.dtypes.extended):
            return Mixed("a captured key is another one for another number of rows")
        if not (getattr(one, "is_fully_addressable", True)):
            return Mixed("a captured array is of several processes")
        return _of_arrays(np.asarray(one), np.asarray(other), self.num_blocks)


def _of_arrays(one: np.ndarray, other: np.ndarray, num_blocks: int) -> Relation:
    if one.dtype != other.dtype:
        return Mixed("a constant depends on the number of rows")
    if one.shape == other.shape:
        if one.tobytes() == other.tobytes():
            return Zero() if one.size and not one.any() else Whole()
        return _of_scaled(one, other, num_blocks)
    dim = row_dim(one.shape, other.shape, num_blocks)
    if dim is not None:
        copies = [num_blocks if i == dim else 1 for i in range(one.ndim)]
        if one.tobytes() == np.tile(other, copies).tobytes():
            return Rows(dim, is_uniform=True)
    return Mixed("a constant depends on the number of rows")


def _of_scaled(one: np.ndarray, other: np.ndarray, num_blocks: int) -> Relation:
    """Returns `Whole` if one constant is D to some power times the other, but for rounding."""
    mixed = Mixed("a constant depends on the number of rows")
    if one.size != 1 or one.dtype.kind not in "fiuV":
        return mixed
    a, b = float(one.reshape(())), float(other.reshape(()))
    if not (np.isfinite(a) and np.isfinite(b) and a and b):
        return mixed
    is_float = jnp.issubdtype(one.dtype, jnp.inexact)
    error = 2 * Fraction(float(jnp.finfo(one.dtype).eps)) if is_float else 0
    for scale in (-3, -2, -1, 1, 2, 3):
        if abs(Fraction(a) / Fraction(b) / Fraction(num_blocks) ** scale - 1) <= error:
            return Whole(scale)
    return mixed


def relations_of(pair: EquationPair) -> list[Relation]:
    """Returns the relations of the results of an equation without inner programs."""
    return _RULES.get(pair.name, _of_unknown)(pair)


def _of_unknown(step: EquationPair) -> list[Relation]:
    """Follows a primitive without a rule, whose operands must be the same for all blocks."""
    effects = step.whole.effects
    relations = step.no_zeros()
    if any(relation != Whole() for relation in relations):
        raise MixesRowsError(
            f"`{step.name}` is given rows, and is not known to treat them one by one"
        )
    step.require_same()
    if effects or step.name in _NOT_REPEATABLE:
        raise MixesRowsError(f"`{step.name}` has side effects")
    return [Whole()] * len(step.whole.outvars)


_PACKAGE = Path(__file__).parents[2]
_MODELS = str(_PACKAGE / "models")
_NOT_OF_USER = (
    str(Path(inspect.getfile(jax)).parent),
    str(Path(inspect.getfile(jaxtyping)).parent),
    str(_PACKAGE),
    "<",
)


def source_line(equation: JaxprEqn) -> str:
    """Returns the line of the user's program that an equation is of, such as "model.py:12"."""
    traceback = equation.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        path = frame.file_name
        if path.startswith(_MODELS) or not path.startswith(_NOT_OF_USER):
            return f"{Path(path).name}:{frame.line_num}"
    return ""
