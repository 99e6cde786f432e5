"""Which weights decay: matrices, but for those that a run excludes by name."""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from ..._input import clause
from ...models.weights import is_weight


def weight_name(path: Sequence[Any]) -> str:
    """Returns the name of a leaf, such as `stages.attention.query`, without a stage's index."""
    names = [entry for entry in path if not isinstance(entry, jax.tree_util.SequenceKey)]
    return jax.tree_util.keystr(tuple(names), simple=True, separator=".")


def check_weight_decay_exclude(expressions: Sequence[str], weights: PyTree) -> None:
    """Checks that every regular expression finds the name of a leaf of `weights`.

    The leaves are `models.Weight`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_weight)
    names = sorted({weight_name(path) for path, _ in leaves})
    for expression in expressions:
        try:
            has_match = any(re.search(expression, name) for name in names)
        except re.error as error:
            raise ValueError(
                f"`weight_decay_exclude` has {expression!r}, which is no regular expression: "
                f"{clause(error)}. Give one that finds names of weights."
            ) from None
        if not has_match:
            raise ValueError(
                f"`weight_decay_exclude` has {expression!r}, which finds none of the weights "
                f"{', '.join(names)}. Change it, or leave it out."
            )


def exclude_from_decay(mask: PyTree[bool], expressions: Sequence[str]) -> PyTree[bool]:
    """Excludes the weights whose names one of the regular expressions finds."""

    def decays(path: Any, does: bool) -> bool:
        return does and not any(re.search(e, weight_name(path)) for e in expressions)

    return jax.tree_util.tree_map_with_path(decays, mask)
