"""What the layer and the loss of a model of plain functions do, by their jaxprs."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import PyTree

from ..autodiff.backward import floating
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


def residual_bytes(layer: Callable, weights: PyTree, x: PyTree, *others: PyTree) -> int:
    """Returns the bytes that the forward of a layer stores for its backward beside its input.

    This is without rematerialization. Compilers do not store what the backward does not read, nor
    what depends on neither weights nor x, such as the mask of attention, which all layers share.
    """

    def run(weights: PyTree, x: PyTree) -> PyTree:
        return floating(layer(weights, x, *others))

    def residuals(weights: PyTree, x: PyTree, others: PyTree) -> list[Any]:
        _, pullback = jax.vjp(lambda w, x: floating(layer(w, x, *others)), weights, x)
        return jax.tree.leaves(pullback)

    closed = jax.make_jaxpr(residuals)(weights, x, others)
    _, pullback = jax.eval_shape(partial(jax.vjp, run), weights, x)
    is_read = _is_read(pullback, jax.eval_shape(run, weights, x))
    per_layer = closed.jaxpr.invars[: len(jax.tree.leaves((weights, x)))]
    changing = _dependent(closed.jaxpr, set(per_layer))
    stored = {
        v
        for v, read in zip(closed.jaxpr.outvars, is_read, strict=True)
        if read and isinstance(v, Var) and v in changing and v not in per_layer
    }
    avals: list[Any] = [v.aval for v in stored]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def _is_read(pullback: PyTree, y: PyTree) -> list[bool]:
    """Returns for each array that a pullback holds whether its results depend on it."""
    leaves, tree = jax.tree.flatten(pullback)
    jaxpr = jax.make_jaxpr(lambda leaves, dy: jax.tree.unflatten(tree, leaves)(dy))(leaves, y).jaxpr
    _, is_read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return is_read[: len(leaves)]


def _dependent(jaxpr: Any, inputs: set[Var]) -> set[Var]:
    """Returns the variables that depend on these inputs, with the inputs."""
    dependent = set(inputs)
    for eqn in jaxpr.eqns:
        depend = [isinstance(v, Var) and v in dependent for v in eqn.invars]
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"].jaxpr
            reached = {v for v, does in zip(inner.invars, depend, strict=True) if does}
            reached = _dependent(inner, reached)
            pairs = zip(eqn.outvars, inner.outvars, strict=True)
            dependent |= {v for v, of in pairs if isinstance(of, Var) and of in reached}
        elif any(depend):
            dependent |= set(eqn.outvars)
    return dependent
