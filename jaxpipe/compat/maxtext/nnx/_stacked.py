"""Stacks all layers into one module with [R, S, L, ...] variables and the names of their dims.

In variables that name their dims (`out_sharding`), the names "circular_repeats", "stage" and
"layers" precede the layer's own names.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .._layers import layer_keys
from .._weight_sharding import STACKED

Factory = Callable[[nnx.Rngs], nnx.Module]


def init_stages(factory: Factory) -> Callable[[dict[str, jax.Array]], PyTree]:
    """Returns a function from [S, L] keys by random stream to the state of a repeat's layers.

    The state has [S, L, ...] leaves.
    """

    def init(keys: dict[str, jax.Array]) -> PyTree:
        return nnx.state(one_layer(factory, keys))

    return jax.vmap(jax.vmap(init))


def one_layer(factory: Factory, keys: dict[str, Any]) -> nnx.Module:
    """Creates one layer, without sharding its variables: only stacked variables are sharded."""
    with nnx.use_eager_sharding(False):
        return factory(nnx.Rngs(**keys))


def stacked_module(
    factory: Factory,
    init_stages: Callable,
    rngs: nnx.Rngs,
    dims: tuple[int, int, int],
    reshard: Callable,
) -> nnx.Module:
    """Returns the module that `factory` creates, with the [R, S, L, ...] variables of all layers.

    Layer l has its own streams, whose keys are folded with l. `reshard(array, logical spec,
    path=name)` shards a variable.
    """
    keys = {name: layer_keys(stream(), dims) for name, stream in rngs.items()}
    # Not `nnx.eval_shape`: inside `jax.set_mesh` it takes logical names for axes of the mesh.
    graph, _ = jax.eval_shape(lambda: nnx.split(one_layer(factory, dict.fromkeys(keys, 0))))
    state = with_names(jax.vmap(init_stages)(keys))
    resharded = [(path, _resharded(path, v, reshard)) for path, v in nnx.to_flat_state(state)]
    with nnx.use_eager_sharding(False):
        return nnx.merge(graph, nnx.from_flat_state(resharded))


def with_names(state: PyTree) -> PyTree:
    """Adds the names of the three leading dims to variables that name their dims."""
    for index, name in enumerate(STACKED):
        state = nnx.spmd.add_axis(state, index, {nnx.PARTITION_NAME: name})
    return state


def without_names(state: PyTree) -> PyTree:
    """Returns a copy of `state` without the names that `with_names` adds."""
    state = jax.tree.map(lambda x: x, state)
    for name in STACKED:
        state = nnx.spmd.remove_axis(state, 0, {nnx.PARTITION_NAME: name})
    return state


def logical_specs(state: PyTree) -> Any:
    """Returns the logical spec of every variable, by its path."""
    return {
        ".".join(map(str, path)): logical_spec(variable)
        for path, variable in nnx.to_flat_state(state)
    }


def logical_spec(variable: nnx.Variable) -> PartitionSpec:
    """Returns the names of a stacked variable, or of the three leading dims if it has none."""
    names = variable.get_metadata().get("out_sharding") or STACKED
    return PartitionSpec(*names)


def _resharded(path: tuple, variable: nnx.Variable, reshard: Callable) -> nnx.Variable:
    value, name = variable.get_value(), ".".join(map(str, path))
    return variable.replace(reshard(value, logical_spec(variable), path=name))
