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


class Origins(Flag):
    """The origins of an array."""

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


_UNREAD = frozenset(("scan", "while", "cond"))
"""Loops and branches: a mask may be used inside, which is not looked for."""


def unmasked_read(
    program: Jaxpr, origins: Sequence[Origins], num_positions: int
) -> JaxprEqn | None:
    """Returns the equation that goes along positions with no mask before it; None without one.

    Args:
        program: A layer, of a slice.
        origins: One value for each of its inputs.
        num_positions: The length of a whole sequence. Another dim of this length hides what an
            array does along positions.

    Returns:
        The equation, whose line a message can name.
    """
    return _walk(program, origins, num_positions)[0]


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


def _walk(
    program: Jaxpr, origins: Sequence[Origins], num_positions: int
) -> tuple[JaxprEqn | None, list[Origins]]:
    """Returns that equation, and the origins of the results."""
    known = dict(zip(program.invars, origins, strict=True))
    for equation in program.eqns:
        inputs = [_of(known, x) for x in equation.invars]
        called = called_jaxpr(equation)
        if called is not None:
            inside, outputs = _walk(jaxpr_of(called), inputs, num_positions)
            if inside is not None:
                return inside, []
        elif _goes_along(equation, inputs, num_positions) and not any(map(_is_clean_mask, inputs)):
            return equation, []
        else:
            outputs = [_result(equation, inputs, x.aval, num_positions) for x in equation.outvars]
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return None, [_of(known, x) for x in program.outvars]


def _of(known: Mapping[Any, Origins], x: Any) -> Origins:
    return Origins.NOTHING if isinstance(x, Literal) else known.get(x, Origins.NOTHING)


def _is_clean_mask(origins: Origins) -> bool:
    return Origins.MASK in origins and Origins.LATER not in origins


def _is_bool(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == jnp.bool_


def _contracted(equation: JaxprEqn, i: int, num_positions: int) -> bool:
    """Returns whether an equation sums or compares operand i along its one dim of positions."""
    aval: Any = equation.invars[i].aval
    dims = [d for d, n in enumerate(aval.shape) if n == num_positions]
    if len(dims) != 1:
        return False
    name = equation.primitive.name
    if name == "dot_general":
        contracted, _ = equation.params["dimension_numbers"]
        return dims[0] in contracted[i]
    return name in _ALONG and dims[0] in equation.params["axes"]


def _goes_along(equation: JaxprEqn, inputs: Sequence[Origins], num_positions: int) -> bool:
    """Returns whether an equation sums or compares along later positions."""
    return any(
        Origins.LATER in origins and _contracted(equation, i, num_positions)
        for i, origins in enumerate(inputs)
    )


def _result(
    equation: JaxprEqn, inputs: Sequence[Origins], aval: Any, num_positions: int
) -> Origins:
    """Returns the origins of a result of an equation."""
    name, union = equation.primitive.name, reduce(or_, inputs, Origins.NOTHING)
    if Origins.LATER not in union:
        if not _is_bool(aval):
            return union
        if name == "or" and not all(Origins.MASK in origins for origins in inputs):
            return union & ~Origins.MASK  # it lets more through
        pairs = zip(equation.invars, inputs, strict=True)
        compares = any(
            Origins.POSITIONS in origins and not _is_bool(x.aval) for x, origins in pairs
        )
        return union | Origins.MASK if compares else union
    if name in _UNREAD:
        return (union | Origins.MASK) & ~Origins.LATER
    masks = name in _MASKING and any(map(_is_clean_mask, inputs))
    if masks or _goes_along(equation, inputs, num_positions):
        return (union | Origins.MASK) & ~Origins.LATER
    has_positions = num_positions in getattr(aval, "shape", ())
    return union if has_positions else union & ~Origins.LATER
