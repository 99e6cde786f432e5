"""Pass 6, `separate_outputs`: gives every result of the function an array of its own.

Before: a function that may return a constant, an argument, or one value twice.

After: a function whose results are different variables, none of them a constant or an argument
that is not donated: copies where they were not, as `jax.jit` makes them. Donating one result later
thus does not delete another one.

Why here: the copies are equations outside of loops like any other, which `assign_ranks` assigns and
`outer_fragments` puts into programs. Before the loops were cut, results of loops that are arguments
in truth (`hoist_invariants` finds them) could not be seen.
"""

from dataclasses import replace

from ....ir.graph import Atom, Literal
from ...ir._eqns import copy_eqn
from ...ir._mpmd_graph import MpmdGraph


def separate_outputs(graph: MpmdGraph) -> MpmdGraph:
    """Copies constants, values that are returned twice, and inputs that are not donated."""
    donated = graph.options.donated_inputs
    shared: set[Atom] = {value for i, value in enumerate(graph.inputs) if i not in donated}
    eqns, outputs = list(graph.eqns), []
    for atom in graph.outputs:
        if isinstance(atom, Literal) or atom in shared:
            eqn = copy_eqn(atom)
            eqns.append(eqn)
            (atom,) = eqn.outputs
        shared.add(atom)
        outputs.append(atom)
    return replace(graph, eqns=tuple(eqns), outputs=tuple(outputs))
