"""Combines what several ranks have accumulated that run one stage, each for its own microbatches.

A schedule such as DualPipe runs a stage on two ranks, and a microbatch on one of them. Each rank
reduces the results of its microbatches, as if there were no others.
"""

from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from ...ir.graph import Eqn, PrimitiveCall, Var
from ._eqns import ADD
from ._reduce import Concat, Max, Reduction, is_add

_MAX = PrimitiveCall("max", lambda x, y: [jnp.maximum(x, y)])


def combine_eqns(
    parts: Sequence[Var], result: Var, reduction: Reduction, microbatches: Sequence[Collection[int]]
) -> list[Eqn]:
    """Returns the equations that compute a result of a loop from those of its ranks."""
    eqns, total = [], parts[0]
    for i, (part, own) in enumerate(zip(parts[1:], microbatches[1:], strict=True), 2):
        combined = result if i == len(parts) else Var(result.aval)
        eqns.append(Eqn(_combination(reduction, own), (total, part), (combined,)))
        total = combined
    return eqns


def _combination(reduction: Reduction, own: Collection[int]) -> PrimitiveCall:
    """Returns `(result, result of a rank with the microbatches own) -> result of both`."""
    operation = reduction.operation
    if is_add(operation):
        return ADD
    if operation is Max:
        return _MAX
    if isinstance(operation, Concat):
        mask = tuple(m in own for m in range(reduction.num_microbatches))
        return PrimitiveCall("with_microbatches", partial(_with_microbatches, operation.axis, mask))
    combine = getattr(operation, "combine", None)
    if combine is None:
        raise ValueError(
            f"`operation` has {operation!r}, and `schedule` runs a stage on several ranks, which "
            "reduce different microbatches. Give `operation` a method `combine(state, other)` that "
            "returns the state of both, or give a schedule that has each stage on one rank."
        )
    return PrimitiveCall("combine", lambda state, other: [combine(state, other)])


def _with_microbatches(
    axis: int, mask: tuple[bool, ...], stacked: jax.Array, other: jax.Array
) -> list[jax.Array]:
    """Returns `stacked` with the microbatches of `mask` taken from `other`."""
    axis %= stacked.ndim
    shape = [len(mask) if dim == axis else 1 for dim in range(stacked.ndim)]
    return [jnp.where(jnp.asarray(mask).reshape(shape), other, stacked)]
