"""What the layer and the loss of a model of plain functions do, by their jaxprs."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var
from jaxtyping import PyTree

from .._compat import jaxprs_in_params
from ..cost.work import Product
from ..ir.graph import repeated_equations, terms_of_product


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
        for inner in jaxprs_in_params(eqn.params):
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
    for eqn, times in repeated_equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        count += 1
        terms = terms_of_product(eqn)
        if terms is not None:
            products.append(_product(terms, eqn.outvars[0].aval.size / tokens, times))
        else:
            moved += times * sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
    return RowWork(tuple(products), moved / tokens, count)


def _product(k: int, columns: float, times: int) -> Product:
    """Returns a product that has so many columns for each token, perhaps less than one."""
    n = max(1, math.ceil(columns))
    whole = columns == n
    return Product(k, n, "none", times if whole else times * columns / n)
