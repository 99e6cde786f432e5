"""Layers that call `jax.shard_map` over the whole mesh, as MaxText's kernels and experts do."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.core import meta
from jax.sharding import PartitionSpec as P

from harness import frontends
from harness.maxtext_like import Config, ShardMode, mesh_of
from jaxpipe import linen

WIDTH, ROWS = 8, 8


def kernel(x, w, factor, causal):
    """Rows are split over fsdp, columns of w over tensor; `factor` all devices share."""
    h = jnp.tanh(x @ w) * factor
    ones = jnp.ones((x.shape[0],), jnp.int32)
    total = jax.lax.psum(jnp.sum(h * h), ("fsdp", "tensor"))
    return (h if causal else -h), total, jax.lax.psum(jnp.sum(ones), ("fsdp",))


def plain_kernel(x, w, factor, causal):
    h = jnp.tanh(x @ w) * factor
    return (h if causal else -h), jnp.sum(h * h), jnp.int32(x.shape[0])


IN, OUT = (P("fsdp"), P(None, "tensor"), P(), None), (P("fsdp", "tensor"), P(), P())


class Layer(nn.Module):
    mesh: Any = None
    check_vma: bool = False

    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        w = self.param("w", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
        factor = self.param("factor", nn.initializers.constant(0.5), ())
        run = plain_kernel
        if self.mesh is not None:
            options: dict[str, Any] = {"mesh": self.mesh, "check_vma": self.check_vma}
            run = jax.shard_map(kernel, in_specs=IN, out_specs=OUT, **options)
        y, total, count = run(inputs, w, factor, True)
        return inputs + y * (1 + 0.1 * total / count.astype(y.dtype)), None


def gradients(layer: Layer, mesh: Any, **fields: Any) -> Any:
    pipeline: Any = linen.create_pipeline(Config(**fields), layer, mesh)
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    plain: Any = linen.create_pipeline(Config(), Layer(), None)
    variables = jax.device_get(meta.unbox(plain.init(jax.random.key(0), x)))

    def loss(variables, x):
        return frontends.scalar(pipeline.apply(variables, x))

    return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x))


@pytest.fixture(scope="module")
def true() -> Any:
    return gradients(Layer(), None)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_layers_own_shard_map_over_the_whole_mesh_has_the_gradients_of_the_plain_layer(
    check_vma, true
):
    mesh = mesh_of(ShardMode.AUTO)
    frontends.assert_trees_close(gradients(Layer(mesh, check_vma), mesh), true)


def test_axes_that_are_manual_in_the_pipeline_are_left_out_of_a_layers_shard_map(true):
    mesh = mesh_of(ShardMode.AUTO)
    fields: dict[str, Any] = {"pipeline_batch_axes": ("fsdp",), "pipeline_fsdp_ag_once": True}
    frontends.assert_trees_close(gradients(Layer(mesh), mesh, **fields), true)
