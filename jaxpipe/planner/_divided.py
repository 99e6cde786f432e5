"""Which arrays of a layer the axis `tensor` divides, by the specs of its weights.

Followed as XLA's partitioner does: a product with a weight that is divided along a dim which it
keeps makes a result that is divided; along the dim over which it sums, one that is summed over the
devices. What is computed from divided arrays is divided.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..cost.work import Split
from ..ir.graph import Eqn, Graph, PrimitiveCall, Scan, Var, is_light, terms_of_product, variables

_Dims = dict[Var, int | None]
"""The dim of a weight that is divided; None for a whole one."""


class Divided(NamedTuple):
    """What `tensor` divides in a graph.

    Attributes:
        arrays: Arrays of which a device has a part.
        splits: How a product is divided, by the identity of its equation.
        sums: Results of products that are summed over the devices.
    """

    arrays: frozenset[Var]
    splits: dict[int, Split]
    sums: tuple[Var, ...]


def divided(graph: Graph, dims: Sequence[int | None]) -> Divided:
    """Follows what is divided through a graph.

    Args:
        dims: The divided dim of each weight, the first inputs of the graph; None for whole ones.

    Returns:
        The divided arrays, and what becomes of products.
    """
    weights: _Dims = dict(zip(graph.inputs, dims, strict=False))
    follower = _Follower()
    follower.follow(graph, weights)
    return Divided(frozenset(follower.arrays), follower.splits, tuple(follower.sums))


class _Follower:
    """Follows divided arrays through graphs, as `Divided` has them."""

    def __init__(self) -> None:
        self.arrays, self.splits, self.sums = set[Var](), dict[int, Split](), list[Var]()

    def follow(self, graph: Graph, weights: _Dims) -> None:
        """Follows one graph, of whose inputs `weights` has those that are weights."""
        for eqn in graph.eqns:
            inputs = variables(eqn.inputs)
            if inputs and all(x in weights for x in inputs) and is_light(eqn):
                weights |= dict.fromkeys(eqn.outputs, _moved(eqn, weights[inputs[0]]))
            elif multiplies(eqn):
                self._multiply(eqn, weights)
            elif isinstance(eqn.operation, Scan):
                self._loop(eqn, eqn.operation, weights)
            elif any(x in self.arrays for x in inputs):
                self.arrays.update(eqn.outputs)

    def _multiply(self, eqn: Eqn, weights: _Dims) -> None:
        inputs = variables(eqn.inputs)
        of_weights = [i for i, x in enumerate(inputs) if x in weights]
        split: Split = "column" if any(x in self.arrays for x in inputs) else "none"
        if of_weights:
            side = of_weights[-1]
            dim = weights[inputs[side]]
            split = "none" if dim is None else "row" if dim in _summed(eqn, side) else "column"
        if split == "row":
            self.sums.extend(eqn.outputs)
        if split == "column":
            self.arrays.update(eqn.outputs)
        self.splits[id(eqn)] = split

    def _loop(self, eqn: Eqn, loop: Scan, weights: _Dims) -> None:
        """Follows the body of a loop, whose slices lack the first dim of what is sliced."""
        inside: _Dims = {}
        num_whole = loop.num_consts + loop.num_carry
        for i, (x, inner) in enumerate(zip(eqn.inputs, loop.body.inputs, strict=True)):
            if isinstance(x, Var) and x in weights:
                dim = weights[x]
                inside[inner] = dim if dim is None or i < num_whole else dim - 1 if dim else None
            elif x in self.arrays:
                self.arrays.add(inner)
        self.follow(loop.body, inside)
        for inner, x in zip(loop.body.outputs, eqn.outputs, strict=True):
            if inner in self.arrays:
                self.arrays.add(x)


def multiplies(eqn: Eqn) -> bool:
    """Returns whether an equation is a matrix product."""
    equation = getattr(eqn.operation, "equation", None)
    return equation is not None and terms_of_product(equation) is not None


def _summed(eqn: Eqn, side: int) -> Sequence[int]:
    """Returns the dims of one operand over which a product sums."""
    params: Any = eqn.operation.params if isinstance(eqn.operation, PrimitiveCall) else {}
    match params.get("dimension_numbers"):
        case ((*contracted,), _):
            return contracted[side]
        case numbers:  # of a convolution, whose kernel has the channels that it reads second
            return numbers.rhs_spec[1:2] if numbers is not None else ()


def _moved(eqn: Eqn, dim: int | None) -> int | None:
    """Returns the dim of a moved or cast weight that is divided; None if it is in none."""
    if dim is None or not isinstance(eqn.operation, PrimitiveCall):
        return None
    (shape, *_), params = [x.aval.shape for x in variables(eqn.inputs)], eqn.operation.params
    result = eqn.outputs[0].aval.shape
    match eqn.operation.name:
        case "transpose":
            return params["permutation"].index(dim)
        case "broadcast_in_dim":
            return params["broadcast_dimensions"][dim]
        case "squeeze":
            return dim - sum(each < dim for each in params["dimensions"])
        case "reshape":
            before = math.prod(shape[:dim])
            starts = (i for i in range(len(result)) if math.prod(result[:i]) == before)
            return next((i for i in starts if result[i] > 1), None)
    return dim if len(result) == len(shape) else None
