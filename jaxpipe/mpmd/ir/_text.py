"""Writes graphs as text in the manner of a jaxpr, with variables numbered as they first appear."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from ...ir.graph import Atom, Cond, Eqn, Graph, Literal, PrimitiveCall, Scan, ShardMap, Var

INDENT = "    "


class Names:
    """The names of variables in one text: `v0`, `v1`, ... in the order in which they are asked for.

    Calling it returns the name of a variable, or the value of a small literal.
    """

    def __init__(self) -> None:
        self._names: dict[Var, str] = {}

    def __call__(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            return format_constant(atom.value)
        return self._names.setdefault(atom, f"v{len(self._names)}")

    def typed(self, value: Var) -> str:
        """Returns the name of a variable with its dtype and shape, such as `v0:f32[4,4]`."""
        return f"{self(value)}:{value.aval.str_short(short_dtypes=True)}"

    def join(self, atoms: Iterable[Atom]) -> str:
        """Returns the names of several atoms, separated by blanks."""
        return " ".join(map(self, atoms))


def format_constant(value: Any) -> str:
    """Returns a scalar as Python writes it, and any other array as its dtype and shape."""
    aval = jax.typeof(value)
    if aval.shape or not isinstance(value, np.ndarray | np.generic | int | float):
        return aval.str_short(short_dtypes=True)
    return str(np.asarray(value).item())


def format_spec(spec: PartitionSpec) -> str:
    """Returns a spec as `P('fsdp', None)`, in every version of JAX."""
    return f"P({', '.join(map(repr, spec.partitions))})"


def operands(eqn: Eqn) -> list[Atom]:
    """Returns the operands of an equation in order: its inputs, and literals of its primitive."""
    operation = eqn.operation
    if not isinstance(operation, PrimitiveCall) or operation.equation is None:
        return list(eqn.inputs)
    invars = operation.equation.invars
    if len(eqn.inputs) != sum(not isinstance(x, core.Literal) for x in invars):
        return list(eqn.inputs)
    inputs = iter(eqn.inputs)

    def constant(literal: Any) -> Literal:
        return Literal(np.asarray(literal.val, literal.aval.dtype))

    return [constant(x) if isinstance(x, core.Literal) else next(inputs) for x in invars]


def format_eqn(eqn: Eqn, names: Names, suffix: str = "") -> list[str]:
    """Returns the lines of an equation and its bodies; `suffix` is text behind its name."""
    inputs = names.join(operands(eqn))
    outputs = " ".join(map(names.typed, eqn.outputs))
    match eqn.operation:
        case PrimitiveCall(name=name):
            return [f"{outputs} = {name}{suffix} {inputs}".rstrip()]
        case Scan(body=body, length=length, reverse=reverse):
            name, bodies = f"scan[length={length} reverse={reverse}", [body]
        case ShardMap(body=body, axes=axes):
            name, bodies = f"shard_map[axes={sorted(axes)}", [body]
        case Cond(branches=branches):
            name, bodies = "cond[", list(branches)
    inner = [line for body in bodies for line in format_graph(body, names)]
    return [f"{outputs} = {name}", *indent(inner), f"]{suffix} {inputs}"]


def format_graph(graph: Graph, names: Names) -> list[str]:
    """Returns the lines of a graph, with the names that `names` gives to its variables."""
    lines = [line for eqn in graph.eqns for line in format_eqn(eqn, names)]
    return format_lambda(graph.inputs, lambda: lines, graph.outputs, names)


def format_lambda(
    inputs: Sequence[Var],
    body: Callable[[], Iterable[str]],
    outputs: Sequence[Atom],
    names: Names,
    suffix: Callable[[Atom], str] = lambda atom: "",
) -> list[str]:
    """Returns the lines of a function; `suffix` returns the text behind an input or an output."""
    inputs_text = " ".join(names.typed(value) + suffix(value) for value in inputs)
    lines = list(body())
    returned = " ".join(names(atom) + suffix(atom) for atom in outputs)
    return [f"{{ lambda {inputs_text} . let", *indent(lines), f"  in {returned} }}"]


def indent(lines: Iterable[str]) -> list[str]:
    """Returns the lines with four more blanks before each."""
    return [INDENT + line for line in lines]
