"""Parameters as a pipeline stores them, and the checks of the user's tree.

L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._specs import ParamSpecs

GROUPS = ("embed", "layers", "head")

NumLayers = int | tuple[tuple[str, int], ...]
"""L; or the name and the number of layers of each kind, in the order in which kinds run."""

InList = bool | tuple[bool, ...]
"""Whether the user's tree has a list of layers; or whether it has one for each kind."""


PARAMETERS = "parameters of a pipeline, or their updates"
GRADIENTS = (
    "gradients of a pipeline: give them to `pipe.optimizer(tx).update`, or combine them with "
    "parameters by `pipe.tree_map`"
)
"""The roles of stored layers. JAX prints them where trees of different roles meet."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredLayers:
    """The parameters of all layers as an engine stores them, a pytree like any other.

    Attributes:
        stages: [v, S, layers per stage, ...] leaves, with zeros where a stage has fewer layers; for
            `mpmd` a list of trees with leaves [layers, ...], one for each stage.
            With several kinds of layers a dict of the former, or a list of dicts with the kinds of
            a stage.
        num_layers: L; or a pair for each kind, its name and number of layers.
        in_list: Whether the user's tree has a list of layers; otherwise it has leaves [L, ...]. For
            several kinds one for each.
        specs: The specs of parameters that have one of the user's.
        layer_ids: The layer at every place of `stages`, -1 for padding; for `mpmd` the layers of
            every stage.
        role: The kind of arrays that these are. Gradients have a role of their own, so that an
            optimizer that is given stored arrays raises an error: it would see stacks of layers,
            and decide by their dims.
    """

    stages: Any
    num_layers: NumLayers = field(metadata={"static": True})
    in_list: InList = field(metadata={"static": True})
    specs: ParamSpecs = field(default=(), metadata={"static": True})
    layer_ids: tuple[Any, ...] = field(default=(), metadata={"static": True})
    role: str = field(default=PARAMETERS, metadata={"static": True})


def is_stored(params: PyTree) -> bool:
    """Returns whether parameters are as `shard` returns them."""

    def is_layers(x: Any) -> bool:
        return isinstance(x, StoredLayers)

    return any(map(is_layers, jax.tree.leaves(params, is_leaf=is_layers)))


def check_stored(params: PyTree) -> None:
    """Checks that parameters are as `shard` returns them."""
    if not (isinstance(params, dict) and isinstance(params.get("layers"), StoredLayers)):
        raise ValueError(
            "`params` is not as the pipeline stores parameters. Give what `pipe.shard(params)` or "
            "`pipe.init` returned."
        )


def weights_of(params: dict[str, Any]) -> dict[str, Any]:
    """Returns stored parameters in the groups of engines."""
    others = {name: tree for name, tree in params.items() if name != "layers"}
    return others | {"stages": params["layers"].stages}


def check_groups(groups: Any, shared: bool, *, needs_arrays: bool = False) -> None:
    """Checks that parameters are in the groups of a model."""
    names = sorted(groups) if isinstance(groups, dict) else type(groups).__name__
    required = (*(("shared",) if shared else ()), *GROUPS)
    if names != sorted(required):
        raise ValueError(
            f"`params` is {names}. Give a dict with {', '.join(map(repr, required[:-1]))} and "
            f"{required[-1]!r}, such as {{'embed': ..., 'layers': [one tree for each layer], "
            "'head': ...}. Parameters that all layers share are 'shared', of a "
            "`Model(shared=True)`."
        )
    if needs_arrays and not shared and not jax.tree.leaves(groups["layers"]):
        raise ValueError(
            "`params['layers']` has no arrays, by which one program finds the layers of a stage. "
            "Give `engine='mpmd'`, or each layer an array that it need not read."
        )


def check_layers(layers: PyTree, name: str = "params['layers']") -> tuple[int, bool]:
    """Checks that layers are alike, and returns L and whether they are in a list."""
    if isinstance(layers, list | tuple):
        _check_alike(layers, name)
        return len(layers), True
    leaves = jax.tree_util.tree_leaves_with_path(layers)
    sizes = {jnp.shape(leaf)[:1] for _, leaf in leaves}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(f"{_name(path)} {jnp.shape(leaf)}" for path, leaf in leaves[:8])
        raise ValueError(
            f"`{name}` has the leaves {shapes or 'none'}. Give a list with a tree for "
            "every layer, or leaves that share their first dim, the number of layers."
        )
    return sizes.pop()[0], False


def stack_layers(layers: PyTree) -> PyTree:
    """Returns leaves [L, ...] of layers that `check_layers` has checked."""
    if isinstance(layers, list | tuple):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return jax.tree.map(jnp.asarray, layers)


def _check_alike(layers: Sequence[PyTree], name: str) -> None:
    if not layers:
        raise ValueError(f"`{name}` is empty. Give at least one layer.")
    first = jax.tree_util.tree_leaves_with_path(layers[0])
    for i, layer in enumerate(layers[1:], start=1):
        other = jax.tree_util.tree_leaves_with_path(layer)
        if jax.tree.structure(layer) != jax.tree.structure(layers[0]):
            names = {_name(path) for path, _ in first} ^ {_name(path) for path, _ in other}
            raise ValueError(
                f"`{name}[{i}]` differs from `{name}[0]` in structure"
                + (f": only one of them has {', '.join(sorted(names)[:8])}" if names else "")
                + ". Layers of one pipeline must be alike."
            )
        for (path, a), (_, b) in zip(first, other, strict=True):
            if _type(a) != _type(b):
                raise ValueError(
                    f"`{name}[{i}]{_name(path)}` is {_type(b)} and "
                    f"`{name}[0]{_name(path)}` is {_type(a)}. Layers of one pipeline "
                    "must be alike."
                )


def _type(leaf: Any) -> str:
    aval = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
    return f"{aval.dtype}{list(aval.shape)}"


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path)


def unstack_layers(layers: PyTree, num_layers: int) -> list[PyTree]:
    """Returns a list with the tree of every layer, from leaves [L, ...]."""
    return [jax.tree.map(lambda leaf: leaf[i], layers) for i in range(num_layers)]  # noqa: B023
