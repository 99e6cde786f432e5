"""Runs a function that was traced on the user's tree, on stored layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._compat import ClosedJaxpr
from ...ir.symmetry import Blocks, LayerIds, LayerSlot, fill_padding, lift, read_layer, run_blocks
from ._parts import PartsByName
from ._slots import Slot


@dataclass(frozen=True)
class Argument:
    """An argument of the traced function. Names of arrays of layers differ between arguments.

    Attributes:
        shapes: The tree that the optimizer is given, as shapes.
        of_one_layer: The same with leaves [1, ...] in place of [L, ...].
        slots: For each leaf where it is stored; None for arrays like no parameter.
        values: The leaves of no layer, in order.
        parts: The arrays [lead, ...] of all layers, by kind and name.
    """

    shapes: PyTree
    of_one_layer: PyTree
    slots: list[Slot | None]
    values: list[Any]
    parts: PartsByName


@dataclass(frozen=True)
class Results:
    """The results of the traced function.

    Attributes:
        values: The results of no layer, in order.
        parts: The arrays [lead, ...] of all layers, by kind and name.
    """

    values: list[Any]
    parts: PartsByName


def is_of_layers(slot: Slot | None) -> bool:
    """Returns whether an array is of one layer, or of all of a kind."""
    return slot is not None and slot.group == "stages"


def run_of_lists(
    closed: ClosedJaxpr,
    arguments: Sequence[Argument],
    out_slots: Sequence[Slot | None],
    counts: Mapping[str, int],
    layer_ids: LayerIds,
    replicate: Callable[[Any], Any],
) -> Results:
    """Runs a function of lists of layers, with `counts` layers of each kind."""

    def layer_slot(slot: Slot | None) -> LayerSlot | None:
        if slot is None or slot.group != "stages":
            return None
        return LayerSlot(slot.kind, slot.name, slot.layer)

    in_slots = [layer_slot(slot) for a in arguments for slot in a.slots]
    lifted = lift(closed, in_slots, list(map(layer_slot, out_slots)), counts)
    values = [value for a in arguments for value in a.values]
    parts = {name: p for a in arguments for name, p in a.parts.items()}
    return Results(*lifted(values, parts, layer_ids, replicate))


def run_of_stacks(
    closed: ClosedJaxpr,
    of_one_layer: ClosedJaxpr,
    arguments: Sequence[Argument],
    out_slots: Sequence[Slot | None],
    layer_ids: LayerIds,
    replicate: Callable[[Any], Any],
) -> Results:
    """Runs a function of leaves [L, ...], which is also given for leaves [1, ...]."""

    def num_lead(kind: str) -> int:
        return layer_ids[kind][0].ndim

    # The program of one layer of a kind is then that of all.
    single = {kind for kind, ids in layer_ids.items() if max(map(np.max, ids)) == 0}
    inputs: list[Any] = []
    stored_by_id: dict[int, Any] = {}  # what the function returns unchanged stays the same object
    for argument in arguments:
        rest = iter(argument.values)
        for slot in argument.slots:
            if slot is None or slot.dim is None:
                inputs.append(next(rest))
                continue
            dim = num_lead(slot.kind) + slot.dim
            stored = argument.parts[slot.kind, slot.name]
            parts = tuple(jnp.expand_dims(x, dim) for x in stored)
            if slot.kind in single:
                inputs.append(read_layer(parts, layer_ids[slot.kind], 0))
            else:
                inputs.append(Blocks(parts, slot.kind))  # keeps the parts, so ids stay theirs
                stored_by_id |= {id(part): x for part, x in zip(parts, stored, strict=True)}
    kinds = [
        None if slot is None or slot.dim is None or slot.kind in single else slot.kind
        for slot in out_slots
    ]
    results = Results([], {})
    named: dict[tuple[str, str], tuple[Any, ...]] = {}
    outputs = run_blocks(closed, of_one_layer, inputs, kinds, layer_ids, replicate)
    for output, slot in zip(outputs, out_slots, strict=True):
        if slot is None or slot.dim is None:
            results.values.append(output)
            continue
        dim, ids = num_lead(slot.kind) + slot.dim, layer_ids[slot.kind]
        if slot.kind in single:
            parts = tuple(jnp.broadcast_to(output, (*i.shape, *output.shape)) for i in ids)
        else:
            parts = output.parts
        stacks = (
            stored_by_id[id(part)] if id(part) in stored_by_id else jnp.squeeze(part, dim)
            for part in parts
        )
        named[slot.kind, slot.name] = tuple(map(fill_padding, stacks, ids))
    return Results(results.values, named)
