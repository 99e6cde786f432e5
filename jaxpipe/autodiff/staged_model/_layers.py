"""Runs the layers of a stage, one after the other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._past import Past
from ._staged_model import Aux, like_input, with_aux


def run_layers(
    layer: Callable,
    weights: PyTree,
    x: PyTree,
    inputs_m: PyTree,
    keys: PyTree = (),
    *,
    num_layers: int | None = None,
    scan: bool | None = None,
) -> tuple[PyTree, Aux]:
    """Runs layers of equal structure in a loop that is compiled once.

    Args:
        layer: `(weights, x, inputs_m, key) -> (x, aux)`, or `-> x`.
        weights: [n, ...] leaves.
        keys: [n, ...] leaves, or ().
        num_layers: n, if there may be no leaf that says it.
        scan: Whether they run in a `lax.scan`. None: if there are several.
    """
    layer = with_aux(layer)

    def step(x: PyTree, one: tuple[Any, Any]) -> tuple[PyTree, Aux]:
        return layer(one[0], x, inputs_m, one[1])

    num_layers = len(jax.tree.leaves((weights, keys))[0]) if num_layers is None else num_layers
    if num_layers == 1 and scan is None:  # split backwards keep less without a loop
        weights, keys = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), (weights, keys))
        return layer(weights, x, inputs_m, keys)
    x, aux = jax.lax.scan(step, x, (weights, keys), length=num_layers, unroll=scan is False)
    return x, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), aux)


def run_sliced_layers(
    layer: Callable,
    weights: PyTree,
    x: PyTree,
    inputs_m: PyTree,
    keys: PyTree,
    past: Past,
    *,
    num_layers: int | None = None,
    scan: bool | None = None,
) -> tuple[PyTree, Aux, Past]:
    """Runs layers of equal structure on one slice of the sequences of a microbatch.

    Args:
        layer: `(weights, x, (inputs, past), key) -> (x, (aux, past))`.
        weights: [n, ...] leaves.
        keys: [n, ...] leaves, or ().
        past: The state of all layers, [n, ...] leaves.
        num_layers: n, if there may be no leaf that says it.
        scan: Whether they run in a `lax.scan`. None: if there are several.

    Returns:
        (output of the last layer, aux summed over layers, the state with [n, ...] leaves).
    """

    def step(x: PyTree, one: tuple[Any, Any, Any]) -> tuple[PyTree, Any]:
        weights, key, earlier = one
        y, (aux, made) = layer(weights, x, (inputs_m, replace(past, earlier=earlier)), key)
        return like_input(y, x), (aux, made.earlier, made.new)

    given = weights, keys, past.earlier
    num_layers = len(jax.tree.leaves(given)[0]) if num_layers is None else num_layers
    if num_layers == 1 and scan is None:
        x, made = step(x, jax.tree.map(lambda leaf: leaf[0], given))
        aux, earlier, new = jax.tree.map(lambda leaf: leaf[None], made)
    else:
        x, (aux, earlier, new) = jax.lax.scan(
            step, x, given, length=num_layers, unroll=scan is False
        )
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), aux)
    return x, total, replace(past, earlier=earlier, new=new)
