"""How the results of a loop are divided within a group while they are put together.

A user says so with `lax.with_sharding_constraint` on what a microbatch returns. It matters where
every device of a group keeps its own part of a sum, which is added up once behind the loop: divided
otherwise, the parts would be gathered for every microbatch.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import PartitionSpec as P

from ..autodiff import Atom, Plain, Program, Step, Value
from ._reduce import Concat, Total


def constrained_results(body: Program, adds: Sequence[bool]) -> tuple[Program, list[P | None]]:
    """Finds the constraints on the results of a microbatch.

    A sum keeps its spec as that of its accumulator and loses the constraint itself: so the gradient
    of a weight that several stages use is still a sum of their shares.

    Args:
        body: `(loop invariants, number of the microbatch) -> results`.
        adds: Which results add up over microbatches.

    Returns:
        The body, and the spec of each result of it; None where there is no constraint.
    """
    makers = {value: step for step in body.steps for value in step.outputs}
    outputs: list[Atom] = []
    specs: list[P | None] = []
    for output, is_added in zip(body.outputs, adds, strict=True):
        atom, spec = output, None
        while (step := makers.get(atom) if isinstance(atom, Value) else None) is not None:
            spec = constraint_of(step)
            if spec is not None or not _keeps_place(step):
                break
            (atom,) = step.inputs
        own = makers.get(output) if isinstance(output, Value) else None
        is_constraint = own is not None and constraint_of(own) is not None
        outputs.append(own.inputs[0] if own and is_added and is_constraint else output)
        specs.append(spec)
    return replace(body, outputs=tuple(outputs)), specs


def constraint_of(step: Step) -> P | None:
    """Returns the spec of a sharding constraint that says something of every dim."""
    operation = step.operation
    if not isinstance(operation, Plain) or operation.name != "sharding_constraint":
        return None
    spec = operation.params["sharding"].spec
    return None if P.UNCONSTRAINED in tuple(spec) else spec


def _keeps_place(step: Step) -> bool:
    names = ("convert_element_type", "copy", "optimization_barrier")
    return isinstance(step.operation, Plain) and step.operation.name in names


def spec_of_total(spec: P | None, total: Total) -> P | None:
    """Returns how an accumulator is divided, given how what is put into it is."""
    if spec is None:
        return None
    if isinstance(total.operation, Concat):
        parts = [*spec, *[None] * (len(total.shape) - len(spec))]
        parts.insert(total.operation.axis % (len(total.shape) + 1), None)
        return P(*parts)
    return spec if total.aval.shape == total.shape else None
