"""The passes that lower a traced function to the instructions of every rank, in their order.

A pass is a function of one file, whose docstring says what it does, what is before and after it,
and why it stands where it stands. The passes over graphs take and return an `MpmdGraph`;
`unroll_schedule` returns an `MpmdProgram`, which the passes after it take and return. What the
caller asks (ranks, donation, specs) is in the graph and in the program, so a pass has no other
argument. The result of every pass is checked.

1. `unroll_scans` writes out scans around loops, so that all loops are at the top level.
2. `extract_loops` makes a `PipelinedLoop` with a graph and a schedule of each loop.
3. `hoist_invariants` moves equations that no microbatch changes out of the loops.
4. `cut_stages` cuts the graph of a loop at its marks into a graph for each stage.
5. `split_tasks` splits the graph of each stage into tasks: F and B, or F, I and W.
6. `separate_outputs` gives each result an array of its own, by copies where needed.
7. `assign_ranks` says which ranks run each equation outside of loops.
8. `propagate_shardings` takes users' specs along elementwise equations.
9. `outer_fragments` groups equations outside of loops into one program between two transfers.
10. `unroll_schedule` writes loops and fragments as one list of tasks, and leaves the graph behind.
11. `insert_transfers` adds a send and a receive behind each task whose results other ranks read.
12. `fuse_programs` makes one task of a forward and the backward behind it.
13. `liveness` donates each buffer to its last use, or deletes it.
"""

from collections.abc import Callable as _Callable
from typing import Any as _Any

from .loops import cut_stages as cut_stages
from .loops import extract_loops as extract_loops
from .loops import hoist_invariants as hoist_invariants
from .loops import split_tasks as split_tasks
from .loops import unroll_scans as unroll_scans
from .outer import assign_ranks as assign_ranks
from .outer import outer_fragments as outer_fragments
from .outer import propagate_shardings as propagate_shardings
from .outer import separate_outputs as separate_outputs
from .program import fuse_programs as fuse_programs
from .program import insert_transfers as insert_transfers
from .program import liveness as liveness
from .program import unroll_schedule as unroll_schedule

LOWERING: tuple[_Callable[[_Any], _Any], ...] = (
    # MpmdGraph -> MpmdGraph
    unroll_scans,
    extract_loops,
    hoist_invariants,
    cut_stages,
    split_tasks,
    separate_outputs,
    assign_ranks,
    propagate_shardings,
    outer_fragments,
    # MpmdGraph -> MpmdProgram
    unroll_schedule,
    # MpmdProgram -> MpmdProgram
    insert_transfers,
    fuse_programs,
    liveness,
)
"""The passes, in the order in which `lower` applies them."""
