"""Pass 2, `extract_loops`: turns every loop over microbatches into a node of the graph.

Before: a function with equations of the primitive `treduce` at its top level. The primitive exists
because tracing needs one: JAX records calls of primitives only.

After: a `PipelinedLoop` in place of each of these equations, with its body as a graph, its checked
schedule and its reductions. No later pass sees the primitive.

Why here: all passes below work on loops. Here the user's schedule becomes a `Schedule`, and errors
about where loops and marks are written are raised before any pass moves code.
"""

from typing import Any

from ...._compat import ClosedJaxpr, jaxprs_in_params
from ....ir.graph import Eqn, Graph, to_graph
from ...ir._eqns import is_mark, params_of, primitive_of
from ...ir._marks import STAGE_END
from ...ir._mpmd_graph import LoweringOptions, MpmdGraph, PipelinedLoop
from ...ir._reduce import TREDUCE, reductions
from ._align_marks import forward_mark_ids
from ._reachable import check_reachable


def extract_loops(graph: MpmdGraph) -> MpmdGraph:
    """Replaces every equation of the primitive `treduce` by a `PipelinedLoop`."""
    eqns = [eqn for eqn in graph.eqns if isinstance(eqn, Eqn)]
    check_reachable(eqns, "the function")
    nodes: list[Eqn | PipelinedLoop] = []
    for eqn in eqns:
        if is_mark(eqn):
            raise ValueError(
                "A stage is marked outside of a loop over microbatches. Call `treduce` around it, "
                "or use `mpmd_jit_by_yield` for a function that has no loop."
            )
        nodes.append(_to_loop(eqn, graph.options) if primitive_of(eqn) == TREDUCE else eqn)
    return MpmdGraph(graph.inputs, tuple(nodes), graph.outputs, graph.options)


def _to_loop(eqn: Eqn, options: LoweringOptions) -> PipelinedLoop:
    """Returns the node for an equation of the primitive."""
    params = params_of(eqn)
    num_microbatches, operations = params["num_microbatches"], params["operations"]
    schedule = options.to_schedule(params["schedule"], num_microbatches)
    body = to_graph(params["jaxpr"], prints=True)
    check_reachable(body.eqns, "a stage")
    return PipelinedLoop(
        inputs=eqn.inputs,
        outputs=eqn.outputs,
        body=body,
        schedule=schedule,
        reductions=tuple(reductions(params["jaxpr"].out_avals, operations, num_microbatches)),
        all_mark_ids=_all_mark_ids(params["jaxpr"], body),
        stages=(),
        specs=(None,) * len(eqn.outputs),
    )


def _all_mark_ids(traced: ClosedJaxpr, body: Graph) -> tuple[int, ...]:
    """Returns the ids of all forward marks if some of them are dead code in `traced`, else ()."""
    if _count_marks(traced.jaxpr) == sum(map(is_mark, body.eqns)):
        return ()
    return tuple(forward_mark_ids(to_graph(traced, keep_dead=True, prints=True)))


def _count_marks(jaxpr: Any) -> int:
    """Returns the number of equations of a jaxpr that are marks, at any depth."""
    return sum(
        1
        if eqn.primitive.name == STAGE_END
        else sum(map(_count_marks, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )
