"""MaxText's config object, and an NNX layer that constrains its activations over the whole mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh

from harness import frontends
from harness.maxtext_like import RULES, Config, ShardMode, mesh_of, shard_as
from jaxpipe import nnx as pipelines
from jaxpipe import sharding

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


def test_on_explicit_axes_no_weight_is_over_an_axis_of_size_1():
    """As in MaxText, whose norms multiply by a scale over `tensor` without `out_sharding`."""

    class Norm(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.scale = nnx.Param(jax.random.normal(rngs(), (WIDTH,)), out_sharding=("mlp",))

        def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
            return jnp.einsum("...k,k->...k", inputs, self.scale.get_value())

    sizes = {"stage": 2, "fsdp": 2, "tensor": 1}
    mesh = sharding.make_mesh(sizes, devices=jax.devices()[:4])
    mesh = Mesh(
        mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names)
    )
    config = Config(shard_mode=ShardMode.EXPLICIT)
    x = jax.random.normal(jax.random.key(1), (8, 4, WIDTH))
    with jax.set_mesh(mesh):
        pipeline: Any = pipelines.create_pipeline(config, Norm, mesh, rngs=nnx.Rngs(0))
        graph, state = nnx.split(pipeline)
        loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x) ** 2)  # noqa: E731
        gradient, dx = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(state, x))
    scale = pipeline.layers.scale.get_value()
    plain = lambda scale, x: jnp.sum((x * jnp.prod(scale, (0, 1))) ** 2)  # noqa: E731
    wanted = jax.grad(plain, (0, 1))(jax.device_get(scale), x)
    frontends.assert_trees_close((*jax.tree.leaves(gradient), dx), wanted)
    assert scale.sharding.spec[2:] in ((), (None,))


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
