"""Whether a layer reads positions that later slices append, which a slice sees as zeros.

What `past.append` returns has entries of later positions. A mask must take their place, or take
away their share, before anything is summed or compared along positions. A mask is what is boolean
and follows from positions or from the batch; which of them it lets through is not read.
"""

from collections.abc import Mapping, Sequence
from enum import Flag, auto
from functools import reduce
from operator import or_
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ...ir.graph import called_jaxpr, jaxpr_of


class Reads(Flag):
    """What an array follows from."""

    NOTHING = 0
    LATER = auto()  # entries of later positions, along a dim of all positions
    POSITIONS = auto()  # positions of tokens, or the batch
    MASK = auto()  # a mask


_MASKING = frozenset(("add", "add_any", "sub", "mul", "and", "min", "max", "select_n"))
"""Primitives that put a mask in place of entries, or add or multiply by one."""

_ALONG = frozenset(
    ("argmax", "argmin", *(f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")))
)
"""Primitives that sum or compare along axes."""


def unmasked_read(program: Jaxpr, reads: Sequence[Reads], num_positions: int) -> JaxprEqn | None:
    """Returns the equation that goes along positions with no mask before it; None without one.

    Args:
        program: A layer, of a slice.
        reads: What its inputs are.
        num_positions: The length of a whole sequence. Another dim of this length hides what an
            array does along positions.
    """
    return _walk(program, reads, num_positions)[0]


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
            if isinstance(x, Literal) and isinstance(y, Literal) and x.val != y.val:
                return a
    return None


def _walk(
    program: Jaxpr, reads: Sequence[Reads], num_positions: int
) -> tuple[JaxprEqn | None, list[Reads]]:
    """Returns that equation, and what the results follow from."""
    known = dict(zip(program.invars, reads, strict=True))
    for equation in program.eqns:
        inputs = [_of(known, x) for x in equation.invars]
        called = called_jaxpr(equation)
        if called is not None:
            found, outputs = _walk(jaxpr_of(called), inputs, num_positions)
            if found is not None:
                return found, []
        elif _goes_along(equation, inputs, num_positions):
            return equation, []
        else:
            outputs = [_result(equation, inputs, x.aval, num_positions) for x in equation.outvars]
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return None, [_of(known, x) for x in program.outvars]


def _of(known: Mapping[Any, Reads], x: Any) -> Reads:
    return Reads.NOTHING if isinstance(x, Literal) else known.get(x, Reads.NOTHING)


def _is_clean_mask(reads: Reads) -> bool:
    return Reads.MASK in reads and Reads.LATER not in reads


def _is_bool(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == jnp.bool_


def _contracted(equation: JaxprEqn, i: int, num_positions: int) -> bool:
    """Returns whether an equation sums or compares operand i along its one dim of positions."""
    aval: Any = equation.invars[i].aval
    dims, name = (
        [d for d, n in enumerate(aval.shape) if n == num_positions],
        equation.primitive.name,
    )
    if len(dims) != 1:
        return False
    if name == "dot_general":
        contracted, _ = equation.params["dimension_numbers"]
        return dims[0] in contracted[i]
    return name in _ALONG and dims[0] in equation.params["axes"]


def _goes_along(equation: JaxprEqn, inputs: Sequence[Reads], num_positions: int) -> bool:
    """Returns whether an equation goes along later positions, and no operand is a mask."""
    return any(
        Reads.LATER in reads
        and _contracted(equation, i, num_positions)
        and not any(map(_is_clean_mask, inputs))
        for i, reads in enumerate(inputs)
    )


def _result(equation: JaxprEqn, inputs: Sequence[Reads], aval: Any, num_positions: int) -> Reads:
    """Returns what a result of an equation follows from."""
    name, union = equation.primitive.name, reduce(or_, inputs, Reads.NOTHING)
    if Reads.LATER not in union:
        if not _is_bool(aval):
            return union
        if name == "or" and not all(Reads.MASK in reads for reads in inputs):
            return union & ~Reads.MASK  # it lets more through
        pairs = zip(equation.invars, inputs, strict=True)
        compares = any(Reads.POSITIONS in reads and not _is_bool(x.aval) for x, reads in pairs)
        return union | Reads.MASK if compares else union
    is_contracted = any(
        Reads.LATER in reads and _contracted(equation, i, num_positions)
        for i, reads in enumerate(inputs)
    )
    masks = name in _MASKING and any(map(_is_clean_mask, inputs))
    if is_contracted or masks:
        return (union | Reads.MASK) & ~Reads.LATER
    has_positions = num_positions in getattr(aval, "shape", ())
    return union if has_positions else union & ~Reads.LATER
