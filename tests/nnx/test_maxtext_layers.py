"""MaxText's config object, and an NNX layer that constrains its activations over the whole mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from harness import frontends
from harness.maxtext_like import RULES, Config, ShardMode, mesh_of, shard_as
from jaxpipe import nnx as pipelines

WIDTH = 8
NAMES = ("activation_batch", "activation_length", "activation_embed")


def layer_of(mesh: Any) -> Any:
    """A factory; without a mesh its layers constrain nothing."""

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            metadata = {"out_sharding": ("embed", "mlp")}
            self.dense = nnx.Linear(WIDTH, WIDTH, kernel_metadata=metadata, rngs=rngs)

        def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
            def shard(x):
                return x if mesh is None else shard_as(x, NAMES, mesh, ShardMode.AUTO)

            with nnx.logical_axis_rules(RULES):
                return shard(inputs + jnp.tanh(self.dense(shard(inputs)))), None

    return Layer


def gradients(mesh: Any) -> Any:
    config = Config(pipeline_fsdp_ag_per_repeat=True)
    pipeline = pipelines.create_pipeline(config, layer_of(mesh), mesh, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(pipeline, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (8, 4, WIDTH))

    def loss(params, x):
        return frontends.scalar(nnx.merge(graph, params, rest, copy=True)(x))

    grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)
    return [jax.device_get(leaf) for leaf in jax.tree.leaves(grads)]


def test_layers_that_name_shardings_of_the_whole_mesh_run_with_maxtexts_own_config():
    frontends.assert_trees_close(gradients(mesh_of(ShardMode.AUTO)), gradients(None))


def test_random_streams_of_layers_are_the_same_on_explicit_axes():
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def keys(mode: ShardMode, mesh: Any) -> Any:
        config = Config(shard_mode=mode)
        pipeline = pipelines.create_pipeline(config, Layer, mesh, rngs=nnx.Rngs(0))
        drawn = jax.tree.leaves(pipeline.draw_keys())
        return [jax.device_get(jax.random.key_data(key)).tolist() for key in drawn]

    mesh = mesh_of(ShardMode.EXPLICIT)
    assert keys(ShardMode.EXPLICIT, mesh) == keys(ShardMode.AUTO, None) != []
