"""Variables of a module of the front door: their names, and modules that are given new values."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..compat.maxtext.nnx import name_of, weights_of

Path = tuple[Any, ...]


def submodule(module: Any, path: list[Any], layers: str) -> Any:
    """Returns the submodule at a path; `layers` is what the user called it."""
    for part in path:
        try:
            module = module[part] if isinstance(part, int) else getattr(module, part)
        except (AttributeError, IndexError, KeyError) as error:
            raise ValueError(f"`layers` is {layers!r}, and the module has no {part!r}.") from error
    return module


def with_values(state: Any, values: Any, key: Any, constants: dict[Path, Any]) -> Any:
    """Returns a state with parameters by name, streams that start from a key, and constants."""
    flat = []
    for i, (path, variable) in enumerate(nnx.to_flat_state(state)):
        if isinstance(variable, nnx.RngKey):
            start = jax.random.key(0) if key is None else key
            if not jnp.issubdtype(start.dtype, jax.dtypes.prng_key):
                start = jax.random.wrap_key_data(start)
            value = jax.random.fold_in(start, i)
            if shape := variable.get_value().shape:  # one for each layer of a stack
                value = jax.random.split(value, shape)
        elif isinstance(variable, nnx.RngState):
            value = jnp.zeros(variable.get_value().shape, variable.get_value().dtype)
        else:
            value = constants[path].get_value() if path in constants else values[name_of(path)]
        flat.append((path, variable.replace(value)))
    return nnx.from_flat_state(flat)


def values_by_name(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state by name, without those of random streams."""
    return weights_of(nnx.filter_state(state, nnx.Not(nnx.RngState)))


def flat_params(params: Any, paths: set[Path]) -> dict[Path, Any]:
    """Returns the variables of the user's parameters, which are at `paths`."""
    flat = dict(nnx.to_flat_state(params)) if isinstance(params, nnx.State) else {}
    if flat.keys() != paths:
        raise ValueError(
            f"`params` is {type(params).__name__}, and not the tree of parameters that "
            "`jaxpipe.nnx.model` returned."
        )
    return flat
