"""Finds the function of a model that computes something else of pieces than of all rows.

Each function is run on all rows and on n pieces of them, with the same input, and the results are
compared: outputs of the embedding and of layers row by row, scalars as means.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    layers_by_kind,
    loss_key,
    nth_layer,
    num_layers,
    taken_apart,
    x_and_aux,
)
from ._run import on_one_device

_MAX_LAYERS = 12
"""Layers of a kind that are compared, from the first on."""


@dataclass(frozen=True)
class UnlikeRows:
    """A result of a function that is another one in pieces.

    Attributes:
        function: What the user calls the function, such as "layer" or "layer['encoder']".
        layer: The index of the layer; None if it is none.
        result: The result: "x", "loss", or the name of a metric in quotes.
        error: The largest difference divided by the largest magnitude.
        whole: The scalar of all rows; None for x.
        pieces: The mean of pieces, or for a `Weighted` the quotient of sums; None for x.
        is_sum: Whether the pieces add up to the whole.
        is_root: Whether the squares of pieces are averaged to that of the whole.
    """

    function: str
    layer: int | None
    result: str
    error: float
    whole: float | None = None
    pieces: float | None = None
    is_sum: bool = False
    is_root: bool = False


def first_function_that_mixes(
    mesh: Mesh,
    model: Model,
    params: PyTree,
    batch: PyTree,
    key: Any,
    num_pieces: int,
    tolerance: float,
) -> UnlikeRows | None:
    """Finds the first function whose result of n pieces is not that of all rows.

    Args:
        mesh: The mesh of the pipeline.
        model: The model.
        params: The user's tree.
        batch: All rows, which n divides.
        key: The dropout key, or None. Functions that take one are not compared.
        num_pieces: n.
        tolerance: The largest relative error of equal results.

    Returns:
        The first one, in the order in which functions run; None if there is none.
    """
    names: list[UnlikeRows] = []

    def differences(params: PyTree, batch: PyTree) -> list[Any]:
        return list(_differences(model, params, batch, key, num_pieces, names.append))

    # The names are known when the function is traced.
    found, _ = on_one_device(mesh, differences, params, batch)
    for row, (error, *scalars) in zip(names, jax.device_get(found), strict=True):
        if error <= tolerance:
            continue
        if not scalars:
            return UnlikeRows(row.function, row.layer, row.result, float(error))
        whole, joined = map(float, scalars[:2])
        sum_of_pieces, root = map(float, scalars[2:])
        return UnlikeRows(
            row.function,
            row.layer,
            row.result,
            float(error),
            whole,
            joined,
            abs(sum_of_pieces - whole) <= tolerance * abs(whole),
            abs(root - whole) <= tolerance * abs(whole),
        )
    return None


def _differences(
    model: Model, params: PyTree, batch: PyTree, key: Any, n: int, note: Callable
) -> list[tuple[Any, ...]]:
    """Returns the error of every result, and notes what it is of."""
    groups = model.to_groups(params)
    pieces, found = jax.tree.map(lambda x: cut_rows(x, n), batch), []
    embed_of: Any = model.embed
    x = embed_of(groups["embed"], batch, embed_key(key, 0))
    parts = _mapped(lambda rows: embed_of(groups["embed"], rows, embed_key(key, 0)), pieces)
    if not embed_of.takes_key:
        found += _compare_x("embed", None, x, parts, note)
    divided = [_is_cut(a, b) for a, b in zip(*map(jax.tree.leaves, (x, parts)), strict=True)]
    index = 0
    for name, function, layers in _named_layers(model, groups):
        for i in range(num_layers(layers)):
            weights = nth_layer(layers, i)
            weights = {"layer": weights, "shared": groups["shared"]} if model.shared else weights
            layer_k = layer_key(key, index, 0)

            def run(x: PyTree, rows: PyTree, w: Any = weights, k: Any = layer_k) -> Any:
                return x_and_aux(function(w, x, rows, k), x)  # noqa: B023

            y, aux = run(x, batch)
            if i < _MAX_LAYERS and not function.takes_key:
                parts, aux_parts = _mapped(run, _cut(x, divided, n), pieces)
                found += _compare_x(name, index, y, parts, note)
                for metric in aux:
                    row = UnlikeRows(name, index, repr(metric), 0.0)
                    found.append(_compare_scalar(row, aux[metric], aux_parts[metric], None, note))
            x, index = y, index + 1
    return found + _loss_differences(model, groups, x, batch, (divided, pieces, n), key, note)


def _loss_differences(
    model: Model, groups: Any, x: PyTree, batch: PyTree, cut: Any, key: Any, note: Callable
) -> list[tuple[Any, ...]]:
    divided, pieces, n = cut
    own = {"head": groups["head"], "embed": groups["embed"]} if model.tied else groups["head"]
    loss: Any = model.loss
    if loss.takes_key:
        return []

    def run(x: PyTree, rows: PyTree) -> Any:
        return taken_apart(loss(own, x, rows, loss_key(key, 0)))

    total, weight, metrics = run(x, batch)
    totals, weights, parts = _mapped(run, _cut(x, divided, n), pieces)
    whole = total if weight is None else total / weight
    row = UnlikeRows("loss", None, "loss", 0.0)
    found = [_compare_scalar(row, whole, totals, weights, note)]
    for name in metrics:
        row = UnlikeRows("loss", None, repr(name), 0.0)
        found.append(_compare_scalar(row, metrics[name], parts[name], None, note))
    return found


def _named_layers(model: Model, groups: Any) -> list[tuple[str, Any, PyTree]]:
    is_named = isinstance(model.layer, Mapping)
    names = [f"layer[{kind!r}]" for kind in model.layer] if is_named else ["layer"]  # pyright: ignore
    pairs = zip(names, layers_by_kind(model, groups), strict=True)
    return [(name, function, layers) for name, (function, layers) in pairs]


def _mapped(function: Callable, *pieces: PyTree) -> Any:
    return jax.lax.map(lambda given: function(*given), pieces)


def _is_cut(whole: Any, parts: Any) -> bool:
    """Returns whether [n, rows, ...] are the pieces of [n * rows, ...]; else all have the whole."""
    return parts.ndim > 1 and whole.shape == (parts.shape[0] * parts.shape[1], *parts.shape[2:])


def _cut(x: PyTree, divided: list[bool], n: int) -> PyTree:
    leaves, tree = jax.tree.flatten(x)
    return tree.unflatten(
        [
            cut_rows(leaf, n) if is_cut else jnp.broadcast_to(leaf, (n, *leaf.shape))
            for leaf, is_cut in zip(leaves, divided, strict=True)
        ]
    )


def _compare_x(
    name: str, layer: int | None, whole: PyTree, parts: PyTree, note: Callable
) -> list[tuple[Any, ...]]:
    errors = [jnp.zeros(())]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if _is_cut(a, b):
            errors.append(_error(a, b.reshape(a.shape)))
        elif b.shape[1:] == a.shape:
            errors.append(_error(jnp.broadcast_to(a, b.shape), b))
        else:
            errors.append(jnp.full((), jnp.inf))
    note(UnlikeRows(name, layer, "x", 0.0))
    return [(jnp.max(jnp.stack([e.astype(jnp.float32) for e in errors])),)]


def _compare_scalar(
    row: UnlikeRows, whole: Any, parts: Any, weights: Any, note: Callable
) -> tuple[Any, ...]:
    note(row)
    joined = jnp.mean(parts) if weights is None else jnp.sum(parts) / jnp.sum(weights)
    root = jnp.sqrt(jnp.mean(jnp.abs(parts) ** 2))
    real = [jnp.abs(x) if jnp.iscomplexobj(x) else x for x in (whole, joined, jnp.sum(parts), root)]
    return _error(whole, joined), *real


def _error(whole: Any, joined: Any) -> Any:
    """Returns the largest difference divided by the largest magnitude; infinite for a NaN."""
    dtype = jnp.result_type(float) if not jnp.issubdtype(whole.dtype, jnp.inexact) else whole.dtype
    whole, joined = whole.astype(dtype), joined.astype(dtype)
    difference = jnp.max(jnp.abs(whole - joined), initial=0)
    scale = jnp.max(jnp.abs(whole), initial=0)
    error = jnp.where(difference == 0, jnp.zeros_like(difference), difference / scale)
    return jnp.where(jnp.isnan(error), jnp.full_like(error, jnp.inf), error)
