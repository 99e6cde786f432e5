"""MaxText's config object and layers that constrain their activations over the whole mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec

from harness import frontends
from harness.maxtext_like import Config, ShardMode, mesh_of, shard_as
from jaxpipe import linen

WIDTH, LENGTH, ROWS = 8, 4, 8
NAMES = ("activation_batch", "activation_length", "activation_embed")


class Layer(nn.Module):
    """As MaxText's: constraints in between and at the end, and a pair for scans."""

    mesh: Any = None
    mode: ShardMode = ShardMode.AUTO

    def kernel(self, name: str) -> Any:
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return self.param(name, init, (WIDTH, WIDTH))

    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        def shard(x, names):
            return x if self.mesh is None else shard_as(x, names, self.mesh, self.mode)

        x = shard(inputs, NAMES)
        h = x @ self.kernel("wi")
        h = jnp.tanh(shard(h, ("activation_batch", "activation_length", "activation_mlp")))
        if self.mesh is not None and self.mode == ShardMode.AUTO:
            h = nn.spmd.with_logical_constraint(h, NAMES, mesh=self.mesh)
        return shard(x + h @ self.kernel("wo"), NAMES), None


def stage_of(num_layers: int, layer: Layer) -> nn.Module:
    """A stage as MaxText's decoder makes it: one layer, or a scan over several."""
    if num_layers == 1:
        return layer

    class Stage(nn.Module):
        @nn.compact
        def __call__(self, inputs, *rest):
            scan: Any = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,  # type: ignore[arg-type]
                length=num_layers,
                metadata_params={nn.PARTITION_NAME: "layers_per_stage"},
            )
            return scan(layer.mesh, layer.mode, name="layers")(inputs, *rest)

    return Stage()


def gradients(pipeline: Any, variables: Any, x: jax.Array) -> Any:
    def loss(variables, x):
        return frontends.scalar(pipeline.apply(variables, x))

    grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x)
    return jax.device_get(meta.unbox(grads))


@pytest.fixture(scope="module")
def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))


@pytest.fixture(scope="module")
def plain(batch: jax.Array) -> tuple[Any, Any]:
    """Weights of all layers as numpy arrays, and the loss and gradients of a loop over them."""
    pipeline: Any = linen.create_pipeline(Config(), Layer(), None)
    variables = jax.device_get(meta.unbox(pipeline.init(jax.random.key(0), batch)))

    def loss(variables, x):
        flat = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), variables["params"]["layers"])
        for number in range(4):
            weights = jax.tree.map(lambda w: w[number], flat)  # noqa: B023
            x = Layer().apply({"params": weights}, x, None, None, False, "train")[0]
        # In the order of the pipeline: microbatches of consecutive rows.
        return frontends.scalar(x)

    return variables, jax.device_get(jax.value_and_grad(loss, (0, 1))(variables, batch))


GATHERS = {
    "tick": {},
    "once": {"pipeline_fsdp_ag_once": True},
    "repeat": {"pipeline_fsdp_ag_per_repeat": True},
    "rows": {"pipeline_fsdp_ag_per_repeat": True, "pipeline_batch_axes": ("fsdp",)},
    "unrolled": {"scan_pipeline_iterations": False},
    "rows, unrolled": {"scan_pipeline_iterations": False, "pipeline_batch_axes": ("fsdp",)},
    "delay": {"pipeline_delay_activation_forwarding": True, "num_pipeline_microbatches": 4},
    "extra microbatches": {"num_pipeline_microbatches": 4},
    "not circular": {"num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 1},
}
"""The cases of MaxText's own tests of pipelines, and ours."""


@pytest.mark.parametrize("gather", GATHERS)
def test_layers_that_name_shardings_of_the_whole_mesh_run_with_maxtexts_own_config(
    gather, plain, batch
):
    mesh = mesh_of(ShardMode.AUTO)
    fields = GATHERS[gather]
    if "rows" in gather:  # what splits weights where a layer reads them may not be a batch axis
        fields = fields | {"logical_axis_rules": [["embed", "fsdp"], ["mlp", "tensor"]]}
    num_layers = fields.get("num_layers_per_pipeline_stage", 1)
    stage = stage_of(num_layers, Layer(mesh))
    pipeline: Any = linen.create_pipeline(Config(**fields), stage, mesh)
    variables, (loss, (of_weights, of_inputs)) = plain
    if num_layers > 1:  # [stages, layers of a stage, ...] of [repeats, ranks, ...]
        variables, of_weights = (
            {"params": {"layers": tree["params"]}} for tree in (variables, of_weights)
        )
    true = loss, (of_weights, of_inputs)
    frontends.assert_trees_close(gradients(pipeline, variables, batch), true)


def test_layers_outside_the_pipeline_use_stage_as_data(plain, batch):
    mesh = mesh_of(ShardMode.AUTO)
    rows = NamedSharding(mesh, PartitionSpec(("stage", "fsdp")))
    fields = {"num_decoder_layers": 6, "pipeline_parallel_layers": 4}
    pipeline: Any = linen.create_pipeline(Config(**fields), Layer(mesh), mesh)
    outside = {"params": jax.tree.map(lambda w: w[0, 0], plain[0]["params"]["layers"])}

    def run(variables, outside, x, *, pipelined, shard):
        layer = lambda x: Layer().apply(outside, shard(x), None, None, False, "train")[0]  # noqa: E731
        return layer(pipelined(variables, layer(x)))

    def loop(variables, x):
        flat = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), variables["params"]["layers"])
        for number in range(4):
            weights = {"params": jax.tree.map(lambda w: w[number], flat)}  # noqa: B023
            x = Layer().apply(weights, x, None, None, False, "train")[0]
        return x

    def grads(pipelined, shard):
        def loss(*arguments):
            return frontends.scalar(run(*arguments, pipelined=pipelined, shard=shard))

        return jax.device_get(jax.jit(jax.grad(loss, (0, 1, 2)))(plain[0], outside, batch))

    got = grads(pipeline.apply, lambda x: jax.lax.with_sharding_constraint(x, rows))
    frontends.assert_trees_close(got, grads(loop, lambda x: x))


@pytest.mark.parametrize("every_axis", [False, True])
@pytest.mark.parametrize("context", [False, True])
def test_explicit_axes_take_weights_that_are_not_placed_yet(every_axis, context, plain, batch):
    mode = ShardMode.EXPLICIT
    mesh = mesh_of(mode, every_axis=every_axis)
    layer = Layer(mesh, mode) if every_axis else Layer()
    config = Config(shard_mode=mode, pipeline_fsdp_ag_once=True)
    pipeline: Any = linen.create_pipeline(config, layer, mesh)
    if context:
        with jax.set_mesh(mesh):
            on_one_device = jax.tree.map(jnp.asarray, plain[0])
            got = gradients(pipeline, on_one_device, batch)
            made = pipeline.init(jax.random.key(0), batch)
        spec = meta.unbox(made)["params"]["layers"]["wi"].sharding.spec
        assert spec[1] == "stage" and "fsdp" in str(spec[2])
    else:
        got = gradients(pipeline, plain[0], batch)
    frontends.assert_trees_close(got, plain[1])


def test_a_config_that_is_a_dict_is_refused():
    with pytest.raises(ValueError, match=r"`config` is a dict.*SimpleNamespace\(\*\*config\)"):
        linen.create_pipeline({"ici_pipeline_parallelism": 2}, Layer(), None)


def test_numbers_and_flags_of_numpy_are_numbers_and_flags():
    config = Config(num_pipeline_microbatches=np.int64(4), pipeline_fsdp_ag_once=np.bool_(True))
    settings: Any = linen.create_pipeline(config, Layer(), None)
    assert (
        settings.settings.pipeline_shape.num_microbatches == 4
        and settings.settings.gather == "once"
    )


def test_explicit_axes_take_iterations_that_are_unrolled(plain, batch):
    mode = ShardMode.EXPLICIT
    mesh = mesh_of(mode)
    config = Config(shard_mode=mode, scan_pipeline_iterations=False)
    pipeline: Any = linen.create_pipeline(config, Layer(), mesh)
    frontends.assert_trees_close(gradients(pipeline, plain[0], batch), plain[1])
