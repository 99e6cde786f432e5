"""Returns the equations of a graph as calls whose literals are operands like any other.

A call of layer 3 may then differ from that of layer 0 in a number, such as a learning rate.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core, source_info_util
from jax.extend.core import Jaxpr, JaxprEqn

from ..._compat import ClosedJaxpr
from ..graph import (
    Atom,
    Cond,
    Eqn,
    Graph,
    Literal,
    PrimitiveCall,
    Scan,
    ShardMap,
    Var,
    bind,
    closed_jaxpr,
    split_at,
    to_graph,
)


@dataclass(frozen=True, eq=False)
class Call:
    """An equation as a function of all its operands."""

    name: str  # the name of the primitive
    operands: tuple[Atom, ...]  # its variables and literals
    outputs: tuple[Var, ...]  # the variables of its results
    run: Callable[..., Sequence[Any]]  # `(*operands) -> outputs`
    signature: Hashable  # equal for calls that compute the same from equal operands
    operation: PrimitiveCall | Scan | Cond | ShardMap

    @property
    def equation(self) -> JaxprEqn | None:
        """Returns the jaxpr equation, None for what is not one primitive."""
        return self.operation.equation if isinstance(self.operation, PrimitiveCall) else None

    @property
    def where(self) -> str:
        """Returns the line of the user's program in brackets, for errors."""
        if self.equation is None:
            return ""
        return f" ({source_info_util.summarize(self.equation.source_info)})"


def calls_of(closed: ClosedJaxpr, graph: Graph, layer_of: Mapping[Var, Hashable]) -> list[Call]:
    """Returns the calls of a graph of a jaxpr, with those inside of what reads several layers."""
    # A branch that updates all layers at once, as in `optax.apply_if_finite`, hides what it does to
    # each of them. Both branches are then computed, and the result of one is selected. A loop over
    # all layers at once, as in `optax.lbfgs`, is written out.
    owners, eqns = dict(layer_of), list[Eqn]()
    for eqn in graph.eqns:
        eqns += _opened(eqn, owners)
    return [call_of(eqn, closed.jaxpr) for eqn in eqns]


_SHORT = 64
"""Iterations up to which a loop that reads several layers is written out."""


def _opened(eqn: Eqn, owners: dict[Var, Hashable]) -> list[Eqn]:
    """Returns the equations inside of a conditional or a loop over several layers, or this one."""
    layers = {owners[x] for x in eqn.inputs if isinstance(x, Var) and x in owners}
    inside: list[Eqn] = []
    match eqn.operation:
        case Cond(branches, num_accumulators=0) if len(layers) > 1:
            inside = _selected(eqn, branches)
        case Scan(num_accumulators=0, length=n) as scan if len(layers) > 1 and 0 < n <= _SHORT:
            inside = _unrolled(eqn, scan)
    if inside:
        return [opened for inner in inside for opened in _opened(inner, owners)]
    if len(layers) == 1:
        owners |= dict.fromkeys(eqn.outputs, *layers)
    return [eqn]


def _selected(eqn: Eqn, branches: Sequence[Graph]) -> list[Eqn]:
    """Returns the equations of all branches, and selections of their results."""
    index, *inputs = eqn.inputs
    eqns: list[Eqn] = []
    results = [_inlined(branch, inputs, eqns) for branch in branches]
    for output, *choices in zip(eqn.outputs, *results, strict=True):
        select = PrimitiveCall("select_branch", _select_branch)
        eqns.append(Eqn(select, (index, *choices), (output,)))
    return eqns


def _unrolled(eqn: Eqn, scan: Scan) -> list[Eqn]:
    """Returns the equations of all iterations, in which single layers can be seen."""
    consts, carry, xs = split_at(eqn.inputs, (scan.num_consts, scan.num_consts + scan.num_carry))
    order = range(scan.length)
    eqns: list[Eqn] = []
    ys: dict[int, Sequence[Atom]] = {}
    for i in reversed(order) if scan.reverse else order:
        slices = scan.body.inputs[len(consts) + len(carry) :]
        ith = PrimitiveCall(f"entry {i}", partial(_entry, i))
        outputs = [Var(var.aval) for var in slices]
        eqns += [Eqn(ith, (x,), (y,)) for x, y in zip(xs, outputs, strict=True)]
        results = _inlined(scan.body, [*consts, *carry, *outputs], eqns)
        carry, ys[i] = results[: scan.num_carry], results[scan.num_carry :]
    renamed = PrimitiveCall("copy", lambda x: [x])
    pairs = zip(eqn.outputs, carry, strict=False)
    eqns += [Eqn(renamed, (result,), (output,)) for output, result in pairs]
    stack = PrimitiveCall("stack", lambda *slices: [jnp.stack(slices)])
    for k, output in enumerate(eqn.outputs[scan.num_carry :]):
        eqns.append(Eqn(stack, tuple(ys[i][k] for i in order), (output,)))
    return eqns


def _inlined(graph: Graph, inputs: Sequence[Atom], eqns: list[Eqn]) -> list[Atom]:
    """Appends the equations of a graph, with variables of their own; returns its results."""
    env: dict[Var, Atom] = dict(zip(graph.inputs, inputs, strict=True))

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else env[atom]

    for inner in graph.eqns:
        outputs = tuple(Var(var.aval) for var in inner.outputs)
        renamed = Eqn(inner.operation, tuple(map(read, inner.inputs)), outputs)
        env.update(zip(inner.outputs, outputs, strict=True))
        eqns.append(renamed)
    return list(map(read, graph.outputs))


def _entry(index: int, x: Any) -> list[Any]:
    return [lax.index_in_dim(x, index, keepdims=False)]


def _select_branch(index: Any, *choices: Any) -> list[Any]:
    return [lax.select_n(lax.clamp(np.int32(0), index, np.int32(len(choices) - 1)), *choices)]


def call_of(eqn: Eqn, jaxpr: Jaxpr) -> Call:
    """Returns an equation of a graph of a jaxpr as a call."""
    operation, signature = eqn.operation, _signature(eqn.operation)
    is_primitive = isinstance(operation, PrimitiveCall)
    name = operation.name if is_primitive else type(operation).__name__.lower()
    equation = operation.equation if is_primitive else None
    if equation is None:
        return Call(
            name=name,
            operands=eqn.inputs,
            outputs=eqn.outputs,
            run=operation.run,
            signature=signature,
            operation=operation,
        )
    variables = iter(eqn.inputs)
    operands = tuple(
        Literal(x.val) if isinstance(x, core.Literal) else next(variables) for x in equation.invars
    )

    def run(*operands: Any) -> Sequence[Any]:  # no `partial`: JAX would print all of the jaxpr
        return bind(equation, jaxpr, with_literals=True)(*operands)

    return Call(
        name=name,
        operands=operands,
        outputs=eqn.outputs,
        run=run,
        signature=signature,
        operation=operation,
    )


def _signature(operation: Any) -> Hashable:
    """Returns the signature of a loop, a conditional or a shard_map."""
    match operation:
        case Scan(body=body):
            counts = operation.num_consts, operation.num_carry, operation.num_accumulators
            turns = operation.length, operation.reverse, operation.unroll
            return "scan", counts, turns, graph_signature(body)
        case Cond(branches=branches):
            return "cond", *map(graph_signature, branches)
        case ShardMap(body=body):
            specs = str((operation.in_specs, operation.out_specs, sorted(operation.axes)))
            return "shard_map", specs, graph_signature(body)
        case PrimitiveCall(name=name, equation=equation):
            return name, _of_params({} if equation is None else equation.params)


def graph_signature(graph: Graph) -> Hashable:
    """Returns equal values for graphs that compute the same."""
    ids: dict[Var, int] = {}

    def of(atom: Atom) -> Hashable:
        if isinstance(atom, Var):
            return ids.setdefault(atom, len(ids))
        return literal_signature(atom.value)

    parts: list[Hashable] = [tuple((of(var), str(var.aval)) for var in graph.inputs)]
    for eqn in graph.eqns:
        literals: tuple[Hashable, ...] = ()
        if isinstance(eqn.operation, PrimitiveCall) and eqn.operation.equation is not None:
            invars = eqn.operation.equation.invars
            literals = tuple(
                (i, literal_signature(x.val))
                for i, x in enumerate(invars)
                if isinstance(x, core.Literal)
            )
        inputs = tuple(map(of, eqn.inputs))
        parts.append((_signature(eqn.operation), literals, inputs, tuple(map(of, eqn.outputs))))
    return (*parts, tuple(map(of, graph.outputs)))


def literal_signature(value: Any) -> Hashable:
    """Returns equal values for equal constants."""
    if isinstance(value, Tracer):
        return "traced", id(value)
    if jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.extended):
        return "key", id(value)
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def _of_params(params: Any) -> Hashable:
    """Returns equal values for equal parameters of an equation."""
    match params:
        case ClosedJaxpr() | core.Jaxpr():  # whose text may round or shorten constants
            return graph_signature(to_graph(closed_jaxpr(params)))
        case np.ndarray() | jax.Array():
            return literal_signature(params)
        case Mapping():
            return tuple((name, _of_params(params[name])) for name in sorted(params))
        case tuple() | list():
            return type(params).__name__, *map(_of_params, params)
        case _:
            return str(params)
