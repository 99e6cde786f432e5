"""Whether a layer reads positions that later slices append, which a slice sees as zeros.

What `past.append` returns has entries of later positions. A mask must take their place, or take
away their share, before anything is summed or compared along positions. A mask is what is boolean
and follows from positions or from the batch. One of positions alone is computed, and must hide all
that later slices append; one that reads the batch is taken at its word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import reduce
from math import prod
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..._compat import ClosedJaxpr
from ...ir.graph import called_jaxpr, jaxpr_of


class Origins(Flag):
    """The origins of an array."""

    NOTHING = 0
    LATER = auto()  # entries of later positions, along a dim of all positions
    POSITIONS = auto()  # positions of tokens, or the batch
    MASK = auto()  # a mask


@dataclass(frozen=True)
class Entries:
    """What is known of the entries of an array.

    Attributes:
        origins: The origins of its entries.
        value: The entries, if they follow from positions alone.
    """

    origins: Origins = Origins.NOTHING
    value: np.ndarray | None = None


_FAR = 100
"""A score that is so much smaller has a share of zero: exp(-104) is 0 in float32."""

_HIDDEN_BY = {
    "add": lambda mask: mask <= -_FAR,
    "add_any": lambda mask: mask <= -_FAR,
    "sub": lambda mask: mask >= _FAR,
    "min": lambda mask: mask <= -_FAR,
    "max": lambda mask: mask >= _FAR,
    "mul": lambda mask: mask == 0,
    "dot_general": lambda mask: mask == 0,
    "and": lambda mask: mask == 0,
}
"""For primitives that put a mask in place of entries, which entries a mask hides."""

_ALONG = frozenset(
    ("argmax", "argmin", *(f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")))
)
"""Primitives that sum or compare along axes."""

_UNREAD = frozenset(("scan", "while", "cond"))
"""Loops and branches: a mask may be used inside, which is not looked for."""

_NUM_COMPUTED = 1 << 26
"""Larger masks are not computed, but taken at their word."""


def unmasked_read(
    program: ClosedJaxpr, inputs: Sequence[Entries], first_later: int, num_positions: int
) -> JaxprEqn | None:
    """Returns the equation that goes along positions with no mask before it; None without one.

    Args:
        program: A layer, of a slice.
        inputs: Entries for each of its inputs.
        first_later: The first position that a later slice appends.
        num_positions: The length of a whole sequence. Another dim of this length hides what an
            array does along positions.

    Returns:
        The equation, whose line a message can name.
    """
    return _Slice(first_later, num_positions).walk(program, inputs)[0]


def equation_with_other_number(one: Jaxpr, other: Jaxpr) -> JaxprEqn | None:
    """Returns the first equation of a program in which another one has another number.

    They are of one function, for arrays of other lengths; what follows after the programs differ
    in their operations is not compared.
    """
    for a, b in zip(one.eqns, other.eqns, strict=False):
        if a.primitive is not b.primitive:
            return None
        called = called_jaxpr(a), called_jaxpr(b)
        if None not in called:
            inside = equation_with_other_number(*map(jaxpr_of, called))
            if inside is not None:
                return inside
        for x, y in zip(a.invars, b.invars, strict=False):
            if isinstance(x, Literal) and isinstance(y, Literal) and repr(x.val) != repr(y.val):
                return a
    return None


@dataclass(frozen=True)
class _Slice:
    """The reading of a layer of one slice.

    Attributes:
        first_later: The first position that a later slice appends.
        num_positions: The length of a whole sequence.
    """

    first_later: int
    num_positions: int

    def walk(
        self, program: Any, inputs: Sequence[Entries]
    ) -> tuple[JaxprEqn | None, list[Entries]]:
        """Returns the equation that goes along positions unmasked, and what is known of results."""
        jaxpr = jaxpr_of(program)
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for x, value in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False):
            known[x] = Entries(value=_concrete(value))

        def of(x: Any) -> Entries:
            if isinstance(x, Literal):
                return Entries(value=np.asarray(x.val))
            return known.get(x, Entries())

        for equation in jaxpr.eqns:
            operands = [of(x) for x in equation.invars]
            called = called_jaxpr(equation)
            if called is not None:
                inside, results = self.walk(called, operands)
                if inside is not None:
                    return inside, []
            elif self._goes_along(equation, operands) and not self._masks(equation, operands):
                return equation, []
            else:
                values = _values(equation, operands)
                origins = [self._origins(equation, operands, x.aval) for x in equation.outvars]
                results = [*map(Entries, origins, values)]
            known |= dict(zip(equation.outvars, results, strict=True))
        return None, [of(x) for x in jaxpr.outvars]

    def _dim(self, shape: Sequence[int]) -> int | None:
        """Returns the one dim of positions."""
        dims = [d for d, n in enumerate(shape) if n == self.num_positions]
        return dims[0] if len(dims) == 1 else None

    def _goes_along(self, equation: JaxprEqn, operands: Sequence[Entries]) -> bool:
        """Returns whether an equation sums or compares along later positions."""
        return any(
            Origins.LATER in operand.origins and self._contracts(equation, i)
            for i, operand in enumerate(operands)
        )

    def _contracts(self, equation: JaxprEqn, i: int) -> bool:
        """Returns whether an equation sums or compares operand i along its dim of positions."""
        aval: Any = equation.invars[i].aval
        dim, name = self._dim(aval.shape), equation.primitive.name
        if name == "dot_general":
            contracted, _ = equation.params["dimension_numbers"]
            return dim in contracted[i]
        return name in _ALONG and dim in equation.params["axes"]

    def _masks(self, equation: JaxprEqn, operands: Sequence[Entries]) -> bool:
        """Returns whether an operand is a mask that hides entries of later positions."""
        name = equation.primitive.name
        if name == "select_n":
            later = [i for i, case in enumerate(operands[1:]) if Origins.LATER in case.origins]
            return self._hides(operands[0], lambda mask: np.all([mask != i for i in later], axis=0))
        hidden_by = _HIDDEN_BY.get(name)
        return hidden_by is not None and any(self._hides(x, hidden_by) for x in operands)

    def _hides(self, operand: Entries, hidden_by: Callable[[np.ndarray], np.ndarray]) -> bool:
        """Returns whether an operand hides all later positions."""
        if Origins.LATER in operand.origins:
            return False
        dim = None if operand.value is None else self._dim(operand.value.shape)
        if operand.value is None or dim is None:
            return Origins.MASK in operand.origins
        return bool(np.all(hidden_by(np.moveaxis(operand.value, dim, 0)[self.first_later :])))

    def _origins(self, equation: JaxprEqn, operands: Sequence[Entries], aval: Any) -> Origins:
        """Returns the origins of a result of an equation."""
        name = equation.primitive.name
        union = reduce(or_, (x.origins for x in operands), Origins.NOTHING)
        if Origins.LATER not in union:
            if not _is_bool(aval):
                return union
            if name == "or" and not all(Origins.MASK in x.origins for x in operands):
                return union & ~Origins.MASK  # it lets more through
            pairs = zip(equation.invars, operands, strict=True)
            compares = any(
                Origins.POSITIONS in known.origins and not _is_bool(x.aval) for x, known in pairs
            )
            return union | Origins.MASK if compares else union
        masked = name in _UNREAD or self._masks(equation, operands)
        if masked or self._goes_along(equation, operands):
            return (union | Origins.MASK) & ~Origins.LATER
        has_positions = self.num_positions in getattr(aval, "shape", ())
        return union if has_positions else union & ~Origins.LATER


def _is_bool(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == jnp.bool_


def _concrete(value: Any) -> np.ndarray | None:
    """Returns the entries of a constant that is not traced."""
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return None
    traced = isinstance(value, Tracer)
    return None if traced or jnp.issubdtype(value.dtype, jax.dtypes.extended) else np.asarray(value)


def _values(equation: JaxprEqn, operands: Sequence[Entries]) -> list[np.ndarray | None]:
    """Returns the results of an equation whose operands are known, None for each otherwise."""
    inputs = [x.value for x in operands if x.value is not None]
    shapes = [getattr(x.aval, "shape", ()) for x in equation.outvars]
    unknown: list[np.ndarray | None] = [None for _ in shapes]
    if len(inputs) < len(operands) or equation.effects:
        return unknown
    if equation.primitive.name == "broadcast_in_dim":
        dims, (shape,) = equation.params["broadcast_dimensions"], shapes
        ones = [inputs[0].shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
        return [np.broadcast_to(inputs[0].reshape(ones), shape)]
    if max(map(prod, shapes)) > _NUM_COMPUTED:
        return unknown
    with jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*inputs, **equation.params)
    return [*map(np.asarray, results if equation.primitive.multiple_results else (results,))]
