"""Follows rows through primitives that move entries: shapes, slices, gathers and scatters."""

import math
from collections.abc import Callable, Sequence

from ._arithmetic import Rule, without_dims
from ._relations import (
    EquationPair,
    FirstRow,
    MixesRowsError,
    Relation,
    RowIds,
    Rows,
    Sum,
    Whole,
    Zero,
    described,
    ints,
    only_rows,
    relation_of_sum,
    row_dim,
)


def _iota(step: EquationPair) -> list[Relation]:
    dim = step.row_dim_out()
    if dim is None:
        step.require_same()
        return [Whole()]
    step.require_same("shape", "sharding")
    if step.params["dimension"] != dim:
        return [Rows(dim, is_uniform=True)]
    return [RowIds(dim)]


def _broadcast(step: EquationPair) -> list[Relation]:
    step.require_same("shape", "sharding")
    relation, dims = step.relations[0], ints(step.params["broadcast_dimensions"])
    at = step.row_dim_out() if not isinstance(relation, Zero) else None
    match relation:
        case Zero() | FirstRow():
            return [relation]
        case Rows(dim, scale, uniform, is_squeezed=False) if dims[dim] == at:
            return [Rows(dims[dim], scale, uniform)]
        case RowIds(dim, None) if dims[dim] == at:
            return [RowIds(dims[dim])]
        case Whole(scale):
            # The dim of rows is new, or of size 1 before: a dim of n would not fit to n * D.
            return [relation if at is None else Rows(at, scale, is_uniform=True)]
        case Sum() if at is None:
            return [relation]
    raise MixesRowsError(f"{described(relation)} is broadcast to the number of rows")


def _reshape(step: EquationPair) -> list[Relation]:
    relation = step.relations[0]
    if step.params.get("dimensions") is not None:
        raise MixesRowsError("`reshape` permutes dims")
    whole, part = step.shapes_out()
    if isinstance(relation, Zero) or (whole == part and isinstance(relation, Whole | Sum)):
        return [relation]
    if isinstance(relation, Rows):
        rows = reshaped(relation, step.shape_in(0), whole, part, step.num_blocks)
        if rows is not None:
            return [rows]
    if isinstance(relation, RowIds) and relation.component is None:
        at, shape = row_dim(whole, part, step.num_blocks), step.shape_in(0)
        before = math.prod(shape[: relation.dim]), shape[relation.dim]
        if at is not None and (math.prod(whole[:at]), whole[at]) == before:
            return [RowIds(at)]
    raise MixesRowsError("a reshape puts rows behind another dim")


def reshaped(
    relation: Rows, shape: Sequence[int], whole: Sequence[int], part: Sequence[int], num_blocks: int
) -> Rows | None:
    """Returns the relation of rows reshaped from `shape`; None if they move behind another dim."""
    # A block of rows is a run of entries before and after, if rows stay the major factor of a dim.
    if relation.is_squeezed:
        return None
    before, at = math.prod(shape[: relation.dim]), row_dim(whole, part, num_blocks)
    if at is not None and math.prod(whole[:at]) == before:
        return Rows(at, relation.scale, relation.is_uniform)
    for dim in range(len(whole)):
        without_rows = (*whole[:dim], *whole[dim + 1 :]) == tuple(part)
        if whole[dim] == num_blocks and without_rows and math.prod(whole[:dim]) == before:
            return Rows(dim, relation.scale, relation.is_uniform, is_squeezed=True)
    return None


def _moved(step: EquationPair, to: Callable[[int], int | None], reason: str) -> list[Relation]:
    """Follows a function that moves the dim of rows, or may not be applied to it (None)."""
    step.require_same()
    relation = step.relations[0]
    match relation:
        case Rows(dim, scale, uniform, is_squeezed=False) if (moved := to(dim)) is not None:
            return [Rows(moved, scale, uniform)]
        case Whole() | Sum() | Zero():
            return [relation]
    raise MixesRowsError(reason)


def _transpose(step: EquationPair) -> list[Relation]:
    order = ints(step.params["permutation"])
    return _moved(step, order.index, f"{described(step.relations[0])} is transposed")


def _squeeze(step: EquationPair) -> list[Relation]:
    relation, dims = step.relations[0], ints(step.params["dimensions"])

    def to(dim: int) -> int | None:
        return None if dim in dims else without_dims(dim, dims)

    match relation:
        case RowIds(dim, None) if (moved := to(dim)) is not None:
            step.require_same()
            return [RowIds(moved)]
    return _moved(step, to, "a squeeze drops the dim of rows")


def _reverse(step: EquationPair) -> list[Relation]:
    dims = step.params["dimensions"]
    return _moved(step, lambda dim: None if dim in dims else dim, "rows are reversed")


def _slice(step: EquationPair) -> list[Relation]:
    relation = step.relations[0]
    match relation:
        case Zero():
            return [relation]
        case Whole() | Sum():
            step.require_same()
            return [relation]
        case Rows(dim, is_squeezed=False):
            step.require_same("limit_indices")
            starts, strides = step.params["start_indices"], step.params["strides"]
            plain = starts[dim] == 0 and (strides is None or strides[dim] == 1)
            full = step.shapes_out()[0][dim] == step.shape_in(0)[dim]
            # Other limits are the same if the shapes of the results are.
            if plain and full and step.row_dim_out() == dim:
                return [relation]
    raise MixesRowsError("a slice selects rows")


def _pad(step: EquationPair) -> list[Relation]:
    step.require_same()
    relation, value = step.relations
    dim = step.row_dim_out()
    padded = relation_of_sum(step.relations, dim=dim)
    match relation:
        case Rows(at, is_squeezed=False):
            if at != dim or tuple(step.params["padding_config"][at]) != (0, 0, 0):
                raise MixesRowsError("rows are padded")
            if isinstance(value, Whole) and isinstance(padded, Rows):
                return [Rows(padded.dim, padded.scale, padded.is_uniform)]
        case Zero() if dim is not None and not isinstance(value, Zero):
            raise MixesRowsError("the number of rows decides how much is padded")
    return [padded]


def _concatenate(step: EquationPair) -> list[Relation]:
    step.require_same()
    along, dim = step.params["dimension"], step.row_dim_out()
    if dim is not None and along == dim:
        raise MixesRowsError("rows are concatenated")
    counted = [i for i, r in enumerate(step.relations) if isinstance(r, RowIds)]
    if counted:
        return [_indices(step, counted, dim)]
    zeros = Whole() if dim is None else Rows(dim, is_uniform=True)
    pairs = zip(step.relations, step.no_zeros(), strict=True)
    if any(isinstance(r, Zero) and shaped != zeros for r, shaped in pairs):
        raise MixesRowsError("the number of rows decides how many zeros are concatenated")
    return [relation_of_sum(step.relations, dim=dim)]


def _stack(step: EquationPair) -> list[Relation]:
    step.require_same()
    axis = step.params["axis"]

    def moved(relation: Relation) -> Relation:
        match relation:
            case Rows(dim, scale, uniform, is_squeezed=False):
                return Rows(dim + (axis <= dim), scale, uniform)
        return relation

    return [relation_of_sum(map(moved, step.relations), dim=step.row_dim_out())]


def _unstack(step: EquationPair) -> list[Relation]:
    axis = step.params["axis"]
    to = lambda dim: None if dim == axis else without_dims(dim, (axis,))  # noqa: E731
    return _moved(step, to, "rows are taken apart") * len(step.whole.outvars)


def _tile(step: EquationPair) -> list[Relation]:
    relation, dim = step.relations[0], step.row_dim_out()
    reps, reps_of_part = ints(step.params["reps"]), ints(step.part.params["reps"])
    rank = len(step.shape_in(0))
    if len(reps) != rank or any(reps[i] != reps_of_part[i] for i in range(rank) if i != dim):
        raise MixesRowsError("`tile` depends on the number of rows")
    match relation:
        case Rows(at, is_squeezed=False) if at == dim and reps[at] == reps_of_part[at] == 1:
            return [relation]
        case Whole(scale):
            return [relation if dim is None else Rows(dim, scale, is_uniform=True)]
        case Sum() if dim is None:
            return [relation]
    raise MixesRowsError(f"{described(relation)} is repeated")


def _indices(step: EquationPair, counted: list[int], dim: int | None) -> Relation:
    """Returns the relation of vectors of indices, one of which is that of the row."""
    index_relations = tuple(r for i, r in enumerate(step.no_zeros()) if i not in counted)
    relation = step.relations[counted[0]]
    last = len(step.shapes_out()[0]) - 1
    sizes = [step.shape_in(i)[-1] for i in range(len(step.relations))]
    is_plain = (
        len(counted) == 1
        and isinstance(relation, RowIds)
        and relation.component is None
        and relation.dim == dim
        and step.params["dimension"] == last
        and sizes[counted[0]] == 1
        and only_rows(index_relations, "an index") in (dim, None)
    )
    if not is_plain or dim is None:
        raise MixesRowsError("rows are counted")
    return RowIds(dim, sum(sizes[: counted[0]]))


def _dynamic_slice(step: EquationPair) -> list[Relation]:
    relation, *starts = step.no_zeros()
    dim = step.row_dim_out()
    if dim is not None and relation == Whole() and starts[dim] == FirstRow():
        others = [start for i, start in enumerate(starts) if i != dim]
        if all(start == Whole() for start in others):
            return [Rows(dim)]  # the rows of the block, as it begins with its first
    only_rows(tuple(starts), "the start of a slice")
    sizes = step.params["slice_sizes"]
    if isinstance(step.relations[0], Zero):
        return [Zero()]
    match relation:
        case Rows(dim, is_squeezed=False):
            # A slice of the full size begins at 0, whatever its start.
            if sizes[dim] == step.shape_in(0)[dim] and step.row_dim_out() == dim:
                return [relation]
            raise MixesRowsError("a slice selects rows")
        case Whole() | Sum():
            step.require_same()
            return [relation]
    raise MixesRowsError(f"a slice of {described(relation)}")


def _dynamic_update_slice(step: EquationPair) -> list[Relation]:
    step.require_same()
    starts = step.no_zeros()[2:]
    only_rows(tuple(starts), "the start of a slice")
    dim = step.row_dim_out()
    if dim is not None and step.shape_in(1)[dim] != step.shape_in(0)[dim]:
        raise MixesRowsError("an update of some rows")
    return [relation_of_sum(step.no_zeros()[:2], dim=dim)]


def _gather(step: EquationPair) -> list[Relation]:
    operand, indices = step.no_zeros()
    numbers = step.params["dimension_numbers"]
    rank_out = len(step.shapes_out()[0])
    batch_out = [d for d in range(rank_out) if d not in numbers.offset_dims]
    pairs = [*zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)]
    match operand, indices:
        case Rows(dim, scale, is_squeezed=False), Rows(at, 0, is_squeezed=True):
            if (dim, at) in pairs and _is_without_row(step, dim, at, batch_out[at]):
                return [Rows(batch_out[at], scale)]
            raise MixesRowsError("a gather goes over rows")
    step.require_same("slice_sizes")
    fill = step.params["fill_value"]
    if not (fill is None or fill != fill or fill == 0):
        only_rows((operand,), "a gather with another fill value than 0")
    sizes, other_sizes = step.params["slice_sizes"], step.part.params["slice_sizes"]
    match operand, indices:
        case Whole() | Sum(), Whole(0):
            step.require_same()
            return [operand]
        case Whole(scale), Rows(at, 0, uniform, is_squeezed=False):
            step.require_same()
            inner = [d for _, d in pairs]
            if at < len(step.shape_in(1)) - 1 and at not in inner:
                return [Rows(batch_out[at], scale, uniform)]
        case Rows(dim, scale, uniform, is_squeezed=False), Whole(0):
            offsets = dict(_offsets(numbers, len(sizes)))
            full = sizes[dim] == step.shape_in(0)[dim]
            same = all(sizes[i] == other_sizes[i] for i in range(len(sizes)) if i != dim)
            if dim in offsets and full and same and dim not in numbers.start_index_map:
                return [Rows(int(offsets[dim]), scale, uniform)]
        case Rows(dim, scale, is_squeezed=False), Rows(at, 0, is_squeezed=False):
            step.require_same()
            if (dim, at) in pairs:
                return [Rows(batch_out[at], scale)]
        case Rows(dim, scale, is_squeezed=False), RowIds(at, int(component)):
            step.require_same()
            is_row = numbers.start_index_map[component] == dim
            as_many = step.shape_in(0)[dim] == step.shape_in(1)[at]  # no dim is merged into rows
            if is_row and as_many and dim in numbers.collapsed_slice_dims:
                return [Rows(batch_out[at], scale)]
    raise MixesRowsError("a gather goes over rows")


def _is_without_row(step: EquationPair, dim: int, at: int, out: int) -> bool:
    """Returns whether `part` gathers like `whole`, from its one row by a slice of that row."""
    a, b = step.params["dimension_numbers"], step.part.params["dimension_numbers"]
    step.require_same("dimension_numbers")
    batching = [
        (i, j - (j > at))
        for i, j in zip(a.operand_batching_dims, a.start_indices_batching_dims, strict=True)
        if i != dim
    ]
    batching_of_part = [*zip(b.operand_batching_dims, b.start_indices_batching_dims, strict=True)]
    return (
        step.row_dim_out() == out
        and batching_of_part == batching
        and tuple(b.offset_dims) == tuple(sorted((*a.offset_dims, out)))
        and tuple(b.collapsed_slice_dims) == tuple(a.collapsed_slice_dims)
        and tuple(b.start_index_map) == tuple(a.start_index_map)
        and dim not in a.start_index_map
        and step.params["slice_sizes"][dim] == 1
        # The row is the first of the dims of a slice, so it comes where the batch dim is.
        and all((d < dim) == (o < out) for d, o in _offsets(a, len(step.shape_in(0))))
    )


def _offsets(numbers: object, rank: int) -> list[tuple[int, int]]:
    """Returns the dims of a slice with their dims in the result."""
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)  # pyright: ignore
    kept = [d for d in range(rank) if d not in gone]
    return list(zip(kept, numbers.offset_dims, strict=True))  # pyright: ignore


def _scatter(step: EquationPair) -> list[Relation]:
    step.require_same("update_jaxpr", "update_consts")
    operand = step.relations[0]
    _, indices, updates = step.no_zeros()
    is_linear = step.name == "scatter-add" or (
        step.name == "scatter" and step.params["update_jaxpr"] is None
    )
    numbers = step.params["dimension_numbers"]
    rank = len(step.shapes_out()[0])
    shape_updates = step.shape_in(2)
    batch = [d for d in range(len(shape_updates)) if d not in numbers.update_window_dims]
    pairs = list(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    dim = step.row_dim_out()
    if dim is None:
        match indices, updates:
            case Whole(0), _:
                total = relation_of_sum((operand, updates), dim=None)
                if total == Whole() or is_linear:
                    return [total]
            case Rows(at, 0, is_squeezed=False), Rows(up, scale, is_squeezed=False):
                if step.name == "scatter-add" and at < len(batch) and batch[at] == up:
                    return [relation_of_sum((operand, Sum(scale)), dim=None)]
        raise MixesRowsError(f"`{step.name}` of rows to one place")
    relation_of_sum((operand, Rows(dim)), dim=dim)  # raises if they have other rows
    match indices, updates:
        case Rows(at, 0, is_squeezed=False), Rows(up, 0, is_squeezed=False):
            if (dim, at) in pairs and batch[at] == up:
                return [Rows(dim)]
        case Whole(0), Rows(up, 0, is_squeezed=False):
            gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
            kept = [d for d in range(rank) if d not in gone]
            if dim in kept and dim not in numbers.scatter_dims_to_operand_dims:
                full = shape_updates[up] == step.shapes_out()[0][dim]
                if full and numbers.update_window_dims[kept.index(dim)] == up:
                    return [Rows(dim)]
    raise MixesRowsError(f"`{step.name}` mixes rows")


MOVES: dict[str, Rule] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "rev": _reverse,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-min", "scatter-max", "scatter-mul"), _scatter
    ),
}
