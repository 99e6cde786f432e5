"""Takes stored stages apart: one tree of stacked layers, or for `mpmd` one of every stage."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ...engines import Engine, PipelineSpec
from ...ir.symmetry import LayerIds
from .._params import NumLayers

PartsByName = Mapping[tuple[str, str], tuple[Any, ...]]
"""The arrays [lead, ...] of all layers, by kind and name."""


def part_trees(stages: Any, num_layers: NumLayers) -> dict[str, list[PyTree]]:
    """Returns the trees of stacked layers of each kind.

    Leaves are [v, S, n, ...], or for `mpmd` [n, ...] of every stage that has layers of the kind.
    """
    trees = stages if isinstance(stages, list) else [stages]
    if isinstance(num_layers, int):
        return {"": trees}
    return {kind: [tree[kind] for tree in trees if kind in tree] for kind, _ in num_layers}


def num_lead_dims(stages: Any) -> int:
    """Returns the number of dims in front of those of one layer: 3 of a stack, 1 of each stage."""
    return 1 if isinstance(stages, list) else 3


def replace_trees(stages: Any, num_layers: NumLayers, new: Callable[[str, int], PyTree]) -> Any:
    """Returns stages with the trees `new(kind, index of the part)` of stacked layers."""
    seen = dict.fromkeys(part_trees(stages, num_layers), 0)

    def next_of(kind: str) -> PyTree:
        seen[kind] += 1
        return new(kind, seen[kind] - 1)

    def of_tree(tree: PyTree) -> PyTree:
        if isinstance(num_layers, int):
            return next_of("")
        return {kind: next_of(kind) for kind, _ in num_layers if kind in tree}

    return list(map(of_tree, stages)) if isinstance(stages, list) else of_tree(stages)


def parts_by_name(stages: Any, num_layers: NumLayers) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Returns the arrays [lead, ...] of all layers, by kind and path in a layer."""
    arrays: dict[tuple[str, str], list[Any]] = {}
    for kind, trees in part_trees(stages, num_layers).items():
        for tree in trees:
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                arrays.setdefault((kind, jax.tree_util.keystr(path)), []).append(leaf)
    return {name: tuple(parts) for name, parts in arrays.items()}


def stages_like(stages: Any, num_layers: NumLayers, parts: PartsByName) -> Any:
    """Returns stages of the same structure with other arrays; the inverse of `parts_by_name`."""
    trees = part_trees(stages, num_layers)

    def new(kind: str, index: int) -> PyTree:
        def leaf(path: Any, _: Any) -> Any:
            return parts[kind, jax.tree_util.keystr(path)][index]

        return jax.tree_util.tree_map_with_path(leaf, trees[kind][index])

    return replace_trees(stages, num_layers, new)


def named_parts(stages: Any, num_layers: NumLayers) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Returns the arrays [lead, ...] of layers that are a dict by name; see `stages_of_names`."""
    return {
        (kind, name): tuple(tree[name] for tree in trees)
        for kind, trees in part_trees(stages, num_layers).items()
        for name in trees[0]
    }


def stages_of_names(stages: Any, num_layers: NumLayers, parts: PartsByName) -> Any:
    """Returns stages whose layers are a dict of arrays by name."""

    def new(kind: str, index: int) -> dict[str, Any]:
        return {name: arrays[index] for (of, name), arrays in parts.items() if of == kind}

    return replace_trees(stages, num_layers, new)


def layer_ids(engine: Engine, spec: PipelineSpec, num_layers: NumLayers) -> LayerIds:
    """Returns where an engine stores which layer."""
    layout = spec.layout
    if isinstance(num_layers, int):  # without a device, which programs compiled ahead do not have
        if engine.program_per_rank:
            return {"": tuple(np.array(ids, int) for ids in layout.stage_layer_ids)}
        return {"": (np.array(layout.layer_ids, int).reshape(layout.dims),)}
    with jax.ensure_compile_time_eval():
        layers = {kind: np.arange(1, count + 1) for kind, count in num_layers}
        stages = engine.storage.stack(spec, layers)  # which writes zeros at padding
    return {
        kind: tuple(np.asarray(ids) - 1 for ids in trees)
        for kind, trees in part_trees(stages, num_layers).items()
    }
