"""Propagates shardings within a group to values whose sharding the caller has not given.

A sum of gradients is sharded like the new weights computed from it, whose spec is known. The
compiler chooses all other shardings when it compiles the program that computes the value.
"""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from ...ir.graph import Eqn, Graph, PrimitiveCall, Var, is_cheap, is_move, variables
from ..passes._accumulators import constraint_of
from ..passes._pipelined_loops import loop_of
from ._on_submesh import check_spec


def propagate_shardings(
    outer: Graph, known: Mapping[Var, PartitionSpec | None]
) -> dict[Var, PartitionSpec]:
    """Propagates known specs along elementwise equations.

    The outputs of such an equation are sharded like its inputs of the same shape.

    Args:
        outer: A function whose loops are split into tasks.
        known: The specs of some values; None is unknown.

    Returns:
        The specs of all values for which one is known or was found.
    """
    group: dict[Var, Var] = {}

    def root(value: Var) -> Var:
        while value in group:
            value = group[value]
        return value

    for eqn in outer.eqns:
        if not _is_elementwise(eqn):
            continue
        for value in variables(eqn.inputs):
            for made in eqn.outputs:
                same = value.aval.shape == made.aval.shape and value.aval.shape
                if same and root(value) is not root(made):
                    group[root(made)] = root(value)
    found: dict[Var, PartitionSpec] = {}
    for value, spec in known.items():
        if spec is not None:
            found.setdefault(root(value), spec)
    everything = [*outer.inputs, *(v for eqn in outer.eqns for v in eqn.outputs)]
    return {v: found[root(v)] for v in everything if root(v) in found} | {
        value: spec for value, spec in known.items() if spec is not None
    }


def constrained_specs(outer: Graph, mpmd_axis: str) -> dict[Var, PartitionSpec]:
    """Returns the specs that users give to values outside of loops.

    The spec of a loop's result inside the loop takes precedence over one after the loop.

    Args:
        outer: A function whose loops are split into tasks.
        mpmd_axis: The mesh axis that separates the groups.

    Returns:
        The spec of each constrained value.

    Raises:
        ValueError: If a spec names that axis.
    """
    found: dict[Var, PartitionSpec] = {}
    behind: dict[Var, PartitionSpec] = {}
    for eqn in outer.eqns:
        loop, spec = loop_of(eqn), constraint_of(eqn)
        if loop is not None:
            of_share = dict(zip(loop.reductions, eqn.outputs, strict=True))
            found |= {of_share[share]: of_share_spec for share, of_share_spec in loop.specs.items()}
        if spec is not None:
            behind |= dict.fromkeys(variables(eqn.outputs), spec)
            behind |= {v: spec for v in variables(eqn.inputs) if v not in behind}
    for spec in (*found.values(), *behind.values()):
        check_spec(spec, mpmd_axis, "`with_sharding_constraint`")
    return behind | found


def _is_elementwise(eqn: Eqn) -> bool:
    if not isinstance(eqn.operation, PrimitiveCall):
        return False
    return eqn.operation.name in _CASTS or (is_cheap(eqn) and not is_move(eqn))


_CASTS = ("convert_element_type", "copy", "optimization_barrier")
