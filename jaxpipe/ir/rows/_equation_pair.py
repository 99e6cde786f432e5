"""Pairs an equation of the program of all rows with the same equation of that of a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._relations import Mixed, MixesRowsError, Relation, Rows, Sum, Whole, Zero, row_dim, zero_as


@dataclass(frozen=True)
class EquationPair:
    """An equation in both programs."""

    whole: Any  # the equation of the program of all rows, a `JaxprEqn`
    part: Any  # that of the program of a block
    relations: tuple[Relation, ...]  # the relations of the operands; none is `Mixed`
    num_blocks: int  # D, the blocks of rows

    @property
    def name(self) -> str:
        """Returns the name of the primitive."""
        return self.whole.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """Returns the parameters in the program of all rows."""
        return self.whole.params

    def shape_in(self, i: int) -> tuple[int, ...]:
        """Returns the shape of an operand in the program of all rows."""
        return tuple(self.whole.invars[i].aval.shape)

    def shapes_out(self, i: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of a result in both programs."""
        return tuple(self.whole.outvars[i].aval.shape), tuple(self.part.outvars[i].aval.shape)

    def row_dim_out(self, i: int = 0) -> int | None:
        """Returns the dim of rows of a result; None if it has the same shape in both programs."""
        whole, part = self.shapes_out(i)
        dim = row_dim(whole, part, self.num_blocks)
        if dim is None and whole != part:
            raise MixesRowsError(
                f"the number of rows is in several dims of what `{self.name}` returns"
            )
        return dim

    def no_zeros(self) -> tuple[Relation, ...]:
        """Returns the relations, with zeros as whatever their shapes say."""
        return tuple(
            zero_as(a.aval.shape, b.aval.shape, self.num_blocks) if isinstance(r, Zero) else r
            for r, a, b in zip(self.relations, self.whole.invars, self.part.invars, strict=True)
        )

    def require_same(self, *but: str) -> None:
        """Checks that both equations have the same parameters, but for some."""
        for name, value in self.params.items():
            if name not in but and not is_same(value, self.part.params.get(name)):
                raise MixesRowsError(f"`{name}` of `{self.name}` depends on the number of rows")


def ints(dims: Sequence[Any]) -> tuple[int, ...]:
    """Returns dims of a parameter, which NumPy may have computed, as integers of Python."""
    return tuple(map(int, dims))


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two parameters of an equation are surely equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if hasattr(one, "shape") and getattr(one, "shape") != ():  # noqa: B009
        return False  # an array: its comparison would be one too
    if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
        return False
    return bool(one == other)


def only_rows(relations: tuple[Relation, ...], what: str) -> int | None:
    """Returns the dim of rows that operands have in common, without scales; None for none."""
    dims = set()
    for relation in relations:
        match relation:
            case Whole(0):
                pass
            case Rows(dim, 0, is_squeezed=False):
                dims.add(dim)
            case Mixed(reason):
                raise MixesRowsError(reason)
            case _:
                raise MixesRowsError(f"{what} is given {described(relation)}")
    if len(dims) > 1:
        raise MixesRowsError(f"{what} meets rows in different dims")
    return dims.pop() if dims else None


def described(relation: Relation) -> str:
    """Returns a relation in words."""
    match relation:
        case Whole(0):
            return "what does not depend on rows"
        case Whole():
            return "the number of rows"
        case Rows(scale=0, is_squeezed=False):
            return "rows"
        case Sum(-1):
            return "a mean over rows"
        case Sum():
            return "a sum over rows"
        case Zero():
            return "zeros"
        case Mixed():
            return str(relation)
        case _:
            return "what depends on the number of rows"
