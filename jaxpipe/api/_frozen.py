"""Frozen parameters: leaves of the user's tree without gradient and without optimizer state.

A stored tree holds a frozen leaf as `Frozen(array)`, a node of the pytree. Engines are given the
trainable leaves as weights. They are given the frozen leaves of layers as arrays that stages read
and that are never differentiated; embedding and loss close over theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..autodiff.staged_model import SameForAllMicrobatches
from ._dependence import dependent_inputs
from ._model import Model, with_call

FrozenRule = Callable[[str, Any], bool] | PyTree
"""`(path, leaf) -> whether the leaf is frozen`, or a tree prefix of booleans."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen(SameForAllMicrobatches):
    """A frozen leaf of stored parameters."""

    value: Any


def is_frozen(x: Any) -> bool:
    """Returns whether `x` is a frozen leaf."""
    return isinstance(x, Frozen)


def is_frozen_or_none(x: Any) -> bool:
    """Returns whether `x` is a frozen leaf, or None."""
    return x is None or is_frozen(x)


def mark_frozen(
    rule: FrozenRule,
    params: PyTree,
    to_groups: Callable[[PyTree], dict[str, PyTree]],
    has_kinds: bool = False,
) -> dict[str, PyTree]:
    """Returns the groups of the user's parameters, with `Frozen` around every frozen leaf."""
    flags = _flags(rule, params)
    leaf_flags = jax.tree.leaves(flags)
    if all(leaf_flags) or not any(leaf_flags):
        paths = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        advice = "Leave one trainable." if all(leaf_flags) else "Select one, or leave `frozen` out."
        raise ValueError(
            f"`frozen` selects {'every' if all(leaf_flags) else 'no'} leaf of `params`, such as "
            f"{', '.join(paths[:4])}. {advice}"
        )
    groups = to_groups(params)
    marks = flags if groups is params else _flags_of_groups(flags, params, to_groups)
    layers = marks["layers"]
    for name, of_kind in ((f"[{k!r}]", layers[k]) for k in layers) if has_kinds else [("", layers)]:
        if isinstance(of_kind, list | tuple):
            _check_alike(of_kind, f"params['layers']{name}")
    return jax.tree.map(lambda mark, leaf: Frozen(leaf) if mark else leaf, marks, groups)


def check_trainable(rule: FrozenRule | None, params: PyTree) -> None:
    """Checks that trainable parameters are numbers by which a loss can be differentiated."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), is_trained in zip(leaves, trainable_leaves(rule, params), strict=True):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.typeof(leaf).dtype
        if is_trained and not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"`params{_name(path)}` is {dtype}{list(jnp.shape(leaf))}, which has no gradient. "
                "Say that it is not trained: `jp.pipeline(..., frozen=lambda path, leaf: not "
                "jnp.issubdtype(leaf.dtype, jnp.inexact))`."
            )


def trainable_leaves(rule: FrozenRule | None, params: PyTree) -> tuple[bool, ...]:
    """Returns for every leaf of the user's tree whether it is trained."""
    if rule is None:
        return (True,) * len(jax.tree.leaves(params))
    return tuple(not is_frozen for is_frozen in jax.tree.leaves(_flags(rule, params)))


def _flags(rule: FrozenRule, params: PyTree) -> PyTree:
    """Returns a tree of booleans like `params`."""
    # A module of booleans may be callable too, if the parameters are such a module.
    if callable(rule) and not isinstance(rule, type(params)):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: bool(rule(_name(path), leaf)), params
        )
    if not all(isinstance(flag, bool) for flag in jax.tree.leaves(rule)):
        raise ValueError(
            f"`frozen` is {rule!r}. Give a function (path, leaf) -> bool, or booleans in a tree "
            "that is a prefix of `params`."
        )
    try:
        return jax.tree.map(lambda flag, tree: jax.tree.map(lambda _: flag, tree), rule, params)
    except ValueError as error:
        raise ValueError(f"`frozen` is no tree prefix of `params`: {error}") from error


def _flags_of_groups(flags: PyTree, params: PyTree, to_groups: Callable) -> dict[str, PyTree]:
    sources, structure = dependent_inputs(to_groups, params)
    leaf_flags = jax.tree.leaves(flags)
    marks = []
    for (used,) in sources:
        of_leaf = {flag for flag, is_used in zip(leaf_flags, jax.tree.leaves(used)) if is_used}  # noqa: B905
        if len(of_leaf) == 2:
            names = [
                _name(path)
                for path, is_used in jax.tree_util.tree_leaves_with_path(used)
                if is_used
            ]
            raise ValueError(
                f"`frozen` selects some of {', '.join(names[:8])} and not all. The model stores "
                "them as one array: freeze all of them or none."
            )
        marks.append(True in of_leaf)
    return jax.tree.unflatten(structure, marks)


def _check_alike(layers: Sequence[PyTree], name: str) -> None:
    first = jax.tree_util.tree_leaves_with_path(layers[0])
    for i, layer in enumerate(layers):
        for (path, first_mark), mark in zip(first, jax.tree.leaves(layer), strict=False):
            if mark != first_mark:
                raise ValueError(
                    f"`frozen` is {first_mark} for `{name}[0]{_name(path)}` and {mark} for "
                    f"`{name}[{i}]{_name(path)}`. Layers of one pipeline run one "
                    "program: freeze a parameter in all layers or in none."
                )


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path)


def partition(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Returns (trainable, frozen) leaves of a stored tree, each with None for the others."""

    def keep(frozen: bool) -> PyTree:
        return jax.tree.map(
            lambda x: x if is_frozen(x) == frozen else None, tree, is_leaf=is_frozen
        )

    return keep(False), keep(True)


def combine(trainable: PyTree, frozen: PyTree) -> PyTree:
    """Returns the stored tree that `partition` has divided."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, trainable, frozen, is_leaf=is_frozen_or_none
    )


def unmark(tree: PyTree) -> PyTree:
    """Returns a tree with the arrays of frozen leaves in place of `Frozen` nodes."""
    return jax.tree.map(lambda x: x.value if is_frozen(x) else x, tree, is_leaf=is_frozen)


def join(trainable: PyTree, frozen: PyTree) -> PyTree:
    """Returns the arrays of a part of the user's tree, trainable and frozen ones."""
    return unmark(combine(trainable, frozen)) if jax.tree.leaves(frozen) else trainable


def close_over(model: Model, frozen: dict[str, PyTree]) -> Model:
    """Returns a model whose embedding and loss take trainable parameters, and read `frozen` too."""
    if not jax.tree.leaves((frozen["embed"], frozen["head"])):
        return model
    of_loss = {name: frozen[name] for name in ("head", "embed")} if model.tied else frozen["head"]

    def reading(function: Any, own: PyTree) -> Any:
        def call(weights: PyTree, *arguments: Any) -> Any:
            return function(join(weights, own), *arguments)

        return with_call(function, call)

    return replace(
        model,
        embed=reading(model.embed, frozen["embed"]),
        loss=reading(model.loss, of_loss),
        vocab_parallel_loss=model.vocab_parallel_loss
        and reading(model.vocab_parallel_loss, of_loss),
    )
