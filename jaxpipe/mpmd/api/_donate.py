"""Deletes the donated arguments of a call, as `jax.jit` does."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from ..ir._program import MpmdProgram, Send
from ._array import MpmdArray

DeletedArguments = dict[int, tuple[int, ...]]
"""Maps the index of each deleted argument among all leaves to the ranks that keep its array."""


def deleted_arguments(
    program: MpmdProgram, donated: frozenset[int], *, crosses: bool
) -> DeletedArguments:
    """Returns the arguments that a call deletes.

    As with `jax.jit`, a donated argument is deleted if a result has its shape and dtype. Each
    result accounts for one argument: arguments that are returned unchanged are matched first. An
    argument that a rank returns unchanged, or sends to another rank while there are several
    processes, shares its memory with the result or the transfer. That rank keeps its array.
    """
    results = Counter(_type(buffer.value.aval) for buffer, _ in program.outputs)
    shared: dict[Any, set[int]] = {}
    for buffer, ranks in program.outputs:
        shared.setdefault(buffer, set()).update(ranks)
    for instruction in program.instructions if crosses else ():
        if isinstance(instruction, Send):
            for buffer in instruction.buffers:
                shared.setdefault(buffer, set()).add(instruction.rank)
    returned = {buffer for buffer, _ in program.outputs}
    deleted: DeletedArguments = {}
    for i in sorted(donated, key=lambda i: (program.inputs[i][0] not in returned, i)):
        buffer, _ = program.inputs[i]
        kind = _type(buffer.value.aval)
        if results[kind]:
            results[kind] -= 1
            deleted[i] = tuple(shared.get(buffer, ()))
    return deleted


def delete_arguments(leaves: Sequence[Any], deleted: DeletedArguments) -> None:
    """Deletes the donated arguments of a call after all its programs have been started."""
    for i, ranks in deleted.items():
        leaf = leaves[i]
        if isinstance(leaf, MpmdArray):
            leaf.delete_except(ranks)
        elif isinstance(leaf, jax.Array) and not ranks and not leaf.is_deleted():
            leaf.delete()


def _type(aval: Any) -> Any:
    return aval.shape, aval.dtype
