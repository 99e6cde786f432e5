"""From a traced function to code: the passes, in order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..ir import Atom, Graph, Literal
from ..schedules import Schedule
from .ir._program import Code, check
from .ir._steps import copy_of
from .passes._assign_ranks import Ranks, place
from .passes._fuse_programs import fuse
from .passes._insert_transfers import exchange
from .passes._liveness import free
from .passes._pipelined_loops import pipeline_loops
from .passes._unroll_schedule import emit

Observe = Callable[[str, Any], None]


def lower(
    traced: Graph,
    num_ranks: int,
    schedule_of: Callable[[Any, int], Schedule],
    *,
    out_ranks: Sequence[Ranks | None],
    donated_inputs: frozenset[int] = frozenset(),
    processes: Sequence[int] = (),
    observe: Observe = lambda name, result: None,
) -> tuple[Graph, Code]:
    """Cuts loops into tasks, places everything, and adds what ranks exchange.

    Args:
        traced: The whole function.
        num_ranks: The number of groups.
        schedule_of: A checked schedule from what the user gave, and a number of microbatches.
        out_ranks: Where the caller wants each result; None leaves it open.
        donated_inputs: Which arguments may be overwritten.
        processes: That of each rank, if there are several.
        observe: Sees the result of every pass, for dumps and tests.

    Returns:
        The function with its loops in tasks, and the code.
    """
    looped = _with_own_outputs(pipeline_loops(traced, schedule_of), donated_inputs)
    observe("pipeline_loops", looped)
    outer, placement = place(looped, num_ranks, out_ranks)
    observe("place", placement)
    code = emit(outer, placement, num_ranks)
    observe("emit", code)
    for name, one_pass in (
        ("exchange", exchange),
        ("fuse", fuse),
        ("free", partial(free, donated_inputs=donated_inputs, processes=processes)),
    ):
        code = one_pass(code)
        check(code)
        observe(name, code)
    return outer, code


def _with_own_outputs(looped: Graph, donated_inputs: frozenset[int]) -> Graph:
    """Returns the program with an array of its own for each output, as `jax.jit` has.

    Constants, values that are returned twice, and inputs that the caller keeps are copied: whoever
    donates one array must not lose another.
    """
    kept = (value for i, value in enumerate(looped.inputs) if i not in donated_inputs)
    steps, outputs, shared = list(looped.steps), [], set[Atom](kept)
    for atom in looped.outputs:
        if isinstance(atom, Literal) or atom in shared:
            steps.append(copy_of(atom))
            atom = steps[-1].outputs[0]
        shared.add(atom)
        outputs.append(atom)
    return Graph(looped.inputs, tuple(steps), tuple(outputs))
