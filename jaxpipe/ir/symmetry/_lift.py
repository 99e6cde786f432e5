"""Runs a function of the arrays of L equal layers on arrays that are stacked in any way.

Before: `update(grads, state, params)` of a tree with a list of layers, traced.

After: the same for parts, arrays [lead, ...] whose leading dims say which layer is where, as one
stack [v, S, n, ...] or one array [n, ...] for every stage. What is done to each layer alike runs
once on each part. Numbers of several layers, such as norms, are read from the parts and combined as
in the function that was traced.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._compat import ClosedJaxpr
from ..graph import Atom, Literal, Var, to_graph
from ._assign import SMALL, Assignment, LayerOf, PartnerCalls, assign, sameness, size_of
from ._layer_ids import LayerIds, fill_padding, read_layer
from ._operands import Call, calls_of

Parts = tuple[Any, ...]
"""Arrays [lead, ...] with the values of all layers of a kind."""


class LayerSlot(NamedTuple):
    """The array and the layer that an input or an output is."""

    kind: str
    name: str  # the name of the array, the same for all layers of the kind
    layer: int  # the index of the layer


@dataclass(frozen=True)
class Lifted:
    """A function of equal layers that runs on parts."""

    inputs: tuple[Var, ...]  # the inputs that belong to no layer, in order
    # The variable of each input of a layer, by kind and name; one of any layer.
    slots: Mapping[tuple[str, str], Var]
    outputs: tuple[Atom, ...]  # the results of the function
    # The array and the layer that each result is; None for results of no layer.
    out_slots: tuple[LayerSlot | None, ...]
    assignment: Assignment  # the calls, in an order in which they can run

    def __call__(
        self,
        values: Sequence[Any],
        parts: Mapping[tuple[str, str], Parts],
        layer_ids: LayerIds,
        replicate: Callable[[Any], Any] = lambda x: x,
    ) -> tuple[list[Any], dict[tuple[str, str], Parts]]:
        """Returns the results of no layer in order, and the parts of each result of layers.

        Results are zeros at padding. `replicate` returns a small array on all devices, from which
        single layers are read.
        """
        run = _LiftedRun(self.assignment, layer_ids, replicate)
        run.values.update(zip(self.inputs, values, strict=True))
        for slot, var in self.slots.items():
            run.parts[self.assignment.key_of[var]] = parts[slot]
        for unit in self.assignment.units:
            run.group(unit) if isinstance(unit, PartnerCalls) else run.call(unit)
        results, by_slot = [], {}
        for atom, slot in zip(self.outputs, self.out_slots, strict=True):
            if slot is None:
                results.append(jnp.asarray(run.read(atom)))
            else:
                by_slot.setdefault((slot.kind, slot.name), {})[slot.layer] = atom
        stacks: dict[tuple[str, str], Parts] = {}
        for slot, atoms in by_slot.items():
            stacked = run.stacked(slot, [atoms[n] for n in sorted(atoms)])
            stacks[slot] = tuple(map(fill_padding, stacked, layer_ids[slot[0]]))
        return results, stacks


def lift(
    closed: ClosedJaxpr,
    in_slots: Sequence[LayerSlot | None],
    out_slots: Sequence[LayerSlot | None],
    counts: Mapping[str, int],
) -> Lifted:
    """Returns a traced function that treats equal layers alike as a function of parts."""
    graph = to_graph(closed)
    of_layers = {
        var: (LayerOf(slot.kind, slot.layer), slot.name)
        for var, slot in zip(graph.inputs, in_slots, strict=True)
        if slot is not None
    }
    results = {atom for atom in graph.outputs if isinstance(atom, Var)}
    layers = {var: layer for var, (layer, _) in of_layers.items()}
    assignment = assign(calls_of(closed, graph, layers), of_layers, results, counts)
    slots = {(owner.kind, name): var for var, (owner, name) in of_layers.items()}
    rest = tuple(var for var in graph.inputs if var not in of_layers)
    return Lifted(rest, slots, graph.outputs, tuple(out_slots), assignment)


@dataclass
class _LiftedRun:
    """The values of a run so far."""

    assignment: Assignment  # the calls, in an order in which they can run
    layer_ids: LayerIds  # for every kind and part [lead] the layer at each position
    replicate: Callable[[Any], Any]  # returns a small array on all devices
    values: dict[Var, Any] = field(default_factory=dict)  # the value of every variable of no layer
    # The values of every number that partners share.
    parts: dict[int, Parts] = field(default_factory=dict)
    whole: dict[int, Parts] = field(default_factory=dict)  # parts of small values on all devices

    def read(self, atom: Atom) -> Any:
        """Returns one value, of no layer or, a small one, of one layer."""
        if isinstance(atom, Literal):
            return atom.value
        if atom in self.values:
            return self.values[atom]
        owner, key = self.assignment.owner_of[atom], self.assignment.key_of[atom]
        if key not in self.whole:
            self.whole[key] = tuple(map(self.replicate, self.parts[key]))
        return read_layer(self.whole[key], self.layer_ids[owner.kind], owner.layer)

    def call(self, call: Call) -> None:
        """Runs a call of no layer."""
        outputs = call.run(*map(self.read, call.operands))
        self.values.update(zip(call.outputs, outputs, strict=True))

    def group(self, group: PartnerCalls) -> None:
        """Runs the calls of all layers of a kind, once on each part."""
        first = group.calls[0]
        all_ids = self.layer_ids[group.kind]
        operands: list[Parts] = []
        is_batched: list[bool] = []
        for atoms in zip(*(call.operands for call in group.calls), strict=True):
            is_alike = not self._is_of_layers(atoms[0]) and self._are_same(atoms)
            is_batched.append(not is_alike)
            if is_alike:
                operands.append((self.read(atoms[0]),) * len(all_ids))
            else:
                operands.append(self._parts_of(group.kind, atoms))
        results = []
        for index, ids in enumerate(all_ids):
            run, axes = first.run, [0 if batched else None for batched in is_batched]
            for size in reversed(ids.shape):
                run = jax.vmap(run, in_axes=axes, axis_size=size)
            results.append(run(*(parts[index] for parts in operands)))
        for i, var in enumerate(first.outputs):
            self.parts[self.assignment.key_of[var]] = tuple(result[i] for result in results)

    def stacked(self, slot: tuple[str, str], atoms: Sequence[Atom]) -> Parts:
        """Returns the parts of a result of layers, given its value for each layer."""
        kind, name = slot
        owners = [self.assignment.owner_of.get(v) if isinstance(v, Var) else None for v in atoms]
        if any(owners):
            is_alike = len({self.assignment.key_of.get(v) for v in atoms}) == 1  # pyright: ignore
            is_own = owners == [LayerOf(kind, n) for n in range(len(atoms))]
            if not (is_alike and is_own) and size_of(atoms[0]) > SMALL:
                raise ValueError(
                    f"The result {name} is computed for the layers of a pipeline in different "
                    "ways. Treat a parameter alike in all layers."
                )
            if is_alike and is_own:
                return self._parts_of(kind, atoms)
        elif self._are_same(atoms):
            value = jnp.asarray(self.read(atoms[0]))
            ids = self.layer_ids[kind]
            return tuple(jnp.broadcast_to(value, (*i.shape, *value.shape)) for i in ids)
        return self._stack(kind, [self.read(atom) for atom in atoms])

    def _is_of_layers(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self.assignment.key_of

    def _are_same(self, atoms: Iterable[Atom]) -> bool:
        return len({sameness(self.assignment.same, atom) for atom in atoms}) == 1

    def _parts_of(self, kind: str, atoms: Sequence[Atom]) -> Parts:
        """Returns the parts of partners, or small values of no layer as parts."""
        if isinstance(atoms[0], Var) and atoms[0] in self.assignment.key_of:
            return self.parts[self.assignment.key_of[atoms[0]]]
        return self._stack(kind, [self.read(atom) for atom in atoms])

    def _stack(self, kind: str, values: Sequence[Any]) -> Parts:
        """Returns one value of each layer as parts, an arbitrary one at padding."""
        arrays = [jnp.asarray(value) for value in values]

        def part(ids: np.ndarray) -> Any:  # of its own layers: others may be on other devices
            stack = jnp.stack([arrays[layer] for layer in np.maximum(ids, 0).flat])
            return stack.reshape(*ids.shape, *arrays[0].shape)

        return tuple(map(part, self.layer_ids[kind]))
