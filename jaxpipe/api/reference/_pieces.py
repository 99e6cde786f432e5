"""Finds the function of a model that computes something else of pieces than of all rows.

Each function is run on all rows and on n pieces of them, with the same input, and the results are
compared: outputs of the embedding and of layers row by row, scalars as means.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._model import Model
from ._program import (
    cut_rows,
    embed_key,
    layer_key,
    loss_key,
    nth_layer,
    num_layers,
    on_one_device,
    runs_of_layers,
    taken_apart,
    x_and_aux,
)

_MAX_LAYERS = 12
"""Layers of a kind that are compared, from the first on."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnlikeRows:
    """A result of a function for all rows and for pieces; a pytree of scalars.

    Attributes:
        function: The name of the function in `row_wise`, such as "layer" or a kind.
        layer: The index of the layer; None if it is none.
        result: The result: "x", "loss", or the name of a metric in quotes.
        error: The largest difference divided by the largest magnitude.
        whole: The scalar of all rows; None for x and for arrays.
        pieces: The mean of pieces, or for a `Weighted` the quotient of sums; None for those.
        is_sum: Whether the pieces add up to the whole.
        is_root: Whether the squares of pieces are averaged to that of the whole.
    """

    function: str = field(metadata={"static": True})
    layer: int | None = field(metadata={"static": True})
    result: str = field(metadata={"static": True})
    error: Any
    whole: Any = None
    pieces: Any = None
    is_sum: Any = False
    is_root: Any = False

    @property
    def where(self) -> str:
        """Returns the function as the user has it, such as "`layer['encoder']` of layer 2"."""
        if self.layer is None or self.function == "layer":
            name = f"`{self.function}`"
        else:
            name = f"`layer[{self.function!r}]`"
        return name if self.layer is None else f"{name} of layer {self.layer}"


def first_function_that_mixes(
    mesh: Mesh,
    model: Model,
    params: PyTree,
    batch: PyTree,
    key: Any,
    num_pieces: int,
    tolerance: float,
) -> UnlikeRows | None:
    """Finds the first function whose result of n pieces is not that of all rows."""

    def compare(params: PyTree, batch: PyTree) -> list[UnlikeRows]:
        return list(_compared(model, params, batch, key, num_pieces, tolerance))

    comparisons, _ = on_one_device(mesh, compare, params, batch)
    for comparison in jax.tree.map(lambda x: x.item(), jax.device_get(comparisons)):
        if comparison.error > tolerance:
            return comparison
    return None


def _compared(
    model: Model, params: PyTree, batch: PyTree, key: Any, num_pieces: int, tolerance: float
) -> Iterator[UnlikeRows]:
    """Yields every result of every function without a key, in the order in which they run."""
    groups = model.to_groups(params)
    batches = jax.tree.map(lambda leaf: cut_rows(leaf, num_pieces), batch)

    def embed(rows: PyTree) -> PyTree:
        return model.embed(groups["embed"], rows, embed_key(key, 0))

    x = embed(batch)
    xs = _of_pieces(embed, batches)
    is_cut = jax.tree.map(_is_cut, x, xs)
    if not model.functions[0].takes_key:
        yield _compare_x("embed", None, x, xs)

    def cut(x: PyTree) -> PyTree:
        """Returns the x of every piece, of leaves without rows the same for all."""
        # All leaves of an x that layers change have rows.
        if jax.tree.structure(x) != jax.tree.structure(is_cut):
            return jax.tree.map(lambda leaf: cut_rows(leaf, num_pieces), x)
        return jax.tree.map(
            lambda leaf, is_cut: (
                cut_rows(leaf, num_pieces)
                if is_cut
                else jnp.broadcast_to(leaf, (num_pieces, *leaf.shape))
            ),
            x,
            is_cut,
        )

    for index, (name, function, weights, is_compared) in enumerate(_all_layers(model, groups)):
        layer = _layer_function(function, weights, layer_key(key, index, 0))
        y, aux = layer(x, batch)
        if is_compared:
            ys, auxes = _of_pieces(layer, cut(x), batches)
            yield _compare_x(name, index, y, ys)
            for metric, value in aux.items():
                yield _compare_scalar(name, index, repr(metric), value, auxes[metric], tolerance)
        x = y
    if model.functions[-1].takes_key:
        return
    head = {"head": groups["head"], "embed": groups["embed"]} if model.tied else groups["head"]

    def loss(x: PyTree, rows: PyTree) -> Any:
        return taken_apart(model.loss(head, x, rows, loss_key(key, 0)))

    total, weight, metrics = loss(x, batch)
    totals, weights, metrics_of_pieces = _of_pieces(loss, cut(x), batches)
    whole = total if weight is None else total / weight
    yield _compare_scalar("loss", None, "loss", whole, totals, tolerance, weights)
    for metric, value in metrics.items():
        values = metrics_of_pieces[metric]
        if value.ndim:
            yield replace(_compare_x("loss", None, value, values), result=repr(metric))
        else:
            yield _compare_scalar("loss", None, repr(metric), value, values, tolerance)


def _all_layers(model: Model, groups: Any) -> Iterator[tuple[str, Any, PyTree, bool]]:
    """Yields for every layer its name, function and weights, and whether it is to be compared."""
    seen: Counter[str] = Counter()
    for name, function, layers in runs_of_layers(model, groups):
        for i in range(num_layers(layers)):
            weights = nth_layer(layers, i)
            seen[name] += 1
            if model.shared:
                weights = {"layer": weights, "shared": groups["shared"]}
            yield name, function, weights, seen[name] <= _MAX_LAYERS and not function.takes_key


def _layer_function(function: Callable, weights: PyTree, key: Any) -> Callable[..., Any]:
    """Returns `(x, rows) -> (x, auxiliary scalars)` of one layer."""
    return lambda x, rows: x_and_aux(function(weights, x, rows, key), x)


def _of_pieces(function: Callable, *pieces: PyTree) -> Any:
    """Returns the results [n, ...] of a function of pieces."""
    return jax.lax.map(lambda arguments: function(*arguments), pieces)


def _is_cut(whole: Any, pieces: Any) -> bool:
    """Returns whether [n, rows, ...] are the pieces of [n * rows, ...]; else all have the whole."""
    return pieces.ndim > 1 and whole.shape == (
        pieces.shape[0] * pieces.shape[1],
        *pieces.shape[2:],
    )


def _compare_x(name: str, layer: int | None, whole: PyTree, pieces: PyTree) -> UnlikeRows:
    errors = [jnp.zeros(())]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if _is_cut(a, b):
            errors.append(_error(a, b.reshape(a.shape)))
        elif b.shape[1:] == a.shape:
            errors.append(_error(jnp.broadcast_to(a, b.shape), b))
        else:
            errors.append(jnp.full((), jnp.inf))
    error = jnp.max(jnp.stack([e.astype(jnp.float32) for e in errors]))
    return UnlikeRows(name, layer, "x", error)


def _compare_scalar(
    function: str,
    layer: int | None,
    result: str,
    whole: Any,
    pieces: Any,
    tolerance: float,
    weights: Any = None,
) -> UnlikeRows:
    joined = jnp.mean(pieces) if weights is None else jnp.sum(pieces) / jnp.sum(weights)
    error = _error(whole, joined)
    root = jnp.sqrt(jnp.mean(jnp.abs(pieces) ** 2))
    scalars = whole, joined, jnp.sum(pieces), root
    whole, joined, total, root = (jnp.abs(x) if jnp.iscomplexobj(x) else x for x in scalars)
    accepted = tolerance * jnp.abs(whole)
    is_sum, is_root = jnp.abs(total - whole) <= accepted, jnp.abs(root - whole) <= accepted
    return UnlikeRows(
        function=function,
        layer=layer,
        result=result,
        error=error,
        whole=whole,
        pieces=joined,
        is_sum=is_sum,
        is_root=is_root,
    )


def _error(whole: Any, joined: Any) -> Any:
    """Returns the largest difference divided by the largest magnitude; infinite for a NaN."""
    dtype = jnp.result_type(float) if not jnp.issubdtype(whole.dtype, jnp.inexact) else whole.dtype
    whole, joined = whole.astype(dtype), joined.astype(dtype)
    difference = jnp.max(jnp.abs(whole - joined), initial=0)
    scale = jnp.max(jnp.abs(whole), initial=0)
    error = jnp.where(difference == 0, jnp.zeros_like(difference), difference / scale)
    return jnp.where(jnp.isnan(error), jnp.full_like(error, jnp.inf), error)
