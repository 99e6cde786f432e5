"""Lowers a traced function to the instructions of all ranks: runs the passes in order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..ir._graph import Atom, Graph, Literal
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
    """Cuts loops into tasks, assigns ranks, unrolls the schedule and adds transfers and frees.

    Args:
        traced: The whole traced function.
        num_ranks: The number of groups.
        schedule_of: A function of the user's schedule and the number of microbatches, which returns
            a checked `Schedule`.
        out_ranks: The ranks of each result, or None if the compiler chooses.
        donated_inputs: The indices of the arguments that may be overwritten.
        processes: [num_ranks] the index of the process of each rank, or () if all ranks share one.
        observe: A function that is called with the name and the result of every pass, for dumps
            and tests.

    Returns:
        The function with its loops cut into tasks, and the instructions of all ranks.
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
    """Returns the program with a separate array for each output, as `jax.jit` has.

    Constants, values that are returned twice and inputs that are not donated are copied, so that
    donating one of these arrays later does not delete another one.
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
