"""Follows rows through primitives that compute entry by entry, or over some dims.

A rule is `(pair of equations) -> relations of the results`. It raises `MixesRowsError` if they
have none.
"""

from collections.abc import Callable

import jax.numpy as jnp

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
)

Rule = Callable[[EquationPair], list[Relation]]

_ENTRYWISE = """
abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
clamp clz complex cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mulhi
ne nextafter not one_minus_square or polygamma polynomial population_count pow random_fold_in
random_seed random_unwrap random_wrap real regularized_incomplete_beta rem round rsqrt shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt tan tanh threefry2x32 xor zeta
"""

_LINEAR = """
conj copy device_put layout_constraint name neg optimization_barrier pcast pvary
reduce_precision reshard sharding_constraint stop_gradient
"""

_REDUCTIONS = "argmax argmin reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"

_ALONG = "cumsum cumprod cummax cummin cumlogsumexp sort top_k split"


def _entrywise(step: EquationPair) -> list[Relation]:
    """Follows any function of entries, of which only is known that it is the same for all rows."""
    step.require_same()
    relations = step.no_zeros()
    first = step.relations[0]
    counts = isinstance(first, FirstRow) or (isinstance(first, RowIds) and first.component is None)
    if counts and step.name == "lt" and isinstance(step.relations[1], Zero):
        return [Zero()]  # no count is negative
    dim = only_rows(relations, f"`{step.name}`")
    return [_out(step, dim, relations, i) for i in range(len(step.whole.outvars))]


def _out(
    step: EquationPair, dim: int | None, relations: tuple[Relation, ...], i: int = 0
) -> Relation:
    """Returns the relation of a result whose operands are whole, or have rows in `dim`."""
    at = step.row_dim_out(i)
    if dim is not None and at != dim:
        raise MixesRowsError(f"`{step.name}` moves rows")
    if at is None:
        return Whole()
    rows = (r for r in relations if isinstance(r, Rows))
    return Rows(at, is_uniform=all(r.is_uniform for r in rows))


def _linear(step: EquationPair) -> list[Relation]:
    """Follows a linear function of each entry of one operand."""
    step.require_same("sharding", "dst_sharding", "layout", "devices", "srcs", "copy_semantics")
    if step.name in ("neg", "reduce_precision"):
        for relation in step.relations:
            if isinstance(relation, RowIds | FirstRow):
                raise MixesRowsError("rows are counted")
    return list(step.relations)


def _convert(step: EquationPair) -> list[Relation]:
    (relation,) = step.relations
    old, new = step.whole.invars[0].aval.dtype, step.params["new_dtype"]
    exact = jnp.issubdtype(new, jnp.inexact) or (
        jnp.issubdtype(old, jnp.integer) and jnp.issubdtype(new, jnp.integer)
    )
    match relation:
        case Sum() if not exact:
            raise MixesRowsError("a sum over rows is rounded")
        case Whole(scale) | Rows(scale=scale) if scale and not exact:
            raise MixesRowsError("what depends on the number of rows is rounded")
        case RowIds() | FirstRow() if not jnp.issubdtype(new, jnp.integer):
            raise MixesRowsError("rows are counted")
    return [relation]


def _add(step: EquationPair) -> list[Relation]:
    dim = step.row_dim_out()
    match step.relations:
        case (RowIds(at, None), FirstRow()) | (FirstRow(), RowIds(at, None)):
            return [Rows(at)]  # the block counts on from its first row
    total = relation_of_sum(step.relations, dim=dim)
    if isinstance(total, Sum) and dim is not None:
        raise MixesRowsError("a sum over rows is broadcast to rows")
    return [total]


def _select(step: EquationPair) -> list[Relation]:
    """Follows `select_n`, which selects one of several cases, for every entry or for all."""
    predicate, *cases = step.relations
    only_rows((predicate,), "a selection")
    dim = step.row_dim_out()
    selected = relation_of_sum(cases, dim=dim)
    if isinstance(selected, Sum | Zero) or not isinstance(predicate, Rows):
        return [selected]
    assert dim is not None
    if predicate.dim != dim:
        raise MixesRowsError("a selection moves rows")
    scale = selected.scale if isinstance(selected, Whole | Rows) else 0
    uniform = predicate.is_uniform and (not isinstance(selected, Rows) or selected.is_uniform)
    return [Rows(dim, scale, uniform)]


def _scales(step: EquationPair, relations: tuple[Relation, ...], sign: int) -> list[Relation]:
    """Follows a product of two operands, or a quotient if `sign` is -1."""
    left, right = relations
    dim = step.row_dim_out()
    match left, right:
        case Sum(scale), Whole(by):
            product: Relation = Sum(scale + sign * by)
        case Whole(by), Sum(scale) if sign == 1:
            product = Sum(scale + by)
        case ((Whole(a) | Rows(scale=a)), (Whole(b) | Rows(scale=b))):
            rows = [r for r in relations if isinstance(r, Rows)]
            if any(r.is_squeezed or r.dim != dim for r in rows):
                raise MixesRowsError("rows meet other rows")
            scale = a + sign * b
            uniform = all(r.is_uniform for r in rows)
            product = Whole(scale) if dim is None else Rows(dim, scale, uniform)
        case _:
            verb = "multiplied by" if sign == 1 else "divided by"
            raise MixesRowsError(f"{described(left)} is {verb} {described(right)}")
    if isinstance(product, Sum) and dim is not None:
        raise MixesRowsError("a sum over rows is broadcast to rows")
    return [product]


def _div(step: EquationPair) -> list[Relation]:
    relations = step.no_zeros()
    if not jnp.issubdtype(step.whole.outvars[0].aval.dtype, jnp.inexact):
        return _entrywise(step)  # rounds
    return _scales(step, relations, -1)


def _power(step: EquationPair) -> list[Relation]:
    """Follows `square` and `integer_pow`."""
    step.require_same()
    power = step.params.get("y", 2)
    match step.no_zeros()[0]:
        case Whole(scale):
            return [Whole(scale * power)]
        case Rows(dim, scale, uniform, is_squeezed=False):
            return [Rows(dim, scale * power, uniform)]
        case Sum(scale) if power == 1:
            return [Sum(scale)]
        case relation:
            raise MixesRowsError(f"{described(relation)} is taken to the power of {power}")


def without_dims(dim: int, dims: tuple[int, ...]) -> int:
    return dim - sum(other < dim for other in dims)


def _reduce_sum(step: EquationPair) -> list[Relation]:
    step.require_same("out_sharding")
    axes = ints(step.params["axes"])
    relation = step.relations[0]
    match relation:
        case Rows(dim, scale, uniform, is_squeezed=False):
            if dim not in axes:
                return [Rows(without_dims(dim, axes), scale, uniform)]
            return [Whole(scale + 1) if uniform else Sum(scale)]
        case Whole() | Sum() | Zero():
            return [relation]
    raise MixesRowsError(f"{described(relation)} is summed")


def _reduce(step: EquationPair) -> list[Relation]:
    """Follows reductions other than sums, and `argmax` and `argmin`."""
    step.require_same("out_sharding")
    axes, relation = ints(step.params["axes"]), step.no_zeros()[0]
    dim = only_rows((relation,), f"`{step.name}`")
    if dim is None:
        return [Whole()]
    uniform = isinstance(relation, Rows) and relation.is_uniform
    if dim not in axes:
        return [Rows(without_dims(dim, axes), is_uniform=uniform)]
    if uniform and step.name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or"):
        return [Whole()]
    raise MixesRowsError(f"`{step.name}` goes over rows")


def _dot_general(step: EquationPair) -> list[Relation]:
    step.require_same("out_sharding")
    (contracted, batch) = (tuple(map(ints, dims)) for dims in step.params["dimension_numbers"])
    left, right = step.no_zeros()
    ranks = len(step.shape_in(0)), len(step.shape_in(1))
    pairs = list(zip(*contracted, strict=True))
    batch_pairs = list(zip(*batch, strict=True))
    match left, right:
        case (Sum(a), Whole(b)) | (Whole(b), Sum(a)):
            return [Sum(a + b)]
        case Whole(a), Whole(b):
            return [Whole(a + b)]
        case Rows(i, a, u, is_squeezed=False), Rows(j, b, v, is_squeezed=False):
            if (i, j) in pairs:
                return [Whole(a + b + 1) if u and v else Sum(a + b)]
            if (i, j) in batch_pairs:
                return [Rows(batch_pairs.index((i, j)), a + b, u and v)]
        case Rows(i, a, u, is_squeezed=False), Whole(b):
            free = [d for d in range(ranks[0]) if d not in (*contracted[0], *batch[0])]
            if i in free:
                return [Rows(len(batch[0]) + free.index(i), a + b, u)]
        case Whole(a), Rows(j, b, v, is_squeezed=False):
            free = [d for d in range(ranks[1]) if d not in (*contracted[1], *batch[1])]
            if j in free:
                before = ranks[0] - len(contracted[0])
                return [Rows(before + free.index(j), a + b, v)]
    raise MixesRowsError(f"a product of {described(left)} and {described(right)} mixes rows")


def _along(step: EquationPair) -> list[Relation]:
    """Follows functions along one dim, which treat all other dims entry by entry."""
    step.require_same("out_sharding")
    names = ("axis", "dimension", "reduction_dimension")
    along = next(step.params[name] for name in names if name in step.params)
    relations = step.no_zeros()
    linear = step.name in ("cumsum", "split")
    if linear and isinstance(relations[0], Sum):
        return [relations[0]] * len(step.whole.outvars)
    if linear and isinstance(relations[0], Rows | Whole):
        scale = relations[0].scale
        dim = relations[0].dim if isinstance(relations[0], Rows) else None
        if isinstance(relations[0], Rows) and relations[0].is_squeezed:
            raise MixesRowsError(f"`{step.name}` mixes rows")
    else:
        scale, dim = 0, only_rows(relations, f"`{step.name}`")
    if dim == along:
        raise MixesRowsError(f"`{step.name}` goes along rows")
    if dim is None:
        return [Whole(scale)] * len(step.whole.outvars)
    uniform = all(r.is_uniform for r in relations if isinstance(r, Rows))
    return [Rows(dim, scale, uniform)] * len(step.whole.outvars)


_TRAILING_DIMS = {
    "cholesky": 2,
    "eig": 2,
    "eigh": 2,
    "fft": None,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "qr": 2,
    "svd": 2,
    "triangular_solve": 2,
}
"""Functions of the last dims of operands whose dims before are the same; None: as `fft` says."""


def _of_trailing_dims(step: EquationPair) -> list[Relation]:
    step.require_same()
    count = _TRAILING_DIMS[step.name]
    count = len(step.params["fft_lengths"]) if count is None else count
    relations = step.no_zeros()
    dim = only_rows(relations, f"`{step.name}`")
    if dim is None:
        return [Whole()] * len(step.whole.outvars)
    ranks = {len(step.shape_in(i)) for i in range(len(relations))}
    if len(ranks) > 1 or dim >= min(ranks) - count:
        raise MixesRowsError(f"`{step.name}` goes over rows")
    return [Rows(dim)] * len(step.whole.outvars)


def _convolution(step: EquationPair) -> list[Relation]:
    step.require_same()
    image, kernel = step.no_zeros()
    dims = step.params["dimension_numbers"]
    match image, kernel:
        case (Sum(a), Whole(b)) | (Whole(b), Sum(a)):
            return [Sum(a + b)]
        case Whole(a), Whole(b):
            return [Whole(a + b)]
        case Rows(dim, a, uniform, is_squeezed=False), Whole(b):
            if dim == dims.lhs_spec[0] and step.params["batch_group_count"] == 1:
                return [Rows(int(dims.out_spec[0]), a + b, uniform)]
    raise MixesRowsError("a convolution goes over rows")


def _windows(step: EquationPair) -> list[Relation]:
    """Follows reductions over windows, each of which must have one row."""
    step.require_same()
    relations = step.no_zeros()
    dim = only_rows(relations, f"`{step.name}`")
    if dim is None:
        return [Whole()] * len(step.whole.outvars)
    params = step.params
    plain = (
        params["window_dimensions"][dim] == 1
        and params["window_strides"][dim] == 1
        and tuple(params["padding"][dim]) == (0, 0)
        and params.get("base_dilation", {dim: 1})[dim] == 1
        and params.get("window_dilation", {dim: 1})[dim] == 1
    )
    if not plain or "jaxpr" in params:
        raise MixesRowsError(f"`{step.name}` goes over rows")
    return [Rows(dim)] * len(step.whole.outvars)


def _random_bits(step: EquationPair) -> list[Relation]:
    """Follows bits that are drawn by one key, or by a key for each row."""
    step.require_same("shape")
    relation = step.no_zeros()[0]
    dim = only_rows((relation,), f"`{step.name}`")
    at = step.row_dim_out()
    if at != dim:
        raise MixesRowsError("random bits are drawn for all rows at once")
    return [Whole() if dim is None else Rows(dim)]


ARITHMETIC: dict[str, Rule] = {
    **dict.fromkeys(_ENTRYWISE.split(), _entrywise),
    **dict.fromkeys(_LINEAR.split(), _linear),
    "add_any": _add,
    "add": _add,
    "sub": _add,
    "mul": lambda step: _scales(step, step.no_zeros(), 1),
    "div": _div,
    "square": _power,
    "integer_pow": _power,
    "select_n": _select,
    "convert_element_type": _convert,
    "reduce_sum": _reduce_sum,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys(_ALONG.split(), _along),
    **dict.fromkeys(_TRAILING_DIMS, _of_trailing_dims),
    **dict.fromkeys(["reduce_window_sum", "reduce_window_max", "reduce_window_min"], _windows),
    **dict.fromkeys(("random_bits", "random_split"), _random_bits),
}
