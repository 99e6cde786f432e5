"""What the layer and the loss of a model of plain functions do, by their jaxprs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var
from jaxtyping import PyTree

from .._compat import jaxprs_in_params
from ..cost.work import Attention, Product, backward_products
from ..ir.graph import (
    Cond,
    Eqn,
    Graph,
    PrimitiveCall,
    Scan,
    ShardMap,
    repeats_of,
    taps_of_product,
    terms_of_product,
    to_graph,
)
from ..kernels import ATTENTION
from ._divided import divided

_RECEIVED = {"all_gather": "outvars", "reduce_scatter": "invars", "all_to_all": "invars"}
"""Collectives, and on which side of the equation are the arrays of all devices."""
_SUMS = ("psum", "psum2", "psum_invariant")


class RowWork(NamedTuple):
    """What a function does with a token, by its jaxpr.

    Attributes:
        products: The matrix products of a token.
        attention: Its attention by a kernel, if it has any.
        gathered_bytes: Bytes of all devices that a device gathers or scatters, by collectives that
            the function has itself.
        itemsize: Bytes of a number that its products make, of the widest.
        num_sums: Products whose results are summed over `tensor`.
    """

    products: tuple[Product, ...]
    attention: Attention | None
    gathered_bytes: float
    itemsize: int
    num_sums: int


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


def trace(
    function: Callable,
    tokens: int,
    *arguments: PyTree,
    dims: Sequence[int | None] = (),
    parts: int = 1,
) -> RowWork:
    """Counts what a function does with rows of so many tokens.

    A `jax.shard_map` is one over all devices, each of which has its share of the tokens. `dims` are
    the dims of weights, its first inputs, that `tensor` divides into `parts`.
    """
    products, attentions, gathered, itemsize = [], [], 0.0, 0
    graph = to_graph(jax.make_jaxpr(function)(*arguments), prints=True)
    of_tensor = divided(graph, dims)
    for node, eqn, times in _repeated(graph):
        terms = terms_of_product(eqn)
        if eqn.primitive is ATTENTION:
            attentions.append(_attention(eqn, times / tokens))
        elif terms is not None:
            columns = eqn.outvars[0].aval.size / tokens
            product = _product(terms, columns, times, taps_of_product(eqn))
            split = of_tensor.splits.get(id(node), "none")
            if split == "none":  # which is taken for one that divides tokens
                product = replace(product, copies=parts * product.copies)
            products.append(replace(product, split=split))
            itemsize = max(itemsize, eqn.outvars[0].aval.dtype.itemsize)
        else:
            gathered += times * _gathered_bytes(eqn)
    attention = reduce(_both, attentions) if attentions else None
    gathered /= tokens
    return RowWork(
        products=tuple(products),
        attention=attention,
        gathered_bytes=gathered,
        itemsize=itemsize,
        num_sums=len(of_tensor.sums),
    )


def _repeated(graph: Graph, times: int = 1) -> Iterator[tuple[Eqn, Any, int]]:
    """Yields the equations of a graph and of bodies of loops, as JAX has them, and how often."""
    for eqn in graph.eqns:
        match eqn.operation:
            case Scan(body=body, length=length):
                yield from _repeated(body, times * length)
            case ShardMap(body=body) as mapped:
                yield from _repeated(body, times * mapped.num_devices)
            case Cond(branches=(body, *_)):
                yield from _repeated(body, times)
            case PrimitiveCall(equation=equation) if equation is not None:
                yield from ((eqn, *pair) for pair in repeats_of(equation, times))


def _gathered_bytes(eqn: Any) -> float:
    """Returns the bytes that a collective gathers or scatters; a sum does both."""
    name = eqn.primitive.name
    if name not in _RECEIVED and name not in _SUMS:
        return 0.0
    arrays = getattr(eqn, _RECEIVED.get(name, "outvars"))
    return (1 + (name in _SUMS)) * sum(v.aval.size * v.aval.dtype.itemsize for v in arrays)


def _attention(eqn: Any, times: float) -> Attention:
    """Returns the attention of an equation that runs so many times for each token."""
    q, k, v = (v.aval for v in eqn.invars[:3])
    plan, times = eqn.params["plan"], times * q.shape[0] * q.shape[1]
    window = (plan.scores.window or 0) * (1 if plan.scores.causal else 2)
    window = window if window < q.shape[1] else 0
    is_whole = (not plan.scores.causal and not window) or plan.computes_whole_square
    return Attention(
        heads=round(times * q.shape[2]),
        qk_channels=q.shape[3],
        v_channels=v.shape[3],
        kv_channels=round(times * k.shape[2] * (k.shape[3] + v.shape[3])),
        window=0 if is_whole else window,
        backward_products=backward_products(plan.kernel),
        whole_square=is_whole,
    )


def _both(one: Attention, other: Attention) -> Attention:
    """Returns the attention of two in a layer, whose heads are as wide as those of the first."""
    width = one.qk_channels + one.v_channels
    heads = round(other.heads * (other.qk_channels + other.v_channels) / width)
    total = one.heads + heads
    pairs = [(x.window, x.windowed * n) for x, n in ((one, one.heads), (other, heads)) if x.window]
    num_with = sum(n for _, n in pairs)
    mean = sum(window * n for window, n in pairs) / num_with if num_with else 0
    return replace(
        one,
        heads=total,
        kv_channels=one.kv_channels + other.kv_channels,
        window=round(mean),
        windowed=num_with / total,
        whole_square=one.whole_square or other.whole_square,
    )


def _product(k: int, columns: float, times: int, taps: int) -> Product:
    """Returns a product that has so many columns for each token, perhaps less than one."""
    n = max(1, math.ceil(columns))
    whole = columns == n
    return Product(k, n, "none", times if whole else times * columns / n, taps)
