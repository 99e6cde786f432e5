"""Arguments that the caller gives away: after a call they are deleted, as by `jax.jit`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from ._array import MpmdArray
from ._code import Code, Send

GivenAway = dict[int, tuple[int, ...]]
"""Arguments by their place among all leaves, and the ranks whose array stays nevertheless."""


def given_away(code: Code, donated: frozenset[int], *, crosses: bool) -> GivenAway:
    """Returns the arguments that a call deletes.

    As with `jax.jit`, a donated argument is deleted if a result has its shape and dtype, and each
    result stands for one argument. What is returned as it is, or sent, shares its memory with the
    result or the transfer: there the array stays.

    Args:
        code: What ranks run.
        donated: The places of donated arguments among all leaves.
        crosses: Whether there are several processes.
    """
    results = Counter(_type(buffer.value.aval) for buffer, _ in code.outputs)
    shared: dict[Any, set[int]] = {}
    for buffer, ranks in code.outputs:
        shared.setdefault(buffer, set()).update(ranks)
    for instruction in code.instructions if crosses else ():
        if isinstance(instruction, Send):
            for buffer in instruction.buffers:
                shared.setdefault(buffer, set()).add(instruction.rank)
    found: GivenAway = {}
    for i in sorted(donated):
        buffer, _ = code.inputs[i]
        kind = _type(buffer.value.aval)
        if results[kind]:
            results[kind] -= 1
            found[i] = tuple(shared.get(buffer, ()))
    return found


def give_away(leaves: Sequence[Any], given: GivenAway) -> None:
    """Deletes arguments of a call whose programs are all started."""
    kept = {id(leaf) for i, leaf in enumerate(leaves) if i not in given}
    for i, ranks in given.items():
        leaf = leaves[i]
        if id(leaf) in kept:
            continue
        if isinstance(leaf, MpmdArray):
            leaf.give_away(ranks)
        elif isinstance(leaf, jax.Array) and not ranks and not leaf.is_deleted():
            leaf.delete()


def _type(aval: Any) -> Any:
    return aval.shape, aval.dtype
