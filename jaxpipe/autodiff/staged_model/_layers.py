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
    unroll: bool = False,
) -> tuple[PyTree, Aux]:
    """Runs layers of equal structure in a loop that is compiled once.

    Args:
        layer: `(weights, x, inputs_m, key) -> (x, aux)`, or `-> x`.
        weights: [n, ...] leaves.
        keys: [n, ...] leaves, or ().
        num_layers: n, if there may be no leaf that says it.
        unroll: Whether the loop is written out.
    """
    layer = with_aux(layer)

    def step(x: PyTree, one: tuple[Any, Any]) -> tuple[PyTree, Aux]:
        return layer(one[0], x, inputs_m, one[1])

    x, aux = jax.lax.scan(step, x, (weights, keys), length=num_layers, unroll=unroll)
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
    unroll: bool = False,
) -> tuple[PyTree, Aux, Past]:
    """Runs layers of equal structure on one slice of the sequences of a microbatch.

    Args:
        layer: `(weights, x, (inputs, past), key) -> (x, (aux, past))`.
        weights: [n, ...] leaves.
        keys: [n, ...] leaves, or ().
        past: The state of all layers, [n, ...] leaves.
        num_layers: n, if there may be no leaf that says it.
        unroll: Whether the loop is written out.

    Returns:
        (output of the last layer, aux summed over layers, the state with [n, ...] leaves).
    """

    def step(x: PyTree, one: tuple[Any, Any, Any]) -> tuple[PyTree, Any]:
        weights, key, earlier = one
        y, (aux, made) = layer(weights, x, (inputs_m, replace(past, earlier=earlier)), key)
        return like_input(y, x), (aux, made.earlier, made.new)

    given = weights, keys, past.earlier
    x, (aux, earlier, new) = jax.lax.scan(step, x, given, length=num_layers, unroll=unroll)
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), aux)
    return x, total, replace(past, earlier=earlier, new=new)
