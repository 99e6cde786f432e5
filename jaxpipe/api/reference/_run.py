"""Runs the user's program on one device, and finds the dtype in which it computes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..._compat import jaxprs_in_params, translated_shardings


def on_one_device(mesh: Mesh, function: Callable, *arguments: PyTree) -> tuple[Any, Any]:
    """Runs a function on the first device; returns its results and its narrowest floating dtype.

    Sharding constraints of the function are those of a mesh with the same axes and one device.
    """
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    alone = Mesh(np.array(own[:1]).reshape([1] * len(mesh.axis_names)), mesh.axis_names)
    here = jax.tree.map(partial(_moved, own[0]), arguments)

    def on_alone(sharding: NamedSharding) -> NamedSharding:
        if sharding.mesh.size == 1:
            return sharding
        return NamedSharding(alone.abstract_mesh, sharding.spec)

    with jax.set_mesh(alone), translated_shardings(on_alone):
        traced = jax.jit(function).trace(*here)
        compiled = traced.lower().compile()
        return compiled(*here), narrowest_dtype(traced.jaxpr.jaxpr)


def _moved(device: Any, x: Any) -> Any:
    """Copies an array to a device, by way of the host: its type forgets the mesh that it was on."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _moved(device, jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(np.asarray(x), device)


def narrowest_dtype(jaxpr: Jaxpr) -> Any:
    """Returns the narrowest dtype of floating-point numbers that a program computes."""
    dtypes = {x for x in _dtypes(jaxpr) if jnp.issubdtype(x, jnp.inexact)}
    return min(dtypes, key=lambda x: jnp.finfo(x).bits, default=jnp.dtype(jnp.float32))


def _dtypes(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            yield from _dtypes(inner)
        yield from (getattr(v.aval, "dtype") for v in equation.outvars if hasattr(v.aval, "dtype"))  # noqa: B009
