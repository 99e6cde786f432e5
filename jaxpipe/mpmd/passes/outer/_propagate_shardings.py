"""Pass 8, `propagate_shardings`: finds the shardings within a group that follow from known ones.

Before: a function for which the user has given specs of some arguments and results, and
constraints.

After: the same function with `specs`: those of the user, those of values that are elementwise
results of such values, and a replicated spec for every other result of a loop. The compiler chooses
the sharding of any other value when it compiles the program that computes the value.

Why here: a sum of gradients is sharded like the new weights computed from it, whose spec is known.
The equations that connect the two are in the graph: after `outer_fragments` they are inside of
several programs. No earlier pass needs specs.
"""

from collections.abc import Mapping
from dataclasses import replace

from jax.sharding import PartitionSpec

from ....ir.graph import Eqn, Var, is_cheap, is_move, variables
from ...api._mesh import check_spec
from ...ir._mpmd_graph import MpmdGraph, PipelinedLoop
from ..loops._constraints import constraint_of, keeps_indices


def propagate_shardings(graph: MpmdGraph) -> MpmdGraph:
    """Propagates the specs of arguments, results and constraints along elementwise equations.

    An argument has the spec that the caller gives it. A result has the spec that the caller gives
    it, else that of a constraint. The results of a loop are equally sharded in all their versions:
    without a spec they are replicated.
    """
    options = graph.options
    specs = dict(zip(graph.inputs, options.in_specs, strict=True))
    outputs = zip(variables(graph.outputs), options.out_specs, strict=True)
    for value, spec in (*outputs, *_constrained_specs(graph).items()):
        if specs.get(value) is None:
            specs[value] = spec
    known_specs = {value: spec for value, spec in specs.items() if spec is not None}
    replicated = {value: PartitionSpec() for loop in graph.loops for value in loop.outputs}
    return replace(graph, specs=replicated | _propagated(graph, known_specs))


def _propagated(
    graph: MpmdGraph, known_specs: Mapping[Var, PartitionSpec]
) -> dict[Var, PartitionSpec]:
    """Returns the known specs, and those that follow from them.

    The outputs of an elementwise equation are sharded like its inputs of the same shape.
    """
    group: dict[Var, Var] = {}

    def root(value: Var) -> Var:
        while value in group:
            value = group[value]
        return value

    for eqn in graph.eqns:
        if not _is_elementwise(eqn):
            continue
        for value in variables(eqn.inputs):
            for output in eqn.outputs:
                same = value.aval.shape == output.aval.shape and value.aval.shape
                if same and root(value) is not root(output):
                    group[root(output)] = root(value)
    spec_of: dict[Var, PartitionSpec] = {}
    for value, spec in known_specs.items():
        spec_of.setdefault(root(value), spec)
    everything = [*graph.inputs, *(v for eqn in graph.eqns for v in eqn.outputs)]
    return {v: spec_of[root(v)] for v in everything if root(v) in spec_of} | dict(known_specs)


def _constrained_specs(graph: MpmdGraph) -> dict[Var, PartitionSpec]:
    """Returns the specs that users give to values outside of loops and to results of loops.

    The spec of a loop's result inside the loop takes precedence over one after the loop.
    """
    of_loops: dict[Var, PartitionSpec] = {}
    outside: dict[Var, PartitionSpec] = {}
    for eqn in graph.eqns:
        if isinstance(eqn, PipelinedLoop):
            specs = zip(eqn.outputs, eqn.specs, strict=True)
            of_loops |= {value: spec for value, spec in specs if spec is not None}
        elif (spec := constraint_of(eqn)) is not None:
            outside |= dict.fromkeys(variables(eqn.outputs), spec)
            outside |= {v: spec for v in variables(eqn.inputs) if v not in outside}
    for spec in (*of_loops.values(), *outside.values()):
        check_spec(spec, graph.options.mpmd_axis, "`with_sharding_constraint`")
    return outside | of_loops


def _is_elementwise(eqn: Eqn | PipelinedLoop) -> bool:
    return isinstance(eqn, Eqn) and (keeps_indices(eqn) or (is_cheap(eqn) and not is_move(eqn)))
