"""A jaxpr as a list of steps that can be taken apart and put together again.

Calls are inlined, rematerialised ones too: a step is one primitive, or a loop, a choice or a map
over shards, whose bodies are programs again. A program runs through JAX's public functions, which
type what comes out. So who rearranges steps writes no equation, and the same code serves versions
of JAX whose equations differ.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)
from jax.interpreters import partial_eval

from .._versions import scan_sizes
from ._effects import effects_of

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Value:
    """What a program is given, or one of its steps computes. Equal to itself alone."""

    aval: Any

    @property
    def num_bytes(self) -> int:
        """Of one array, or of one shard inside a map over shards."""
        return math.prod(self.aval.shape) * self.aval.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Constant:
    """What a program knows without being given it."""

    value: Any


Atom = Value | Constant


@dataclass(frozen=True)
class Plain:
    """One primitive, or a function that stands for one.

    Attributes:
        name: The primitive's.
        run: `(inputs that are no literals) -> outputs`.
        params: Those of the primitive.
        equation: Whose primitive it is, if there is one.
    """

    name: str
    run: Callable[..., Sequence[Any]]
    params: Mapping[str, Any] = field(default_factory=dict)
    equation: JaxprEqn | None = None


@dataclass(frozen=True)
class Loop:
    """`lax.scan`, which may hold arrays to which each turn adds its slice.

    Attributes:
        body: `(consts, carry, slices of xs, slices of sums) -> (carry, slices of ys, sums)`.
        num_consts: Inputs that every turn sees whole.
        num_carry: Inputs, and the first outputs, that go from turn to turn.
        length: Turns.
        reverse: Whether the last slices come first.
        unroll: Turns that are written out at a time.
        num_sums: The last inputs and outputs, [length, ...] arrays of which every turn replaces
            its slice, in place.
    """

    body: "Program"
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int
    num_sums: int = 0

    def run(self, *inputs: Any) -> list[Any]:
        ends = self.num_consts, self.num_consts + self.num_carry, len(inputs) - self.num_sums
        consts, init, xs, sums = (list(part) for part in cut(inputs, ends))
        if not self.length:  # no slice to look at, and none to put back
            slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (*xs, *sums)]
            outputs = jax.eval_shape(self.body, *consts, *init, *slices)
            ys = outputs[self.num_carry : len(outputs) - self.num_sums]
            return [*init, *(jnp.zeros((0, *y.shape), y.dtype) for y in ys), *sums]

        def turn(carry: Any, slices: Any) -> Any:
            (carry, sums), (xs, i) = carry, slices
            of_turn = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in sums]
            outputs = self.body(*consts, *carry, *xs, *of_turn)
            carry, ys, of_turn = cut(outputs, (self.num_carry, len(outputs) - self.num_sums))
            put = lax.dynamic_update_index_in_dim
            sums = [put(x, new, i, 0) for x, new in zip(sums, of_turn, strict=True)]
            return (list(carry), sums), list(ys)

        (carry, sums), ys = lax.scan(
            turn,
            (init, sums),
            (xs, jnp.arange(self.length) if sums else None),
            self.length,
            self.reverse,
            self.unroll,
        )
        return [*carry, *ys, *sums]


@dataclass(frozen=True)
class Choice:
    """`lax.switch`: `(index, inputs of every branch) -> outputs of the one that is chosen`."""

    branches: tuple["Program", ...]

    def run(self, index: Any, *inputs: Any) -> list[Any]:
        return lax.switch(index, self.branches, *inputs)


@dataclass(frozen=True)
class Shards:
    """`jax.shard_map`, over the axes that become manual in it."""

    body: "Program"
    mesh: Any
    axes: frozenset[str]
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    check_vma: bool

    def run(self, *inputs: Any) -> list[Any]:
        # Within another `shard_map` it is the context that has the mesh as it is there.
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
class Step:
    """`operation` on `inputs`."""

    operation: Plain | Loop | Choice | Shards
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Program:
    """A function of arrays: `program(*inputs)` is a list of its outputs."""

    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Atom, ...]

    def __call__(self, *inputs: Any) -> list[Any]:
        known = dict(zip(self.inputs, inputs, strict=True))

        def read(atom: Atom) -> Any:
            return atom.value if isinstance(atom, Constant) else known[atom]

        for step in self.steps:
            outputs = step.operation.run(*map(read, step.inputs))
            known.update(zip(step.outputs, outputs, strict=True))
        return [read(atom) for atom in self.outputs]


def program(closed: ClosedJaxpr, *, keep_dead: bool = False) -> Program:
    """The steps of a jaxpr that its outputs depend on.

    Args:
        closed: The jaxpr.
        keep_dead: Whether to keep the other steps too.

    Raises:
        ValueError: If it has side effects.
    """
    check_pure(closed)
    if keep_dead:
        return _program(closed)
    everything = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, everything, instantiate=True)
    return _program(ClosedJaxpr(jaxpr, closed.consts))


def check_pure(closed: ClosedJaxpr) -> None:
    """Checks that a program only computes its outputs.

    Raises:
        ValueError: If it does not.
    """
    if names := effects_of(closed):
        raise ValueError(
            f"A stage has the effects of {', '.join(names)}. A stage that is divided must be pure: "
            "take prints, callbacks and references out of it, or return what they would show."
        )


def read(steps: Iterable[Step], outputs: Iterable[Atom]) -> list[Value]:
    """What `steps` and `outputs` read that no step computes, in the order they do."""
    computed = {value for step in steps for value in step.outputs}
    atoms = [*(atom for step in steps for atom in step.inputs), *outputs]
    return [value for value in dict.fromkeys(values(atoms)) if value not in computed]


def vary_as(aval: Any, x: Any) -> Any:
    """`x`, varying over all manual axes over which `aval` does."""
    missing = aval.manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def values(atoms: Iterable[Atom]) -> list[Value]:
    """Those that are no constants."""
    return [atom for atom in atoms if isinstance(atom, Value)]


def pick(items: Iterable[T], wanted: Iterable[bool]) -> tuple[T, ...]:
    """The items that are wanted."""
    return tuple(item for item, want in zip(items, wanted, strict=True) if want)


def cut(values: Sequence[Any], ends: Sequence[int]) -> list[Sequence[Any]]:
    """The parts of `values` up to each end, and the rest."""
    return [values[a:b] for a, b in zip((0, *ends), (*ends, len(values)), strict=True)]


def _program(jaxpr: Any, names: Any = "") -> Program:
    """Of a closed or an open jaxpr. `names` are the name scopes around it."""
    inputs = tuple(Value(var.aval) for var in jaxpr_of(jaxpr).invars)
    steps: list[Step] = []
    outputs = _inline(jaxpr, inputs, names, steps)
    return Program(inputs, tuple(steps), tuple(outputs))


def jaxpr_of(closed: Any) -> Jaxpr:
    return getattr(closed, "jaxpr", closed)


def _inline(called: Any, inputs: Sequence[Atom], names: Any, steps: list[Step]) -> list[Atom]:
    """Appends to `steps` those of a jaxpr that is called with `inputs`, and returns its outputs."""
    jaxpr, consts = jaxpr_of(called), getattr(called, "consts", ())
    atoms: dict[Var, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        atoms[var] = Constant(const)

    def look_up(variable: Any) -> Atom:
        return Constant(variable.val) if isinstance(variable, Literal) else atoms[variable]

    for equation in jaxpr.eqns:
        equation = _scoped(equation, names)
        given = [look_up(x) for x in equation.invars]
        inner = _called(equation)
        if inner is not None:
            given = _behind_barrier(equation, given, steps)
            outputs = _inline(inner, given, equation.source_info.name_stack, steps)
        else:
            outputs = [Value(var.aval) for var in equation.outvars]
            steps.append(_step(equation, jaxpr, given, outputs))
        atoms.update(zip(equation.outvars, outputs, strict=True))
    return [look_up(x) for x in jaxpr.outvars]


def _scoped(equation: JaxprEqn, names: Any) -> JaxprEqn:
    """`equation` with the name scopes of the call that it is taken out of."""
    if not names:
        return equation
    info = equation.source_info
    return equation.replace(source_info=info.replace(name_stack=names + info.name_stack))


_CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that only call a jaxpr, and the parameter that has it."""


def _called(equation: JaxprEqn) -> Any:
    """The jaxpr that an equation calls, if that is all it does."""
    shardings = (
        *equation.params.get("in_shardings", ()),
        *equation.params.get("out_shardings", ()),
    )
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        return None
    return equation.params.get(_CALLS.get(equation.primitive.name, ""))


def _behind_barrier(equation: JaxprEqn, inputs: list[Atom], steps: list[Step]) -> list[Atom]:
    """The inputs of a rematerialised call so that XLA finds nothing that is computed already.

    One barrier for each, unlike JAX: what needs one input needs not wait for the others.
    """
    params = equation.params
    barred = params.get("prevent_cse", False)
    if not params.get("differentiated") or not barred:
        return inputs
    barred = [barred] * len(inputs) if isinstance(barred, bool) else barred

    def behind(atom: Atom, is_barred: bool) -> Atom:
        if isinstance(atom, Constant) or not is_barred:
            return atom
        barrier = Plain("optimization_barrier", lambda x: [lax.optimization_barrier(x)])
        steps.append(Step(barrier, (atom,), (Value(atom.aval),)))
        return steps[-1].outputs[0]

    return [behind(*pair) for pair in zip(inputs, barred, strict=True)]


def _step(
    equation: JaxprEqn, jaxpr: Jaxpr, inputs: Sequence[Atom], outputs: Sequence[Value]
) -> Step:
    params, names = equation.params, equation.source_info.name_stack
    match equation.primitive.name:
        case "scan":
            turns = params["length"], params["reverse"], params["unroll"]
            body = _program(params["jaxpr"], names)
            operation = Loop(body, *scan_sizes(params), *turns)
        case "cond":
            operation = Choice(tuple(_program(branch, names) for branch in params["branches"]))
        case "shard_map":
            operation = Shards(
                _program(params["jaxpr"], names),
                params["mesh"],
                frozenset(params["newly_manual_axes"]),
                tuple(params["in_specs"]),
                tuple(params["out_specs"]),
                params["check_vma"],
            )
        case name:
            operation = Plain(name, bind(equation, jaxpr), params, equation)
            given = zip(equation.invars, inputs, strict=True)
            inputs = [atom for var, atom in given if not isinstance(var, Literal)]
    return Step(operation, tuple(inputs), tuple(outputs))


def bind(equation: JaxprEqn, jaxpr: Jaxpr) -> Callable[..., Sequence[Any]]:
    """A function of the inputs of an equation that are no literals. It may come from any jaxpr."""
    inputs = [x for x in equation.invars if isinstance(x, Var)]
    outputs = [Var(x.aval) for x in equation.outvars]  # some may be dropped
    alone = jaxpr.replace(
        constvars=[],
        invars=inputs,
        outvars=outputs,
        eqns=[equation.replace(outvars=outputs)],
        effects=equation.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))


def only_outputs(step: Step, wanted: Sequence[bool]) -> Step:
    """A call with its own rule for `jax.vmap`, without the outputs that are not wanted."""
    assert isinstance(step.operation, Plain) and step.operation.equation is not None
    equation = step.operation.equation
    params = equation.params
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr_of(params["call"]), list(wanted), instantiate=True)

    def rule(*arguments: Any) -> tuple[list[Any], list[bool]]:
        result, is_mapped = map(jax.tree.leaves, params["rule"](*arguments))
        return list(pick(result, wanted)), list(pick(is_mapped, wanted))

    outputs = pick(equation.outvars, wanted)
    part = equation.replace(
        outvars=list(outputs),
        params=params
        | {
            "call": ClosedJaxpr(jaxpr, params["call"].consts),
            "rule": rule,
            "out_tree": jax.tree.structure([0] * len(outputs)),
        },
    )
    operation = Plain(part.primitive.name, bind(part, jaxpr), part.params, part)
    return Step(operation, step.inputs, pick(step.outputs, wanted))
