"""What the layer and the loss of a model of plain functions do, by their jaxprs."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var
from jaxtyping import PyTree

from ..cost.work import Product


class RowWork(NamedTuple):
    """What a function does with one row, by its jaxpr."""

    products: tuple[Product, ...]
    moved_bytes: float
    num_equations: int


def bytes_as_read(layer: Callable, weights: PyTree, own: PyTree, *others: PyTree) -> float:
    """Returns the bytes of a weight as a layer reads it, the mean over its own weights.

    XLA casts a weight before it gathers it if the layer reads nothing but a narrower cast.
    """
    leaves = [id(leaf) for leaf in jax.tree.leaves(own)]
    jaxpr = jax.make_jaxpr(layer)(weights, *others).jaxpr
    inputs = zip(jax.tree.leaves(weights), jaxpr.invars, strict=False)
    total = sum(_read_bytes(jaxpr, v) * leaf.size for leaf, v in inputs if id(leaf) in leaves)
    return total / max(1, sum(leaf.size for leaf in jax.tree.leaves(own)))


def _read_bytes(jaxpr: Any, weight: Var) -> int:
    """Returns the bytes of an element of what the equations read of a weight."""
    aval: Any = weight.aval
    sizes = []
    for eqn in jaxpr.eqns:
        for inner in (sub for value in eqn.params.values() for sub in _jaxprs(value)):
            if len(inner.invars) == len(eqn.invars):
                pairs = zip(eqn.invars, inner.invars, strict=True)
                sizes += [_read_bytes(inner, own) for v, own in pairs if v is weight]
                break
        else:
            if any(v is weight for v in eqn.invars):
                is_cast = eqn.primitive.name == "convert_element_type"
                sizes.append(eqn.outvars[0].aval.dtype.itemsize if is_cast else aval.dtype.itemsize)
    return min(aval.dtype.itemsize, max(sizes, default=aval.dtype.itemsize))


def trace(function: Callable, tokens: int, *arguments: PyTree) -> RowWork:
    """Counts the matrix products of a function and what its other equations write."""
    products, moved, count = [], 0.0, 0
    for eqn, times in _equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        out = eqn.outvars[0].aval
        count += 1
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            k = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
            products.append(_product(k, out.size / tokens, times))
        elif eqn.primitive.name == "conv_general_dilated":
            kernel, dims = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec
            products.append(
                _product(kernel.size // kernel.shape[dims[0]], out.size / tokens, times)
            )
        else:
            moved += times * sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
    return RowWork(tuple(products), moved / tokens, count)


def _product(k: int, columns: float, times: int) -> Product:
    """Returns a product that has so many columns for each token, perhaps less than one."""
    n = max(1, math.ceil(columns))
    whole = columns == n
    return Product(k, n, "none", times if whole else times * columns / n)


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields the equations that compute, with how often they run."""
    for eqn in jaxpr.eqns:
        inner = [sub for value in eqn.params.values() for sub in _jaxprs(value)]
        if not inner:
            if all(hasattr(v.aval, "dtype") and hasattr(v.aval, "size") for v in eqn.outvars):
                yield eqn, times
            continue
        repeats = _repeats(eqn)
        branches = inner[:1] if eqn.primitive.name in ("cond", "custom_vjp_call") else inner
        for sub in branches:
            yield from _equations(sub, times * repeats)


def _repeats(eqn: Any) -> int:
    """Returns the iterations of a loop or of a kernel; 1 where the jaxpr does not say."""
    if eqn.primitive.name == "pallas_call":
        grid = eqn.params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    return eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1


def _jaxprs(value: Any) -> list[Any]:
    """Returns the jaxprs among the values of a parameter."""
    values = value if isinstance(value, tuple | list) else (value,)
    opened = [getattr(item, "jaxpr", item) for item in values]
    return [item for item in opened if hasattr(item, "eqns")]
