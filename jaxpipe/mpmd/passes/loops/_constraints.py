"""Finds how users constrain the sharding of the results that a loop accumulates.

Users apply `lax.with_sharding_constraint` to the results of a microbatch. The constraint matters if
every device of a group keeps its own part of a sum, and the parts are added once after the loop:
with another sharding the parts would be gathered for every microbatch.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import PartitionSpec as P

from ....ir.graph import Atom, Eqn, Graph, Var
from ...ir._eqns import params_of, primitive_of
from ...ir._reduce import Concat, Reduction


def constrained_results(body: Graph, adds: Sequence[bool]) -> tuple[Graph, tuple[P | None, ...]]:
    """Returns the body without constraints on its summed results, and the spec of each result.

    The constraint of a summed result is removed from the body, and its spec becomes that of the
    accumulator. The gradient of a weight that several stages use thus remains a plain sum of the
    contributions of these stages, which a later pass can take apart.
    """
    makers = {value: eqn for eqn in body.eqns for value in eqn.outputs}
    outputs: list[Atom] = []
    specs: list[P | None] = []
    for output, is_added in zip(body.outputs, adds, strict=True):
        atom, spec = output, None
        while (eqn := makers.get(atom) if isinstance(atom, Var) else None) is not None:
            spec = constraint_of(eqn)
            if spec is not None or not keeps_indices(eqn):
                break
            (atom,) = eqn.inputs
        constraint = makers.get(output) if isinstance(output, Var) else None
        is_constraint = constraint is not None and constraint_of(constraint) is not None
        outputs.append(
            constraint.inputs[0] if constraint and is_added and is_constraint else output
        )
        specs.append(spec)
    return replace(body, outputs=tuple(outputs)), tuple(specs)


def constraint_of(eqn: Eqn) -> P | None:
    """Returns the spec of a constraint on all dims, None if `eqn` is not such a constraint."""
    if primitive_of(eqn) != "sharding_constraint":
        return None
    spec = params_of(eqn)["sharding"].spec
    return None if P.UNCONSTRAINED in spec.partitions else spec


def keeps_indices(eqn: Eqn) -> bool:
    """Returns whether an equation keeps every element at its index, as a cast or a copy does."""
    return primitive_of(eqn) in ("convert_element_type", "copy", "optimization_barrier")


def accumulator_spec(spec: P | None, reduction: Reduction) -> P | None:
    """Returns the spec of an accumulator: None if it has another shape than a result."""
    if spec is None:
        return None
    if isinstance(reduction.operation, Concat):
        parts = [*spec.partitions, *[None] * (len(reduction.shape) - len(spec))]
        parts.insert(reduction.operation.axis % (len(reduction.shape) + 1), None)
        return spec.update(partitions=parts)
    return spec if reduction.aval.shape == reduction.shape else None
