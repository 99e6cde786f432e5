"""Pass 1, `unroll_scans`: writes out every `lax.scan` that contains a loop over microbatches.

Before: a traced function, in which loops over microbatches are equations of the primitive
`treduce`, at the top level or inside of scans.

After: the same function with one copy of the body for each iteration of these scans, so that their
loops are at the top level. All other scans are as before.

Why here: a pipelined loop must be at the top level, because its tasks run on several ranks and a
scan runs on one. The next pass takes the loops of the top level, and refuses all others.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from ....ir.graph import Atom, Eqn, Graph, PrimitiveCall, Scan, Var, aval_of, split_at
from ...ir._eqns import substitute_inputs, with_outputs
from ...ir._mpmd_graph import MpmdGraph
from ...ir._reduce import TREDUCE as LOOP
from ._reachable import find_eqns

MAX_UNROLLED_LENGTH = 64
"""Maximum length of a scan that is unrolled. A longer scan would take minutes to lower."""


def unroll_scans(graph: MpmdGraph) -> MpmdGraph:
    """Unrolls every `lax.scan` around a loop over microbatches."""
    eqns: list[Eqn] = []
    replacements: dict[Var, Atom] = {}
    for eqn in graph.eqns:
        assert isinstance(eqn, Eqn), "loops are extracted later"
        (eqn,) = substitute_inputs([eqn], replacements)
        eqns += _unroll_scan(eqn, replacements)
    return with_outputs(graph, eqns, replacements)


def _unroll_scan(eqn: Eqn, replacements: dict[Var, Atom]) -> list[Eqn]:
    """Returns the equations in place of `eqn`; maps its outputs to theirs in `replacements`."""
    caller = next(find_eqns(eqn, LOOP), None)
    if not isinstance(eqn.operation, Scan) or caller is None:
        return [eqn]
    loop = eqn.operation
    if loop.length > MAX_UNROLLED_LENGTH:
        raise ValueError(
            f"`{caller}` is called inside a `lax.scan` or `lax.fori_loop` of {loop.length} turns, "
            f"which is written out, and of more than {MAX_UNROLLED_LENGTH} that takes too long. "
            "Call the compiled function once for each turn, in a Python loop."
        )
    first_carry, first_x = loop.num_consts, loop.num_consts + loop.num_carry
    consts, carry, xs = split_at(eqn.inputs, (first_carry, first_x))
    eqns: list[Eqn] = []
    ys: list[list[Atom]] = []
    for turn in range(loop.length):
        i = loop.length - 1 - turn if loop.reverse else turn
        slices = [_slice_eqn(x, i) for x in xs]
        eqns += slices
        of_turn = [s.outputs[0] for s in slices]
        iteration = _iteration(loop.body, [*consts, *carry, *of_turn])
        eqns += iteration.eqns
        carry = iteration.outputs[: loop.num_carry]
        ys.append(list(iteration.outputs[loop.num_carry :]))
    replacements.update(zip(eqn.outputs[: loop.num_carry], carry, strict=True))
    in_order = ys[::-1] if loop.reverse else ys
    for i, output in enumerate(eqn.outputs[loop.num_carry :]):
        run = partial(_stack_results, output.aval)
        parts = tuple(y[i] for y in in_order)
        eqns.append(Eqn(PrimitiveCall("concatenate", run), parts, (output,)))
    return eqns


def _slice_eqn(x: Atom, i: int) -> Eqn:
    aval = aval_of(x)
    out = Var(ShapedArray(aval.shape[1:], aval.dtype))
    return Eqn(PrimitiveCall("slice", partial(_index_leading, i)), (x,), (out,))


def _index_leading(i: int, x: Any) -> list[jax.Array]:
    return [jnp.asarray(x)[i]]


def _stack_results(aval: Any, *ys: Any) -> list[jax.Array]:
    return [jnp.stack([jnp.asarray(y, aval.dtype) for y in ys]) if ys else jnp.zeros(aval.shape)]


def _iteration(body: Graph, operands: Sequence[Atom]) -> Graph:
    """Returns one iteration with new variables: it reads `operands`. Unrolls inner scans too."""
    replacements: dict[Var, Atom] = dict(zip(body.inputs, operands, strict=True))
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        outputs = tuple(Var(value.aval) for value in eqn.outputs)
        (own,) = substitute_inputs([replace(eqn, outputs=outputs)], replacements)
        replacements.update(zip(eqn.outputs, outputs, strict=True))
        later: dict[Var, Atom] = {}
        eqns += _unroll_scan(own, later)
        replacements |= {
            old: later.get(new, new) for old, new in zip(eqn.outputs, outputs, strict=True)
        }
    return replace(with_outputs(body, eqns, replacements), inputs=())
