"""Stacks all stages into one module with [R, S, ...] variables and the names of their dims.

With one repeat they are [S, ...]. In variables that name their dims (`out_sharding`), the names of
`PipelineSettings.stacked` precede the stage's own names.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .._settings import REPEATS
from .._stages import stage_keys

Factory = Callable[[nnx.Rngs], nnx.Module]


def init_stages(factory: Factory) -> Callable[[dict[str, jax.Array]], PyTree]:
    """Returns a function from [S] keys by random stream to the [S, ...] state of a repeat."""

    def init(keys: dict[str, jax.Array]) -> PyTree:
        return nnx.state(one_stage(factory, nnx.Rngs(**keys)))

    return jax.vmap(init)


def one_stage(factory: Factory, rngs: nnx.Rngs) -> nnx.Module:
    """Creates one stage, without sharding its variables: only stacked variables are sharded."""
    with nnx.use_eager_sharding(False):
        return factory(rngs)


def stacked_module(
    factory: Factory,
    init_stages: Callable,
    rngs: nnx.Rngs,
    dims: Mapping[str, int],
    reshard: Callable,
) -> nnx.Module:
    """Returns the module that `factory` creates, with the variables of all stages.

    Stage s has its own streams, whose keys are folded with s. `dims` are those in front of a
    variable's own. `reshard(array, logical spec, path=name)` shards a variable.
    """
    keys = {name: stage_keys(stream(), [*dims.values()]) for name, stream in rngs.items()}
    # Not `nnx.eval_shape`: inside `jax.set_mesh` it takes logical names for axes of the mesh.
    abstract = dict.fromkeys(keys, 0)
    graph, _ = jax.eval_shape(lambda: nnx.split(one_stage(factory, nnx.Rngs(**abstract))))
    init_all = jax.vmap(init_stages) if REPEATS in dims else init_stages
    state = with_names(init_all(keys), dims)
    resharded = [
        (path, v.replace(reshard(v.get_value(), logical_spec(v, dims), path=name_of(path))))
        for path, v in nnx.to_flat_state(state)
    ]
    with nnx.use_eager_sharding(False):
        return nnx.merge(graph, nnx.from_flat_state(resharded))


def with_names(state: PyTree, names: Iterable[str]) -> PyTree:
    """Adds the names of the leading dims to variables that name their dims."""
    for index, name in enumerate(names):
        state = nnx.spmd.add_axis(state, index, {nnx.PARTITION_NAME: name})
    return state


def without_names(state: PyTree, names: Iterable[str]) -> PyTree:
    """Returns a copy of `state` without the names that `with_names` adds."""
    state = jax.tree.map(lambda x: x, state)
    for name in names:
        state = nnx.spmd.remove_axis(state, 0, {nnx.PARTITION_NAME: name})
    return state


def logical_specs(state: PyTree, names: Iterable[str]) -> Any:
    """Returns the logical spec of every variable, by its path."""
    return {
        name_of(path): logical_spec(variable, names) for path, variable in nnx.to_flat_state(state)
    }


def logical_spec(variable: nnx.Variable, names: Iterable[str]) -> PartitionSpec:
    """Returns the names of a stacked variable, or `names`, of the leading dims, if it has none."""
    return PartitionSpec(*(variable.get_metadata().get("out_sharding") or names))


def name_of(path: tuple) -> str:
    """Returns the path of a variable as text, such as "mlp.up.kernel"."""
    return ".".join(map(str, path))
