"""Finds out which calls of a function of L equal layers do the same to every layer.

A call belongs to layer i if, of its operands, those that belong to any layer belong to i alone. Its
results then belong to i too. Calls of different layers are partners if they are the same primitive
on partners. A group has one call of each layer, and runs once, batched over the layers. All other
calls combine layers, as a global norm does, and run as they were traced.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..graph import Atom, Literal, Var, aval_of, variables
from ._operands import Call, literal_signature

SMALL = 64
"""The most numbers of a value that several layers may have in common: more than scalars, such as
the factors of heads, and fewer than any array that layers are made of."""


class LayerOf(NamedTuple):
    """One layer of a kind of equal layers."""

    kind: str
    layer: int


@dataclass(frozen=True)
class PartnerCalls:
    """Calls that do the same to every layer of a kind."""

    kind: str
    calls: tuple[Call, ...]  # the call of each layer


@dataclass(frozen=True)
class Assignment:
    """The groups and single calls of a function, in an order in which they can run."""

    units: tuple[PartnerCalls | Call, ...]
    key_of: Mapping[Var, int]  # for every variable of a layer the number that partners share
    owner_of: Mapping[Var, LayerOf]  # the layer of each such variable
    same: Mapping[Var, int]  # equal for equal values of no layer, such as a learning rate


def sameness(same: Mapping[Var, int], atom: Atom) -> Hashable:
    """Returns equal values for equal operands that belong to no layer."""
    return literal_signature(atom.value) if isinstance(atom, Literal) else same[atom]


class _Keys:
    """Returns equal numbers for equal hashable values."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def assign(
    calls: Sequence[Call],
    inputs: Mapping[Var, tuple[LayerOf, str]],
    outputs: Collection[Var],
    counts: Mapping[str, int],
) -> Assignment:
    """Groups calls, given the layer of each input, with a name that partners share."""
    single = {i for i, call in enumerate(calls) if _draws_otherwise_in_batches(call)}
    promoted: dict[int, LayerOf] = {}
    while True:
        trial = _trial(calls, inputs, single, promoted)
        bad = _without_partners(calls, trial, counts) | _with_other_layers(calls, trial, counts)
        small = {i for i in bad if _is_small(calls[i])}
        if small:  # before all others: a sum over layers seems to belong to the last of them
            single |= small
        elif added := _promotions(calls, trial, outputs, single, promoted):
            promoted |= added
        elif bad:
            single |= _first_of_chains(calls, bad)
        elif waiting := _calls_in_cycle(calls, trial):
            single |= waiting
        else:
            units = _in_order(calls, trial)
            _check_single(calls, trial, units)
            return Assignment(units, trial.key_of, trial.owner_of, trial.same)


def _draws_otherwise_in_batches(call: Call) -> bool:
    """Returns whether a batch of keys draws other bits than its keys one by one, as of `rbg`."""
    # https://docs.jax.dev/en/latest/jax.random.html#advanced-rng-configuration
    dtypes = [v.aval.dtype for v in variables(call.operands)]
    keys = [d for d in dtypes if jnp.issubdtype(d, jax.dtypes.prng_key)]
    return call.name == "random_bits" and any("fry" not in str(d) for d in keys)


@dataclass(frozen=True)
class _Trial:
    """An assignment that is not known to be complete. Calls are given by their index."""

    key_of: dict[Var, int]
    owner_of: dict[Var, LayerOf]
    name_of: dict[Var, str]
    same: dict[Var, int]
    groups: dict[tuple[str, int], dict[int, int]]
    group_of: dict[int, tuple[str, int]]


def _trial(
    calls: Sequence[Call],
    inputs: Mapping[Var, tuple[LayerOf, str]],
    single: Collection[int],
    promoted: Mapping[int, LayerOf],
) -> _Trial:
    """Assigns all calls, in one pass, except those that must stay single."""
    keys, sames = _Keys(), _Keys()
    trial = _Trial(
        key_of={}, owner_of={}, name_of={}, same={}, groups=defaultdict(dict), group_of={}
    )
    for var, (owner, name) in inputs.items():
        trial.owner_of[var], trial.key_of[var] = owner, keys(("input", owner.kind, name))
        trial.name_of[var] = name
    computed = {var for call in calls for var in call.outputs}
    for var in (v for call in calls for v in call.operands if isinstance(v, Var)):
        if var not in computed and var not in inputs:
            trial.same[var] = sames(("input", id(var)))
    ordinals: Counter[Hashable] = Counter()
    for index, call in enumerate(calls):
        owners = {trial.owner_of[v] for v in variables(call.operands) if v in trial.owner_of}
        owner = owners.pop() if len(owners) == 1 else promoted.get(index)
        if owner is None or index in single:
            operands = tuple(
                ("layer", trial.owner_of[v], trial.key_of[v])
                if isinstance(v, Var) and v in trial.owner_of
                else sameness(trial.same, v)
                for v in call.operands
            )
            number = sames((call.signature, operands))
            for i, var in enumerate(call.outputs):
                trial.same[var] = sames((number, i))
            continue
        operands = tuple(trial.key_of.get(v) if isinstance(v, Var) else None for v in call.operands)
        shapes = tuple(str(aval_of(v)) for v in call.operands)
        base = call.signature, operands, shapes
        # The first call of this form of layer 3 is the partner of the first one of layer 0.
        ordinal = ordinals[(owner, base)]
        ordinals[(owner, base)] += 1
        key = keys((owner.kind, base, ordinal))
        trial.groups[owner.kind, key][owner.layer] = index
        trial.group_of[index] = owner.kind, key
        name = next((trial.name_of[v] for v in call.operands if v in trial.name_of), "")
        for i, var in enumerate(call.outputs):
            trial.owner_of[var], trial.key_of[var] = owner, keys(("output", key, i))
            trial.name_of[var] = name
    return trial


def size_of(atom: Atom) -> int:
    """Returns the number of elements of a value."""
    return math.prod(aval_of(atom).shape)


def _is_small(call: Call) -> bool:
    """Returns whether a call reads nothing but small values."""
    return all(size_of(v) <= SMALL for v in call.operands)


def _promotions(
    calls: Sequence[Call],
    trial: _Trial,
    outputs: Collection[Var],
    single: Collection[int],
    promoted: Mapping[int, LayerOf],
) -> dict[int, LayerOf]:
    """Returns the calls whose large results one layer alone reads, such as its noise."""
    readers: dict[Hashable, Counter[Any]] = defaultdict(Counter)
    for index, call in enumerate(calls):
        reader = trial.owner_of.get(call.outputs[0]) if index in trial.group_of else None
        for atom in variables(call.operands):
            if atom in trial.same:
                readers[trial.same[atom]][reader] += 1
    for var in outputs:
        if var in trial.same:
            readers[trial.same[var]][None] += 1
    added: dict[int, LayerOf] = {}
    for index in reversed(range(len(calls))):
        call = calls[index]
        if index in trial.group_of or index in single or index in promoted:
            continue
        if any(v in trial.owner_of for v in variables(call.operands)) or not call.outputs:
            continue
        if max(map(size_of, call.outputs)) <= SMALL:
            continue
        of_results = {r for v in call.outputs for r in +readers[trial.same[v]]}
        if len(of_results) != 1 or None in of_results:
            continue
        (owner,) = of_results
        added[index] = owner
        for atom in variables(call.operands):
            readers[trial.same[atom]][None] -= 1
            readers[trial.same[atom]][owner] += 1
    return added


def _without_partners(calls: Sequence[Call], trial: _Trial, counts: Mapping[str, int]) -> set[int]:
    """Returns the calls of layers that do not have a partner in every layer."""
    bad: set[int] = set()
    for (kind, _), members in trial.groups.items():
        if len(members) < counts[kind]:
            bad |= {*members.values()}
    return bad


def _with_other_layers(calls: Sequence[Call], trial: _Trial, counts: Mapping[str, int]) -> set[int]:
    """Returns the small calls of single layers of their kind that read a value of other layers.

    Such a layer has no partners, which would show that a sum over layers is not its own.
    """
    of_layers: set[Var] = set()  # values that belong to no layer, and that layers went into
    combined: set[int] = set()
    for index, call in enumerate(calls):
        operands = variables(call.operands)
        is_combined = not of_layers.isdisjoint(operands)
        if index not in trial.group_of:
            if is_combined or any(v in trial.owner_of for v in operands):
                of_layers.update(call.outputs)
        elif is_combined and counts[trial.group_of[index][0]] == 1 and _is_small(call):
            combined.add(index)
    return combined


def _first_of_chains(calls: Sequence[Call], bad: Collection[int]) -> set[int]:
    """Returns the calls without partners that depend on no other such call."""
    after: set[Var] = set()
    first: set[int] = set()
    for index, call in enumerate(calls):
        is_after = any(v in after for v in variables(call.operands))
        if index in bad and not is_after:
            first.add(index)
        if index in bad or is_after:
            after.update(call.outputs)
    return first


def _sorter(calls: Sequence[Call], trial: _Trial) -> TopologicalSorter[Any]:
    """Returns groups, by their key, and single calls, by their index, after what they read."""
    unit_of = {i: trial.group_of.get(i, i) for i in range(len(calls))}
    made_by = {var: unit_of[i] for i, call in enumerate(calls) for var in call.outputs}
    sorter: TopologicalSorter[Any] = TopologicalSorter()
    for i, call in enumerate(calls):
        needed = {made_by[v] for v in variables(call.operands) if v in made_by}
        sorter.add(unit_of[i], *needed)
    return sorter


def _calls_in_cycle(calls: Sequence[Call], trial: _Trial) -> set[int]:
    """Returns the calls of a group that waits for itself: its layers run one after the other."""
    try:
        _sorter(calls, trial).prepare()
    except CycleError as error:
        unit = next(unit for unit in error.args[1] if not isinstance(unit, int))
        return {*trial.groups[unit].values()}
    return set()


def _in_order(calls: Sequence[Call], trial: _Trial) -> tuple[PartnerCalls | Call, ...]:
    """Returns groups and single calls in an order in which they can run."""
    units: list[PartnerCalls | Call] = []
    for unit in _sorter(calls, trial).static_order():
        if isinstance(unit, int):
            units.append(calls[unit])
        else:
            members = trial.groups[unit]
            units.append(PartnerCalls(unit[0], tuple(calls[members[n]] for n in sorted(members))))
    return tuple(units)


def _check_single(
    calls: Sequence[Call], trial: _Trial, units: Iterable[PartnerCalls | Call]
) -> None:
    """Raises a `ValueError` if a single call reads whole arrays of layers."""
    for call in units:
        if isinstance(call, PartnerCalls):
            continue
        operands = variables(call.operands)
        large = [v for v in operands if v in trial.owner_of and size_of(v) > SMALL]
        if not large:
            continue
        owners = sorted({trial.owner_of[v].layer for v in large})
        names = sorted({trial.name_of[v] for v in large})
        leaf = f"{names[0]} of layer{'s' if len(owners) > 1 else ''} "
        leaf += ", ".join(map(str, owners[:4])) + (", ..." if len(owners) > 4 else "")
        if len(owners) > 1:
            raise ValueError(
                f"`{call.name}`{call.where} combines whole arrays of several layers, {leaf}, which "
                "a pipeline has on different devices. Combine numbers of layers, such as norms, or "
                "leave this transformation out of the optimizer."
            )
        raise ValueError(
            f"`{call.name}`{call.where} is applied to {leaf} and not to all layers alike, and the "
            "layers of a pipeline are updated by one program. Treat a parameter alike in all "
            "layers, or freeze it."
        )
