"""Returns the jaxprs that equations call, equations as functions, and layouts of their arrays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from ..._compat import ClosedJaxpr, empty, jaxprs_in_params, rematerialized_jaxpr


def pvary_like(aval: Any, x: Any) -> Any:
    """Returns `x` cast to vary over all manual axes over which `aval` varies."""
    missing = aval.manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying")


def has_plain_slices(aval: Any) -> bool:
    """Returns whether a loop can stack slices of an array: not if sharded, on host, or keys."""
    is_sharded = any(axis is not None for axis in aval.sharding.spec)
    is_on_host = aval.memory_space == jax.memory.Space.Host
    return not (is_sharded or is_on_host or jnp.issubdtype(aval.dtype, jax.dtypes.extended))


def empty_stack(aval: Any, length: int) -> jax.Array | None:
    """Returns an unfilled array [length, ...] for slices, or None if `lax.scan` makes it."""
    if not has_plain_slices(aval):
        return None
    return pvary_like(aval, empty((length, *aval.shape), aval.dtype))


def row_major(x: jax.Array) -> jax.Array:
    """Constrains an array to row-major layout, but for random keys, which have no layout.

    XLA's partitioner gathers an array that it divides before such a constraint: where there are
    `partitioned_axes`, apply it to the shard of every device.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def partitioned_axes() -> frozenset[str]:
    """Returns the mesh axes over which XLA's partitioner may divide arrays here."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = (axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    return frozenset(axes) - frozenset(mesh.manual_axes)


def jaxpr_of(closed: Any) -> Jaxpr:
    """Returns the `Jaxpr` of an open or closed jaxpr."""
    return getattr(closed, "jaxpr", closed)


def closed_jaxpr(jaxpr: Any) -> ClosedJaxpr:
    """Returns an open or closed jaxpr as a `ClosedJaxpr`, without constants if it is open."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def all_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr, and those of the jaxprs in them."""
    for equation in jaxpr_of(jaxpr).eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from all_equations(inner)


def any_equation(jaxpr: Any, is_such: Callable[[JaxprEqn], bool]) -> bool:
    """Returns whether an equation is such, of a jaxpr or of those in its equations."""
    return any(map(is_such, all_equations(jaxpr)))


def scoped(equation: JaxprEqn, names: Any) -> JaxprEqn:
    """Returns `equation` with the name scopes of the call from which it is inlined."""
    if not names:
        return equation
    info = equation.source_info
    return equation.replace(source_info=info.replace(name_stack=names + info.name_stack))


_CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that only call a jaxpr, and the name of the parameter that holds it."""


def called_jaxpr(equation: JaxprEqn) -> Any:
    """Returns the jaxpr that an equation calls, None if the equation does anything else."""
    shardings = (
        *equation.params.get("in_shardings", ()),
        *equation.params.get("out_shardings", ()),
    )
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        return None
    if equation.primitive.name == "call_hi_primitive":
        return rematerialized_jaxpr(equation.params)
    return equation.params.get(_CALLS.get(equation.primitive.name, ""))


def bind(
    equation: JaxprEqn, jaxpr: Jaxpr, *, with_literals: bool = False
) -> Callable[..., Sequence[Any]]:
    """Returns an equation as a function of its inputs; a variable that it reads twice is two."""
    invars = [Var(x.aval) if with_literals or isinstance(x, Var) else x for x in equation.invars]
    inputs = [x for x in invars if isinstance(x, Var)]
    if equation.primitive.name == "pvary" and inputs:
        # What was stored for the other half of a backward varies already when it is read.
        return lambda x: [pvary_like(equation.outvars[0].aval, x)]
    outputs = [Var(x.aval) for x in equation.outvars]  # some may be dropped
    alone = jaxpr.replace(
        constvars=[],
        invars=inputs,
        outvars=outputs,
        eqns=[equation.replace(invars=invars, outvars=outputs)],
        effects=equation.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))
