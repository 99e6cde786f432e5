"""Several kinds of layers in the user's tree: the layers of each kind are stacked on their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import PyTree

from .._input import short_repr
from ._params import InList, NumLayers, check_layers, stack_layers, unstack_layers

MTP = "mtp"
"""The kind that the letter m of a layout string is a layer of."""


def check_order(order: Sequence[str], layer: Any) -> None:
    """Raises a `ValueError` if an order of layers names other kinds than `layer` has."""
    kinds = list(layer) if isinstance(layer, Mapping) else None
    if kinds is None or isinstance(order, str) or sorted({*order}) != sorted(kinds):
        has = "is one function" if kinds is None else f"has the kinds {kinds}"
        raise ValueError(
            f"`order` is {short_repr(order)}, and `layer` {has}. Give the kind of every "
            "layer, and a function for each: `layer={'local': f, 'global': g}, order=['local', "
            "'global', ...]`."
        )


@dataclass(frozen=True)
class ByKind:
    """Divides layers, a list in the order in which they run, into lists by kind."""

    order: tuple[str, ...]
    to_groups: Callable[[PyTree], dict[str, PyTree]]

    def __call__(self, params: PyTree) -> dict[str, PyTree]:
        groups = self.to_groups(params)
        layers = groups.get("layers") if isinstance(groups, dict) else None
        if not isinstance(layers, list | tuple) or len(layers) != len(self.order):
            is_list = isinstance(layers, list | tuple)
            described = f"{len(layers)} layers" if is_list else f"`{type(layers).__name__}`"
            raise ValueError(
                f"`Model.order` has {len(self.order)} layers, `params['layers']` is {described}. "
                "Give a list of all layers, in the order in which they run."
            )
        by_kind: dict[str, list[PyTree]] = {kind: [] for kind in self.order}
        for kind, layer in zip(self.order, layers, strict=True):
            by_kind[kind].append(layer)
        return groups | {"layers": by_kind}


@dataclass(frozen=True)
class InOrder:
    """Puts lists of layers by kind into the order in which they run: the inverse of `ByKind`."""

    order: tuple[str, ...]
    from_groups: Callable[[dict[str, PyTree]], PyTree]

    def __call__(self, groups: dict[str, PyTree]) -> PyTree:
        layers = {kind: iter(groups["layers"][kind]) for kind in groups["layers"]}
        return self.from_groups(groups | {"layers": [next(layers[kind]) for kind in self.order]})


def total_layers(num_layers: NumLayers) -> int:
    """Returns the number of layers of all kinds."""
    return num_layers if isinstance(num_layers, int) else sum(count for _, count in num_layers)


def check_all(layer: Any, layers: PyTree) -> tuple[NumLayers, InList]:
    """Checks that layers of each kind are alike, and returns L and whether they are in a list.

    If there are kinds, it returns these for each of them.
    """
    if not isinstance(layer, Mapping):
        return check_layers(layers)
    kinds = sorted(map(str, layers)) if isinstance(layers, Mapping) else type(layers).__name__
    if kinds != sorted(layer):
        raise ValueError(
            f"`params['layers']` is {kinds} and `model.layer` has the kinds {list(layer)}. Give a "
            "dict with the layers of each kind, such as {'encoder': [...], 'decoder': [...]}."
        )
    checked = [check_layers(layers[kind], f"params['layers']['{kind}']") for kind in layer]
    counts = tuple(count for count, _ in checked)
    return tuple(zip(layer, counts, strict=True)), tuple(in_list for _, in_list in checked)


def stack_all(layer: Any, layers: PyTree) -> PyTree:
    """Returns leaves [L, ...] of layers that `check_all` has checked; or these by kind."""
    if not isinstance(layer, Mapping):
        return stack_layers(layers)
    return {kind: stack_layers(layers[kind]) for kind in layer}


def unstack_all(layers: PyTree, num_layers: NumLayers, in_list: InList) -> PyTree:
    """Returns the layers of the user's tree from [L, ...] leaves: the inverse of `stack_all`."""
    if isinstance(num_layers, int) or isinstance(in_list, bool):
        return unstack_layers(layers, total_layers(num_layers)) if in_list else layers
    return {
        kind: unstack_layers(layers[kind], count) if is_list else layers[kind]
        for (kind, count), is_list in zip(num_layers, in_list, strict=True)
    }


def check_mtp(num_layers: NumLayers, num_mtp: int) -> None:
    """Checks that the letters m of a layout string are the layers of the last kind."""
    kinds = () if isinstance(num_layers, int) else num_layers
    num_mtp_layers = kinds[-1][1] if kinds and kinds[-1][0] == MTP else 0
    if num_mtp_layers != num_mtp:
        raise ValueError(
            f"`layers_per_stage` has {num_mtp} m, and the model has {num_mtp_layers} layers of a "
            f"last kind {MTP!r}. Give an m for each of them, behind t for all others."
        )
