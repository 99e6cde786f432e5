"""The passes that lower a traced function to the instructions of every rank, in their order.

A pass is a function of one file, whose docstring says at length what this list says in a sentence:
what it does, what is before it and after it, and why it stands where it stands. The passes over
graphs take and return an `MpmdGraph`; `unroll_schedule` returns an `MpmdProgram`, which the passes
after it take and return. What the caller asks (ranks, donation, specs) is in the graph and in the
program, so a pass has no other argument. `lower` checks the result of every pass.

1. `unroll_scans` writes out scans around loops, so that all loops are at the top level. It is first
   because no other pass looks into scans.
2. `extract_loops` turns each loop from a primitive of the trace into a `PipelinedLoop` with a graph
   and a schedule. All passes below work on this node.
3. `hoist_invariants` moves equations that no microbatch changes out of the loops. It is before
   `cut_stages`, which would make such an equation a part of several stages.
4. `cut_stages` cuts the one graph of a loop at its marks into a graph for each stage, and adds up
   results that several stages contribute to. Marks have no meaning after it.
5. `split_tasks` splits the graph of each stage into tasks: F and B, or F, I and W. It needs to know
   which values the stage sends. The tasks say where results are accumulated.
6. `separate_outputs` gives each result an array of its own, by copies where needed. It is before
   `assign_ranks` because the copies need ranks too.
7. `assign_ranks` says which ranks run each equation outside of loops, starting from the ranks of
   the tasks. All passes below ask where a value is.
8. `propagate_shardings` takes the specs that users give to values connected with them by
   elementwise equations. It is before `outer_fragments`, which hides these equations in programs.
9. `outer_fragments` groups the equations outside of loops into one program per rank between two
   transfers, which is possible as soon as equations have ranks.
10. `unroll_schedule` writes loops and fragments as one list of tasks, and leaves the graph behind.
    What is decided below depends on the order of tasks.
11. `insert_transfers` adds a send and a receive behind each task whose results other ranks read.
12. `fuse_programs` makes one task of a forward and the backward behind it if no transfer is between
    them, so it is after `insert_transfers`.
13. `liveness` donates each buffer to its last use, or deletes it. It is last because any other pass
    would move, add or remove uses.
"""

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

LOWERING = (
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
