"""A jaxpr as a list of equations that a pass can rearrange.

Calls are inlined, including rematerialized ones: an equation is one primitive, or a scan, a cond or
a shard_map, whose bodies are graphs again. A graph runs through JAX's public functions, which infer
the types of all outputs. A pass therefore never writes a jaxpr equation, and the same code serves
versions of JAX whose equations differ.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from ..._compat import ClosedJaxpr, rematerialized_jaxpr, scan_sizes
from ._effects import effects_of, is_print
from ._equations import bind, called_jaxpr, empty_stack, jaxpr_of, pvary_like, scoped
from ._in_place import copies_in_conditionals, switch_in_place

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Var:
    """An input of a graph, or an output of one of its equations. Equal only to itself."""

    aval: Any

    @property
    def num_bytes(self) -> int:
        """Returns the size in bytes of the array, or of one shard inside a shard_map."""
        return math.prod(self.aval.shape) * self.aval.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant of a graph."""

    value: Any


Atom = Var | Literal
"""An input of an equation, or an output of a graph."""


def aval_of(atom: Atom) -> Any:
    """Returns the abstract value of an atom."""
    return atom.aval if isinstance(atom, Var) else jax.typeof(atom.value)


@dataclass(frozen=True)
class PrimitiveCall:
    """One primitive, or a function that acts as one."""

    name: str
    run: Callable[..., Sequence[Any]]  # `(inputs that are no literals) -> outputs`
    params: Mapping[str, Any] = field(default_factory=dict)  # the parameters of the primitive
    equation: JaxprEqn | None = None  # the jaxpr equation of the primitive, None for a function


@dataclass(frozen=True)
class Scan:
    """`lax.scan`, optionally with arrays to which each iteration adds its slice.

    Its ys are written to arrays that TPUs and GPUs do not fill; `lax.scan` would fill them.
    """

    # `(consts, carry, slices of xs, slices of accumulators) -> (carry, slices of ys, new slices of
    # accumulators)`
    body: "Graph"
    num_consts: int  # number of inputs that every iteration reads whole
    num_carry: int  # number of inputs, and of first outputs, that are carried between iterations
    length: int  # the number of iterations
    reverse: bool  # whether the iterations run from the last slices to the first
    unroll: int  # number of iterations that are unrolled into one
    # Number of last inputs and outputs that are [length, ...] arrays, of which every iteration
    # replaces its slice, in place.
    num_accumulators: int = 0

    def run(self, *inputs: Any) -> list[Any]:
        num_others = len(inputs) - self.num_accumulators
        ends = self.num_consts, self.num_consts + self.num_carry, num_others
        consts, init, xs, accumulators = (list(part) for part in split_at(inputs, ends))
        if not self.length:  # no slices to index or to update
            slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (*xs, *accumulators)]
            outputs = jax.eval_shape(self.body, *consts, *init, *slices)
            ys = outputs[self.num_carry : len(outputs) - self.num_accumulators]
            return [*init, *(jnp.zeros((0, *y.shape), y.dtype) for y in ys), *accumulators]

        end = len(self.body.outputs) - self.num_accumulators
        slices_out = self.body.outputs[self.num_carry : end]
        empty = [
            empty_stack(y.aval, self.length) if isinstance(y, Var) else None for y in slices_out
        ]

        def turn(carry: Any, slices: Any) -> Any:
            (carry, stacks, accumulators), (xs, i) = carry, slices
            before = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in accumulators]
            outputs = self.body(*consts, *carry, *xs, *before)
            carry, ys, after = split_at(outputs, (self.num_carry, end))
            put = lax.dynamic_update_index_in_dim
            accumulators = [put(x, new, i, 0) for x, new in zip(accumulators, after, strict=True)]
            stacks = [
                None if x is None else put(x, pvary_like(jax.typeof(x), y), i, 0)
                for x, y in zip(stacks, ys, strict=True)
            ]
            ys = [y if x is None else None for x, y in zip(stacks, ys, strict=True)]
            return (list(carry), stacks, accumulators), ys

        (carry, stacks, accumulators), ys = lax.scan(
            turn,
            (init, empty, accumulators),
            (xs, jnp.arange(self.length)),
            self.length,
            self.reverse,
            self.unroll,
        )
        ys = [y if x is None else x for x, y in zip(stacks, ys, strict=True)]
        return [*carry, *ys, *accumulators]


@dataclass(frozen=True)
class Cond:
    """`lax.switch`: `(index, inputs of every branch) -> outputs of the chosen branch`."""

    branches: tuple["Graph", ...]
    num_accumulators: int = 0  # last inputs and outputs, arrays to which branches add in place

    def run(self, index: Any, *inputs: Any) -> list[Any]:
        if not (self.num_accumulators and copies_in_conditionals()):
            return lax.switch(index, self.branches, *inputs)
        end = len(inputs) - self.num_accumulators
        outputs = self.branches[0].outputs[: -self.num_accumulators]
        avals = list(map(aval_of, outputs))
        return switch_in_place(index, self.branches, inputs[:end], avals, inputs[end:])


@dataclass(frozen=True)
class ShardMap:
    """`jax.shard_map` over the axes that become manual in it."""

    body: "Graph"
    mesh: Any
    axes: frozenset[str]
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    check_vma: bool

    @property
    def num_devices(self) -> int:
        """Returns the number of devices that run the body, each on its part."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def run(self, *inputs: Any) -> list[Any]:
        # Inside another `shard_map`, JAX takes the mesh, with its manual axes, from the context.
        alone = jax.sharding.get_abstract_mesh().empty
        return jax.shard_map(
            self.body,
            mesh=self.mesh if alone else None,
            in_specs=self.in_specs,
            out_specs=list(self.out_specs),
            axis_names=self.axes,
            check_vma=self.check_vma,
        )(*inputs)


@dataclass(frozen=True, eq=False)
class Eqn:
    """Application of `operation` to `inputs`."""

    operation: PrimitiveCall | Scan | Cond | ShardMap
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]


@dataclass(frozen=True)
class Graph:
    """A function of arrays: calling it with its inputs returns the list of its outputs."""

    inputs: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[Atom, ...]

    def __call__(self, *inputs: Any) -> list[Any]:
        env = dict(zip(self.inputs, inputs, strict=True))

        def read(atom: Atom) -> Any:
            return atom.value if isinstance(atom, Literal) else env[atom]

        for eqn in self.eqns:
            outputs = eqn.operation.run(*map(read, eqn.inputs))
            env.update(zip(eqn.outputs, outputs, strict=True))
        return [read(atom) for atom in self.outputs]


def to_graph(closed: ClosedJaxpr, *, keep_dead: bool = False, prints: bool = False) -> Graph:
    """Returns the equations of a jaxpr that its outputs depend on.

    With `prints`, unordered prints and callbacks are allowed and kept. The last output of an
    equation that prints is a token, a zero: a program that returns it runs the print.
    """
    check_pure(closed, prints=prints)
    if keep_dead:
        return _to_graph(closed)
    everything = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, everything, instantiate=True)
    return _to_graph(ClosedJaxpr(jaxpr, closed.consts))


def check_pure(closed: ClosedJaxpr, *, prints: bool = False) -> None:
    """Raises a ValueError that names the functions that give a program side effects, if any do."""
    if names := effects_of(closed, prints=prints):
        instead = "take prints, callbacks and references out of it"
        if prints:
            instead = "use `jax.debug.print` or `jax.debug.callback` without `ordered`"
        raise ValueError(
            f"A stage has the effects of {', '.join(names)}. A stage that is divided must be pure: "
            f"{instead}, or return what they would show."
        )


def has_print(eqn: Eqn) -> bool:
    """Returns whether an equation prints or calls back, so that it must run exactly once."""
    match eqn.operation:
        case PrimitiveCall(equation=equation):
            return equation is not None and is_print(equation)
        case Scan(body=body) | ShardMap(body=body):
            return any(map(has_print, body.eqns))
        case Cond(branches=branches):
            return any(has_print(inner) for branch in branches for inner in branch.eqns)


def print_tokens(eqns: Iterable[Eqn]) -> list[Var]:
    """Returns the tokens of the equations that print, which `to_graph` adds to their outputs."""
    return [eqn.outputs[-1] for eqn in eqns if has_print(eqn)]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the variables among `atoms`, without the literals."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def count_uses(graph: Graph) -> Counter[Var]:
    """Counts the uses of each variable as an input of an equation or an output of the program."""
    inputs = (atom for eqn in graph.eqns for atom in eqn.inputs)
    return Counter(variables([*inputs, *graph.outputs]))


def origin(
    output: Atom, makers: Mapping[Var, Eqn], uses: Counter[Var], is_passed: Callable[[Eqn], bool]
) -> tuple[Eqn | None, Any, tuple[Eqn, ...]]:
    """Returns the equation behind those passed that computes a value, its output, and those passed.

    The first is None if the value is an input of the program or is read elsewhere too.
    """
    way: list[Eqn] = []
    while isinstance(output, Var) and output in makers and uses[output] == 1:
        eqn = makers[output]
        if not is_passed(eqn):
            return eqn, output, tuple(reversed(way))
        way.append(eqn)
        (output,) = eqn.inputs
    return None, output, tuple(reversed(way))


def free_variables(eqns: Iterable[Eqn], outputs: Iterable[Atom]) -> list[Var]:
    """Returns the variables that `eqns` and `outputs` read and no equation computes, in order."""
    computed = {value for eqn in eqns for value in eqn.outputs}
    atoms = [*(atom for eqn in eqns for atom in eqn.inputs), *outputs]
    return [value for value in dict.fromkeys(variables(atoms)) if value not in computed]


def select(items: Iterable[T], wanted: Iterable[bool]) -> tuple[T, ...]:
    """Returns the items whose entry in `wanted` is true."""
    return tuple(item for item, want in zip(items, wanted, strict=True) if want)


def split_at(values: Sequence[Any], ends: Sequence[int]) -> list[Sequence[Any]]:
    """Returns the parts of `values` that end at the indices `ends`, and the remaining values."""
    return [values[a:b] for a, b in zip((0, *ends), (*ends, len(values)), strict=True)]


def _to_graph(jaxpr: Any, names: Any = "") -> Graph:
    """Returns the graph of a closed or open jaxpr inside the name scopes `names`."""
    inputs = tuple(Var(var.aval) for var in jaxpr_of(jaxpr).invars)
    eqns: list[Eqn] = []
    outputs = _inline(jaxpr, inputs, names, eqns)
    return Graph(inputs, tuple(eqns), tuple(outputs))


def _inline(called: Any, inputs: Sequence[Atom], names: Any, eqns: list[Eqn]) -> list[Atom]:
    """Appends the equations of a jaxpr called with `inputs` to `eqns`, and returns its outputs."""
    jaxpr, consts = jaxpr_of(called), getattr(called, "consts", ())
    atoms: dict[core.Var, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        atoms[var] = Literal(const)

    def look_up(variable: Any) -> Atom:
        return Literal(variable.val) if isinstance(variable, core.Literal) else atoms[variable]

    # Under `jax_remat3` JAX puts what is recomputed from, and the cotangent, behind one barrier.
    calls = [e for e in jaxpr.eqns if rematerialized_jaxpr(e.params) is not None]
    recomputing = {x for e in calls for x in e.invars if isinstance(x, core.Var)}
    for equation in jaxpr.eqns:
        equation = scoped(equation, names)
        eqn_inputs = [look_up(x) for x in equation.invars]
        inner = called_jaxpr(equation)
        is_barrier = equation.primitive.name == "optimization_barrier"
        if is_barrier and not recomputing.isdisjoint(equation.outvars):
            outputs = [_behind_own(atom, eqns) for atom in eqn_inputs]
        elif inner is not None:
            eqn_inputs = _behind_barrier(equation, eqn_inputs, eqns)
            outputs = _inline(inner, eqn_inputs, equation.source_info.name_stack, eqns)
        else:
            outputs = [Var(var.aval) for var in equation.outvars]
            eqns.append(_to_eqn(equation, jaxpr, eqn_inputs, outputs))
        atoms.update(zip(equation.outvars, outputs, strict=True))
    return [look_up(x) for x in jaxpr.outvars]


def _behind_barrier(equation: JaxprEqn, inputs: list[Atom], eqns: list[Eqn]) -> list[Atom]:
    """Returns the inputs of a rematerialized call behind barriers against common subexpressions."""
    # Each input has its own barrier, unlike in JAX: an equation that reads one input does not wait
    # for the others.
    params = equation.params
    barred = params.get("prevent_cse", False)
    if not params.get("differentiated") or not barred:
        return inputs
    barred = [barred] * len(inputs) if isinstance(barred, bool) else barred

    pairs = zip(inputs, barred, strict=True)
    return [_behind_own(atom, eqns) if is_barred else atom for atom, is_barred in pairs]


def _behind_own(atom: Atom, eqns: list[Eqn]) -> Atom:
    """Returns a value behind a barrier of its own."""
    if isinstance(atom, Literal):
        return atom
    barrier = PrimitiveCall("optimization_barrier", lambda x: [lax.optimization_barrier(x)])
    eqns.append(Eqn(barrier, (atom,), (Var(atom.aval),)))
    return eqns[-1].outputs[0]


def _to_eqn(
    equation: JaxprEqn, jaxpr: Jaxpr, inputs: Sequence[Atom], outputs: Sequence[Var]
) -> Eqn:
    params, names = equation.params, equation.source_info.name_stack
    match equation.primitive.name:
        case "scan":
            turns = params["length"], params["reverse"], params["unroll"]
            body = _to_graph(params["jaxpr"], names)
            operation = Scan(body, *scan_sizes(params), *turns)
        case "cond":
            operation = Cond(tuple(_to_graph(branch, names) for branch in params["branches"]))
        case "shard_map":
            operation = ShardMap(
                body=_to_graph(params["jaxpr"], names),
                mesh=params["mesh"],
                axes=frozenset(params["newly_manual_axes"]),
                in_specs=tuple(params["in_specs"]),
                out_specs=tuple(params["out_specs"]),
                check_vma=params["check_vma"],
            )
        case name:
            operation = PrimitiveCall(name, bind(equation, jaxpr), params, equation)
            eqn_inputs = zip(equation.invars, inputs, strict=True)
            inputs = [atom for var, atom in eqn_inputs if not isinstance(var, core.Literal)]
    eqn = Eqn(operation, tuple(inputs), tuple(outputs))
    return _with_token(eqn) if is_print(equation) else eqn


def _with_token(eqn: Eqn) -> Eqn:
    shape: tuple[int, ...] = ()
    match eqn.operation:
        case Scan(body=body, length=length) as loop:
            shape, operation = (length,), replace(loop, body=_returning_token(body))
        case Cond(branches):
            operation = Cond(tuple(map(_returning_token, branches)))
        case ShardMap(body=body, out_specs=specs) as shards:
            specs = (*specs, PartitionSpec())
            operation = replace(shards, body=_returning_token(body), out_specs=specs)
        case PrimitiveCall(run=run) as plain:
            operation = replace(plain, run=lambda *inputs: [*run(*inputs), *_token()])
    token = Var(ShapedArray(shape, jnp.int32))
    return replace(eqn, operation=operation, outputs=(*eqn.outputs, token))


def _returning_token(body: Graph) -> Graph:
    """Returns a body with one token for all its prints as an additional last output."""
    token = Var(ShapedArray((), jnp.int32))
    joined = Eqn(PrimitiveCall("token", _token), tuple(print_tokens(body.eqns)), (token,))
    return Graph(body.inputs, (*body.eqns, joined), (*body.outputs, token))


def _token(*others: Any) -> list[jax.Array]:
    del others
    return [jnp.int32(0)]
