"""Scalars that layers sow, as auxiliary losses."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._losses import Weighted, loss_parts

Factors = Mapping[str, float | None]
"""By collection the factor of its sum in the loss; None for values that are dropped."""


def sown_losses(collections: Mapping[str, PyTree], factors: Factors) -> dict[str, Any]:
    """Returns the sum of what layers have sown by collection; "loss" is that times factors."""
    if "loss" in factors:
        raise ValueError(
            "`sown` has the collection 'loss', whose metric would have the name of the loss. Sow "
            "into a collection of another name."
        )
    for name, factor in factors.items():
        leaves = jax.tree_util.tree_leaves_with_path(collections.get(name, {}))
        for path, leaf in leaves if factor is not None else ():
            if jnp.size(leaf) != 1:
                raise ValueError(
                    f"`sown` has the collection {name!r}, in which {jax.tree_util.keystr(path)} is "
                    f"{jnp.shape(leaf)}. Sow scalars, or give None in place of {factor} to drop "
                    "them."
                )
    return _add_up(collections, factors)


def _add_up(collections: Mapping[str, PyTree], factors: Factors) -> dict[str, Any]:
    """Returns "loss" and the sum of each collection, of any number of layers."""
    sums: dict[str, Any] = {}
    for name, factor in factors.items():
        leaves = jax.tree.leaves(collections.get(name, {}))
        if factor is None or not leaves:
            continue
        sums[name] = sum(jnp.sum(leaf) for leaf in leaves)
        sums["loss"] = factor * sums[name] + sums.get("loss", 0.0)
    return sums


def with_sown_losses(loss: Callable, factors: Factors) -> Callable:
    """Returns a loss of `((output, trees of [L] values by collection), batch)`."""

    def run(given: tuple[Any, dict[str, PyTree]], batch: PyTree) -> Any:
        parts = loss_parts(loss(given[0], batch))
        added = _add_up(given[1], factors)
        total = parts.total + added.pop("loss", 0.0)
        value = total if parts.weight is None else Weighted(total, parts.weight)
        return (value, parts.metrics | added) if parts.metrics or added else value

    return run
