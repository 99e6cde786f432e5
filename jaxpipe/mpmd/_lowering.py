"""Lowers a traced function to the instructions of all ranks: runs the passes in order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..ir.graph import Atom, Graph, Literal
from ..schedules import Schedule
from .ir._eqns import copy_eqn
from .ir._program import MpmdProgram, check
from .passes._assign_ranks import Ranks, assign_ranks
from .passes._fuse_programs import fuse_programs
from .passes._insert_transfers import insert_transfers
from .passes._liveness import liveness
from .passes._pipelined_loops import pipeline_loops
from .passes._unroll_schedule import unroll_schedule

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
) -> tuple[Graph, MpmdProgram]:
    """Cuts loops into tasks, assigns ranks, unrolls the schedule and adds transfers and deletes.

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
    looped = _with_separate_outputs(pipeline_loops(traced, schedule_of), donated_inputs)
    observe("pipeline_loops", looped)
    outer, assignment = assign_ranks(looped, num_ranks, out_ranks)
    observe("assign_ranks", assignment)
    program = unroll_schedule(outer, assignment, num_ranks)
    observe("unroll_schedule", program)
    for name, one_pass in (
        ("insert_transfers", insert_transfers),
        ("fuse_programs", fuse_programs),
        ("liveness", partial(liveness, donated_inputs=donated_inputs, processes=processes)),
    ):
        program = one_pass(program)
        check(program)
        observe(name, program)
    return outer, program


def _with_separate_outputs(looped: Graph, donated_inputs: frozenset[int]) -> Graph:
    """Returns the program with a separate array for each output, as `jax.jit` has.

    Constants, values that are returned twice and inputs that are not donated are copied, so that
    donating one of these arrays later does not delete another one.
    """
    inputs = (value for i, value in enumerate(looped.inputs) if i not in donated_inputs)
    eqns, outputs, shared = list(looped.eqns), [], set[Atom](inputs)
    for atom in looped.outputs:
        if isinstance(atom, Literal) or atom in shared:
            eqns.append(copy_eqn(atom))
            atom = eqns[-1].outputs[0]
        shared.add(atom)
        outputs.append(atom)
    return Graph(looped.inputs, tuple(eqns), tuple(outputs))
