"""Relates values and equations of a function of all rows to those of the function of blocks.

A function is run on all n * D rows, and on each of D blocks of n consecutive rows. Every value that
it computes has one of these relations, where `whole` is the value of all rows and `part` that of
block k. Scales are exponents of D, so that a product adds them: a mean is a sum with scale -1.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Whole:
    """`whole == D**scale * part`, for every block."""

    scale: int = 0  # 0: the value does not depend on the rows, nor on their number


@dataclass(frozen=True)
class Rows:
    """Block k of `whole`, along a dim, is `D**scale * part`."""

    dim: int  # the dim of rows. It may have other dims merged into it, behind the rows.
    scale: int = 0  # an exponent of D
    # Whether all blocks are equal, as those of positions that were broadcast.
    is_uniform: bool = False
    is_squeezed: bool = False  # whether `part`, of one row, has no dim of rows


@dataclass(frozen=True)
class Sum:
    """`whole` is `D**scale` times the sum of the parts."""

    scale: int = 0  # an exponent of D. 0: a sum over rows. -1: a mean over rows.


@dataclass(frozen=True)
class Zero:
    """`whole` and `part` are zeros, of any shape."""


@dataclass(frozen=True)
class RowIds:
    """`whole` counts rows along a dim from 0 on, and `part` counts those of the block from 0 on."""

    dim: int
    component: int | None = None  # in an array of indices, `Rows(dim)`, the one that is the count


@dataclass(frozen=True)
class FirstRow:
    """`part` is the number of rows before the block, everywhere, and `whole` is 0."""


@dataclass(frozen=True)
class Mixed:
    """`whole` follows from no part alone, as far as is known."""

    reason: str  # why, as a clause such as "`sort` reads all rows"
    source: str = ""  # the line of the user's program that says so, such as "model.py:12"

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


Relation = Whole | Rows | Sum | Zero | RowIds | FirstRow | Mixed

MEAN = Sum(-1)
"""The relation of a mean over rows."""


class MixesRowsError(Exception):
    """A value has none of the relations, for the reason that is the message."""


def row_dim(whole: Sequence[int], part: Sequence[int], num_blocks: int) -> int | None:
    """Returns the one dim in which two shapes differ, by the factor D; None if there is none."""
    if len(whole) != len(part):
        return None
    dims = [i for i, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if len(dims) != 1 or whole[dims[0]] != num_blocks * part[dims[0]]:
        return None
    return dims[0]


def has_shapes(
    relation: Relation, whole: Sequence[int], part: Sequence[int], num_blocks: int
) -> bool:
    """Returns whether two shapes are such as a relation says."""
    match relation:
        case Whole() | Sum():
            return tuple(whole) == tuple(part)
        case Rows(dim, is_squeezed=True):
            without = *whole[:dim], *whole[dim + 1 :]
            return whole[dim] == num_blocks and without == tuple(part)
        case Rows(dim) | RowIds(dim):
            return row_dim(whole, part, num_blocks) == dim
        case Zero() | FirstRow() | Mixed():
            return True


def zero_as(whole: Sequence[int], part: Sequence[int], num_blocks: int) -> Relation:
    """Returns zeros of these shapes as a relation that all rules know."""
    if tuple(whole) == tuple(part):
        return Whole()
    dim = row_dim(whole, part, num_blocks)
    if dim is None:
        raise MixesRowsError("zeros depend on the number of rows in several dims")
    return Rows(dim, is_uniform=True)


def relation_of_sum(relations: Iterable[Relation], *, dim: int | None) -> Relation:
    """Returns the relation of a sum, or selection, of values; the result has rows in `dim`."""
    terms = [relation for relation in relations if not isinstance(relation, Zero)]
    if not terms:
        return Zero()
    if any(isinstance(relation, Sum) for relation in terms):
        return _merge_sums(terms)
    scales, uniform = set(), True
    for relation in terms:
        match relation:
            case Whole(scale):
                scales.add(scale)
            case Rows(at, scale, is_uniform, is_squeezed=False) if at == dim:
                scales.add(scale)
                uniform = uniform and is_uniform
            case Mixed():
                raise MixesRowsError(relation.reason)
            case _:
                raise MixesRowsError("rows meet other rows")
    if len(scales) != 1:
        raise MixesRowsError("a value of a row meets one that depends on the number of rows")
    scale = scales.pop()
    return Whole(scale) if dim is None else Rows(dim, scale, uniform)


def _merge_sums(relations: Sequence[Relation]) -> Sum:
    scales = set()
    for relation in relations:
        match relation:
            case Sum(scale):
                scales.add(scale)
            case Whole(scale):  # the sum over D blocks of what is the same in all
                scales.add(scale - 1)
            case _:
                raise MixesRowsError("a sum over rows meets rows")
    if len(scales) != 1:
        raise MixesRowsError(
            "a sum over rows meets a mean, or a value that does not depend on rows"
        )
    return Sum(scales.pop())


def join(one: Relation, other: Relation) -> Relation:
    """Returns a relation that holds wherever one of two holds."""
    if one == other or isinstance(other, Zero) or isinstance(one, Mixed):
        return one
    if isinstance(one, Zero) or isinstance(other, Mixed):
        return other
    if isinstance(one, Rows) and isinstance(other, Rows):
        rows = replace(one, is_uniform=False)
        if rows == replace(other, is_uniform=False):
            return rows
    if isinstance(one, Whole | Sum) and isinstance(other, Whole | Sum):
        try:
            return _merge_sums([one, other])
        except MixesRowsError as error:
            return Mixed(str(error))
    return Mixed("a value depends on rows in one way or another")


def is_within(relation: Relation, required: Relation) -> bool:
    """Returns whether a value with a relation also has the required one."""
    return join(required, relation) == required


def dual(relation: Relation) -> Relation:
    """Returns the relation of the cotangents of a value."""
    # The loss of all rows is the sum of the losses of the blocks, so cotangents of what is the same
    # in all blocks add up.
    match relation:
        case Whole(scale):
            return Sum(-scale)
        case Sum(scale):
            return Whole(-scale)
        case Rows(dim, scale):
            return Rows(dim, -scale)
        case _:
            return relation


def at_source(relation: Relation, source: Callable[[], str]) -> Relation:
    """Returns a relation, which names the line if it is `Mixed` and names none yet."""
    if isinstance(relation, Mixed) and not relation.source:
        return replace(relation, source=source())
    return relation


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
