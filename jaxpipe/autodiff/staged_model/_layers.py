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
    scan: bool | int | None = None,
) -> tuple[PyTree, Aux]:
    """Runs layers `(weights, x, inputs_m, key) -> (x, aux)` in a loop that is compiled once.

    Leaves of `weights` and `keys` are [n, ...]; `num_layers` is n, if there may be no leaf that
    says it. By default they run in a `lax.scan` if there are several; with `scan=k` k at a time.
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
    scan: bool | int | None = None,
) -> tuple[PyTree, Aux, Past]:
    """Runs layers `(weights, x, inputs_m, key, past) -> (x, (aux, past))` on a slice of sequences.

    As `run_layers`; the leaves of `past`, the state of all layers, are [n, ...] too.
    """

    def step(x: PyTree, stacked: tuple[Any, Any, Any]) -> tuple[PyTree, Any]:
        weights, key, earlier = stacked
        y, (aux, written) = layer(weights, x, inputs_m, key, replace(past, earlier=earlier))
        return like_input(y, x), (aux, written.earlier, written.new)

    stacked = weights, keys, past.earlier
    x, (aux, earlier, new) = _scan(step, x, stacked, num_layers, scan)
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), aux)
    return x, total, replace(past, earlier=earlier, new=new)


def _scan(
    step: Callable, x: PyTree, stacked: PyTree, num_layers: int | None, scan: bool | int | None
) -> tuple[PyTree, PyTree]:
    """Runs `step` on every layer of a stack, and stacks what it returns beside x."""
    num_layers = len(jax.tree.leaves(stacked)[0]) if num_layers is None else num_layers
    per_iteration = layers_per_iteration(num_layers, scan)
    if num_layers == 1:  # split backwards keep less without a loop
        x, returned = step(x, jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), stacked))
        return x, jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), returned)
    if per_iteration == 1:
        return jax.lax.scan(step, x, stacked, length=num_layers, unroll=scan is False)

    # With `unroll=` of `lax.scan` residuals of an iteration are one array, which XLA copies.
    def iteration(x: PyTree, several: PyTree) -> tuple[PyTree, PyTree]:
        returned = []
        for i in range(per_iteration):
            x, of_layer = step(x, jax.tree.map(lambda leaf, i=i: leaf[i], several))
            returned.append(of_layer)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *returned)

    num_iterations = num_layers // per_iteration
    groups = jax.tree.map(
        lambda leaf: leaf.reshape(num_iterations, per_iteration, *leaf.shape[1:]), stacked
    )
    x, returned = jax.lax.scan(iteration, x, groups, length=num_iterations)
    return x, jax.tree.map(lambda leaf: leaf.reshape(num_layers, *leaf.shape[2:]), returned)


def layers_per_iteration(num_layers: int, scan: bool | int | None) -> int:
    """Returns the layers of an iteration; raises a `ValueError` unless they divide all layers."""
    count = int(scan or 1)
    if num_layers % count:
        raise ValueError(
            f"`scan_layers` (in a run `scan_layers_per_stage`) is {count}, the layers of an "
            f"iteration, and a loop of a stage has {num_layers}. Give a divisor; with several "
            "kinds of layers, of the length of each run of one kind."
        )
    return count
