"""Reads inputs of a program from entries of buffers, and writes outputs there, layer by layer.

A loop over layers takes what was stored of all layers as one array, and returns another. If these
are entries of buffers, `buffer[index]` as an input is a copy of the entry, and so is an output that
is written to `buffer[index]`. After this pass each iteration reads its slice from the buffer, or
writes it there in place, and no array of all layers is made. Sums of gradients are both: each
iteration reads its slice and replaces it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _compat
from ..graph import (
    Eqn,
    Graph,
    Literal,
    PrimitiveCall,
    Scan,
    Var,
    count_uses,
    has_plain_slices,
    origin,
    partitioned_axes,
    pvary_like,
    row_major,
    split_at,
    variables,
)


class Entry(NamedTuple):
    """`buffer[index]`, not copied: a program reads it there, or writes it in place."""

    buffer: Any  # [entries, ...]
    index: Any  # the index of the entry, a scalar


def call_with_entries(
    program: Graph, inputs: Sequence[Any], into: Mapping[int, Entry] | None = None
) -> list[Any]:
    """Calls a program on arrays and entries of buffers, and returns its [num_outputs] results.

    `into` has the entry to which each output is written, by its index; its buffer is then the
    result. If the same object is also an input, loops replace its slices in place.
    """
    into = into or {}
    entries = {
        var: _entry_vars(x)
        for var, x in zip(program.inputs, inputs, strict=True)
        if isinstance(x, Entry)
    }
    targets = {i: _entry_vars(entry) for i, entry in into.items()}
    outer = [
        v for var in program.inputs for v in ((*entries[var],) if var in entries else (var,))
    ] + [v for entry in targets.values() for v in entry]
    arguments = [v for x in inputs for v in ((*x,) if isinstance(x, Entry) else (x,))]
    arguments += [v for entry in into.values() for v in entry]
    held = {id(x): var for var, x in zip(program.inputs, inputs, strict=True)}
    sums = {i: held[id(entry)] for i, entry in into.items() if id(entry) in held}
    summed, targets = _summing(program, sums, targets)
    written = _writing(_reading(summed, entries), targets)
    return Graph(tuple(outer), written.eqns, written.outputs)(*arguments)


def _entry_vars(entry: Entry) -> Entry:
    return Entry(*(Var(jax.typeof(x)) for x in entry))


def _summing(
    program: Graph, sums: Mapping[int, Var], targets: Mapping[int, Entry]
) -> tuple[Graph, dict[int, Entry]]:
    """Makes loops replace slices of `sums`, inputs by the index of the output in the same entry."""
    uses = count_uses(program)
    makers = {value: eqn for eqn in program.eqns for value in eqn.outputs}
    outputs, targets_left = list(program.outputs), dict(targets)
    within: defaultdict[Eqn, dict[Var, tuple[Entry, Var]]] = defaultdict(dict)
    passed: set[Eqn] = set()
    for i, start in sums.items():
        total, entry = outputs[i], targets[i]
        if total is start:  # nothing is added
            outputs[i] = targets_left.pop(i).buffer
            continue
        if not isinstance(total, Var) or total not in makers:
            continue
        eqn = makers[total]
        before = _accumulators(eqn).get(total)
        if before is None:
            continue
        _, first, casts = origin(before, makers, uses, _is_pvary)
        if first is start and uses[start] == uses[total] == 1 and _fits(before.aval, entry):
            result = outputs[i] = Var(entry.buffer.aval)
            within[eqn][before] = targets_left.pop(i), result
            passed.update(casts)
    eqns = [_with_entries(eqn, sums=within[eqn]) for eqn in program.eqns if eqn not in passed]
    return Graph(program.inputs, tuple(eqns), tuple(outputs)), targets_left


def _fits(aval: Any, entry: Entry) -> bool:
    """Returns whether a loop can carry the buffer of an entry with slices of this type in it."""
    # What a loop carries keeps its type, so the buffer must vary over the same manual axes.
    varying = (x.manual_axis_type.varying for x in (aval, entry.buffer.aval))
    return has_plain_slices(aval) and len(set(varying)) == 1


def _reading(program: Graph, entries: Mapping[Var, Entry]) -> Graph:
    """Returns a program that reads some of its inputs from entries of buffers."""
    everywhere = count_uses(program)
    as_slices = Counter(x for eqn in program.eqns for x in _stacks(eqn) if x in entries)
    by_slices = {
        var: entry
        for var, entry in entries.items()
        if everywhere[var] == as_slices[var] and has_plain_slices(var.aval)
    }
    whole = [
        Eqn(_read_as(var), (*entry,), (var,))
        for var, entry in entries.items()
        if var not in by_slices
    ]
    eqns = [
        _with_entries(eqn, entries={x: by_slices[x] for x in _stacks(eqn) if x in by_slices})
        for eqn in program.eqns
    ]
    return Graph(program.inputs, (*whole, *eqns), program.outputs)


def _writing(program: Graph, targets: Mapping[int, Entry]) -> Graph:
    """Returns a program that writes some of its outputs to entries of buffers."""
    uses = count_uses(program)
    makers = {value: eqn for eqn in program.eqns for value in eqn.outputs}
    outputs, eqns = list(program.outputs), []
    within: defaultdict[Eqn, dict[Var, tuple[Entry, Var]]] = defaultdict(dict)
    passed: set[Eqn] = set()
    for i, entry in targets.items():
        written = Var(entry.buffer.aval)
        eqn, produced, casts = origin(outputs[i], makers, uses, _is_pvary)
        if (
            eqn is not None
            and produced in _stacked_outputs(eqn)
            and has_plain_slices(produced.aval)
        ):
            within[eqn][produced] = entry, written
            passed.update(casts)
        else:
            eqns.append(Eqn(_WRITE, (*entry, outputs[i]), (written,)))
        outputs[i] = written
    kept = [_with_entries(eqn, targets=within[eqn]) for eqn in program.eqns if eqn not in passed]
    return Graph(program.inputs, (*kept, *eqns), tuple(outputs))


def _is_pvary(eqn: Eqn) -> bool:
    return isinstance(eqn.operation, PrimitiveCall) and eqn.operation.name in ("pvary", "pcast")


def _stacks(eqn: Eqn) -> list[Var]:
    """Returns the inputs of which an equation reads a slice in each iteration."""
    if not isinstance(loop := eqn.operation, Scan) or not loop.length:
        return []
    first = loop.num_consts + loop.num_carry
    return variables(eqn.inputs[first : len(eqn.inputs) - loop.num_accumulators])


def _stacked_outputs(eqn: Eqn) -> tuple[Var, ...]:
    """Returns the outputs of which an equation computes a slice in each iteration."""
    if not isinstance(loop := eqn.operation, Scan) or not loop.length:
        return ()
    end = len(eqn.outputs) - loop.num_accumulators
    slices = loop.body.outputs[loop.num_carry : end]
    stacks = zip(eqn.outputs[loop.num_carry : end], slices, strict=True)
    return tuple(stack for stack, inner in stacks if isinstance(inner, Var))


def _accumulators(eqn: Eqn) -> dict[Var, Var]:
    """Returns the inputs of which an equation replaces a slice in each iteration, by its output."""
    if not isinstance(loop := eqn.operation, Scan) or not (loop.length and loop.num_accumulators):
        return {}
    n = loop.num_accumulators
    return {
        after: before
        for after, before in zip(eqn.outputs[-n:], eqn.inputs[-n:], strict=True)
        if isinstance(before, Var)
    }


def _with_entries(
    eqn: Eqn,
    *,
    entries: Mapping[Var, Entry] = {},
    targets: Mapping[Var, tuple[Entry, Var]] = {},
    sums: Mapping[Var, tuple[Entry, Var]] = {},
) -> Eqn:
    """Returns a loop that reads stacks from entries of buffers, and writes others to entries."""
    if not (entries or targets or sums):
        return eqn
    loop = eqn.operation
    assert isinstance(loop, Scan)
    ends = loop.num_consts, loop.num_consts + loop.num_carry
    ends = *ends, len(eqn.inputs) - loop.num_accumulators
    outer, inner = split_at(eqn.inputs, ends), split_at(loop.body.inputs, ends)
    out_ends = loop.num_carry, len(eqn.outputs) - loop.num_accumulators
    outer_out, inner_out = split_at(eqn.outputs, out_ends), split_at(loop.body.outputs, out_ends)

    accesses = _Accesses()
    xs, ys, sums_before, sums_after = (_Pairs() for _ in range(4))
    for x, one in zip(outer[2], inner[2], strict=True):
        if isinstance(x, Var) and x in entries:
            accesses.read(entries[x], x, one)
        else:
            xs.add(x, one)
    for y, one in zip(outer_out[1], inner_out[1], strict=True):
        if y in targets:
            accesses.write(*targets[y], one)
        else:
            ys.add(y, one)
    changed = zip(outer[3], inner[3], outer_out[2], inner_out[2], strict=True)
    for x, one, total, new in changed:
        if isinstance(x, Var) and x in sums:
            accesses.replace(*sums[x], x, one, new)
        else:
            sums_before.add(x, one)
            sums_after.add(total, new)
    body = Graph(
        (
            *(*inner[0], *accesses.constants.inner, *inner[1], *accesses.carried.inner),
            *(*xs.inner, accesses.i, *sums_before.inner),
        ),
        (*accesses.before, *loop.body.eqns, *accesses.after),
        (*inner_out[0], *accesses.written.inner, *ys.inner, *sums_after.inner),
    )
    operation = replace(
        loop,
        body=body,
        num_consts=loop.num_consts + len(accesses.constants.inner),
        num_carry=loop.num_carry + len(accesses.carried.inner),
        num_accumulators=len(sums_before.inner),
    )
    iterations = Literal(np.arange(loop.length, dtype=np.int32))
    return Eqn(
        operation,
        (
            *(*outer[0], *accesses.constants.outer, *outer[1], *accesses.carried.outer),
            *(*xs.outer, iterations, *sums_before.outer),
        ),
        (*outer_out[0], *accesses.written.outer, *ys.outer, *sums_after.outer),
    )


class _Pairs:
    """Variables outside of a loop, and the variables of its body that belong to them."""

    def __init__(self):
        self.outer: list[Any] = []
        self.inner: list[Any] = []

    def add(self, outer: Any, inner: Any) -> None:
        self.outer.append(outer)
        self.inner.append(inner)


class _Accesses:
    """Collects what a loop takes, computes and returns more in order to access buffers."""

    def __init__(self):
        self.i = Var(jax.typeof(jnp.int32(0)))  # the index of the iteration
        self.constants = _Pairs()  # indices of entries, and buffers that are read
        self.carried, self.written = _Pairs(), _Pairs()  # written buffers, before and after
        self.before: list[Eqn] = []  # equations that an iteration runs before all others
        self.after: list[Eqn] = []

    def read(self, entry: Entry, stack: Var, one: Var) -> None:
        """Reads `one`, a slice of `stack`, from an entry."""
        here = [Var(v.aval) for v in entry]
        for outer, inner in zip(entry, here, strict=True):
            self.constants.add(outer, inner)
        self.before.append(Eqn(_read_as(stack), (*here, self.i), (one,)))

    def write(self, entry: Entry, result: Var, one: Any) -> tuple[Var, Var]:
        """Writes `one` to an entry, whose buffer is `result` then; returns buffer and index."""
        buffer, index, after = Var(entry.buffer.aval), Var(entry.index.aval), Var(result.aval)
        self.constants.add(entry.index, index)
        self.carried.add(entry.buffer, buffer)
        self.written.add(result, after)
        self.after.append(Eqn(_WRITE, (buffer, index, one, self.i), (after,)))
        return buffer, index

    def replace(self, entry: Entry, result: Var, stack: Var, one: Var, new: Any) -> None:
        """Reads `one`, a slice of `stack`, from an entry, and writes `new` there."""
        here = self.write(entry, result, new)
        self.before.append(Eqn(_read_as(stack), (*here, self.i), (one,)))


def _read_as(var: Var) -> PrimitiveCall:
    """Returns the operation that reads `var`; what is stored may vary over fewer manual axes."""
    return PrimitiveCall("read_entry", partial(_read, var.aval))


def _read(aval: Any, buffer: jax.Array, index: Any, *inner: Any) -> list[jax.Array]:
    """Reads `buffer[index, *inner]`, which varies over the axes of `aval` then."""
    indices = index, *inner
    sizes = (1,) * len(indices) + buffer.shape[len(indices) :]
    entry = lax.dynamic_slice(buffer, _starts(buffer, indices), sizes)
    x = pvary_like(aval, lax.squeeze(entry, range(len(indices))))
    return [_in_layout(x) if _is_whole(buffer, inner) else x]


def _write(buffer: jax.Array, index: Any, x: jax.Array, *inner: Any) -> list[jax.Array]:
    """Writes `x` to `buffer[index, *inner]`."""
    indices = index, *inner
    x = pvary_like(jax.typeof(buffer), _in_layout(x) if _is_whole(buffer, inner) else x)
    new = lax.expand_dims(x, range(len(indices)))
    return [lax.dynamic_update_slice(buffer, new, _starts(buffer, indices))]


def _is_whole(buffer: jax.Array, inner: Sequence[Any]) -> bool:
    """Returns whether a slice of an entry is all of it; XLA unrolls loops of one iteration."""
    return all(size == 1 for size in buffer.shape[1 : 1 + len(inner)])


def _in_layout(x: jax.Array) -> jax.Array:
    """Returns a whole entry in row-major layout, on TPUs."""
    # Otherwise XLA:TPU gives an entry the layout that its reader wants, by a copy of the whole
    # buffer for every microbatch if its writer wants another. Slices that a loop reads need no
    # constraint.
    is_number = jnp.issubdtype(x.dtype, jnp.number)
    if _compat.platform() != "tpu" or partitioned_axes() or not is_number:
        return x
    return row_major(x)


def _starts(buffer: jax.Array, indices: Sequence[Any]) -> list[Any]:
    zero = jnp.int32(0)
    return [*(jnp.asarray(i, jnp.int32) for i in indices), *[zero] * (buffer.ndim - len(indices))]


_WRITE = PrimitiveCall("write_entry", _write)
