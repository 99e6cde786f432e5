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

    def step(x: PyTree, stacked: tuple[Any, Any]) -> tuple[PyTree, Aux]:
        weights, key = stacked
        return layer(weights, x, inputs_m, key)

    x, aux = _scan(step, x, (weights, keys), num_layers, scan)
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

    def step(x: PyTree, stacked: tuple[Any, Any, Any]) -> tuple[PyTree, Any]:
        weights, key, earlier = stacked
        y, (aux, made) = layer(weights, x, (inputs_m, replace(past, earlier=earlier)), key)
        return like_input(y, x), (aux, made.earlier, made.new)

    stacked = weights, keys, past.earlier
    x, (aux, earlier, new) = _scan(step, x, stacked, num_layers, scan)
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), aux)
    return x, total, replace(past, earlier=earlier, new=new)


def _scan(
    step: Callable, x: PyTree, stacked: PyTree, num_layers: int | None, scan: bool | None
) -> tuple[PyTree, PyTree]:
    """Runs `step` on every layer of a stack, and stacks what it returns beside x."""
    num_layers = len(jax.tree.leaves(stacked)[0]) if num_layers is None else num_layers
    if num_layers == 1 and scan is None:  # split backwards keep less without a loop
        x, returned = step(x, jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), stacked))
        return x, jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), returned)
    return jax.lax.scan(step, x, stacked, length=num_layers, unroll=scan is False)
