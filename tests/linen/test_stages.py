"""What MaxText hands to a pipeline is a stage: its layers, layout, names and shardings."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import meta
from jax.sharding import Mesh, PartitionSpec

from harness import frontends
from harness.maxtext_like import RULES
from jaxpipe import linen, sharding
from jaxpipe import nnx as nnx_pipelines
from jaxpipe.compat import maxtext

# Layers may sow without `nnx.capture`, as before Flax 0.12.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow")
KEY, WIDTH = jax.random.key(0), 8


class AddsOne(nn.Module):
    """A layer that adds 1."""

    @nn.compact
    def __call__(self, x, *_):
        return x + self.param("one", nn.initializers.ones, ())


class TwoLayers(nn.Module):
    """A stage of two layers."""

    @nn.compact
    def __call__(self, x, *rest):
        return AddsOne(name="layers_1")(AddsOne(name="layers_0")(x, *rest), *rest)


class NnxAddsOne(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, x, *_):
        return x + self.one


class NnxTwoLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers_0, self.layers_1 = NnxAddsOne(rngs), NnxAddsOne(rngs)

    def __call__(self, x, *rest):
        return self.layers_1(self.layers_0(x, *rest), *rest), None


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fields", [{}, {"pipeline_fsdp_ag_per_repeat": True}])
@pytest.mark.parametrize("layers", [TwoLayers(), NnxTwoLayers])
def test_eight_layers_that_add_one_add_eight(layers, ranks, fields):
    config = SimpleNamespace(num_decoder_layers=8, num_layers_per_pipeline_stage=2, **fields)
    mesh = sharding.make_mesh({"stage": ranks}, devices=jax.devices()[:ranks])
    pipeline: Any = maxtext.create_pipeline(config, layers, mesh)
    x = jnp.zeros((8, 3))
    variables = pipeline.init(KEY, x)
    ones = {leaf.shape for leaf in jax.tree.leaves(variables)}
    assert ones == {(2, 2) if ranks == 2 else (4,)}  # [repeats, stages], or [stages]
    np.testing.assert_array_equal(jax.jit(pipeline.apply)(variables, x), jnp.full((8, 3), 8.0))
    if not isinstance(layers, nn.Module):
        module: Any = maxtext.create_nnx_pipeline(config, layers, mesh, rngs=nnx.Rngs(0))
        y = nnx.jit(lambda module: module(x))(module)
        np.testing.assert_array_equal(y, jnp.full((8, 3), 8.0))


class Mlp(nnx.Module):
    """A layer with names of dims, dropout, and a value that it sows."""

    def __init__(self, rngs: nnx.Rngs):
        metadata = {"out_sharding": ("embed", "mlp")}
        self.up = nnx.Linear(WIDTH, WIDTH, kernel_metadata=metadata, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x, segment_ids, positions, deterministic, model_mode):
        h = jnp.tanh(self.up(x))
        self.sow(nnx.Intermediate, "mean", jnp.mean(h))
        return x + self.dropout(h, deterministic=deterministic)


def mesh_of(ranks: int, fsdp: int) -> Mesh:
    return sharding.make_mesh({"stage": ranks, "fsdp": fsdp}, devices=jax.devices()[: ranks * fsdp])


@pytest.mark.parametrize(("ranks", "layers"), [(2, 4), (4, 4)])
def test_a_factory_of_nnx_in_linen_has_the_gradients_of_a_loop_over_its_stages(ranks, layers):
    config = SimpleNamespace(
        num_decoder_layers=layers, num_pipeline_microbatches=4, logical_axis_rules=RULES
    )
    pipeline: Any = linen.create_pipeline(config, Mlp, mesh_of(ranks, 2))
    x = jax.random.normal(KEY, (8, 3, WIDTH))
    variables = pipeline.init(KEY, x)
    assert {*variables} == {"params"}

    dims = pipeline.settings.stacked

    def loss(variables, x):
        y, sown = pipeline.apply(variables, x, deterministic=True, mutable=["intermediates"])
        return frontends.scalar(y) + jnp.sum(sown["intermediates"]["layers"]["mean"][0])

    with nnx.use_eager_sharding(False):
        graph, params, rest = nnx.split(Mlp(nnx.Rngs(0)), nnx.Param, ...)

    def true_loss(variables, x):
        weights = meta.unbox(variables)["params"]["layers"]
        stacked = jax.tree.map(lambda w: w.reshape(layers, *w.shape[len(dims) :]), weights)
        ys, total = [], 0.0
        for rows in x.reshape(4, 2, 3, WIDTH):
            for number in range(layers):
                state = nnx.State(params)
                nnx.replace_by_pure_dict(state, jax.tree.map(lambda w: w[number], stacked))  # noqa: B023
                module: Any = nnx.merge(graph, state, rest, copy=True)
                h = jnp.tanh(module.up(rows))
                rows, total = rows + h, total + jnp.mean(h)
            ys.append(rows)
        return frontends.scalar(jnp.concatenate(ys)) + total

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x)
    true = jax.jit(jax.value_and_grad(true_loss, (0, 1)))(variables, x)
    frontends.assert_trees_close(meta.unbox(got), meta.unbox(true))


def test_a_stage_of_nnx_in_linen_draws_by_stage_and_microbatch():
    config = SimpleNamespace(num_decoder_layers=2)
    pipeline: Any = linen.create_pipeline(config, Mlp, mesh_of(2, 1))
    x = jax.random.normal(KEY, (4, 3, WIDTH))
    variables, rngs = pipeline.init(KEY, x), {"dropout": jax.random.key(1)}
    base = pipeline.apply(variables, "dropout", method="make_rng", rngs=rngs)

    def make(*, rngs: nnx.Rngs) -> nnx.Module:
        with nnx.use_eager_sharding(False):
            return Mlp(rngs)

    stage: Any = nnx.bridge.ToLinen(make)

    def true(variables, x):
        weights, ys = meta.unbox(variables)["params"]["layers"], []
        for m, rows in enumerate(x.reshape(2, 2, 3, WIDTH)):
            for number in range(2):
                key = jax.random.fold_in(jax.random.fold_in(base, number), m)
                w = {"params": jax.tree.map(lambda w: w[number], weights)}  # noqa: B023
                rows = stage.apply(w, rows, None, None, False, "train", rngs={"dropout": key})
            ys.append(rows)
        return frontends.scalar(jnp.concatenate(ys))

    def loss(variables, x):
        return frontends.scalar(pipeline.apply(variables, x, rngs=rngs))

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x)
    wanted = jax.jit(jax.value_and_grad(true, (0, 1)))(variables, x)
    frontends.assert_trees_close(meta.unbox(got), meta.unbox(wanted))


@pytest.mark.parametrize("rngs", [{}, {"params": KEY}, {"noise": KEY}])
def test_a_stage_of_nnx_in_linen_draws_from_no_stream_that_is_not_given(rngs):
    config = SimpleNamespace(num_decoder_layers=2)
    pipeline: Any = linen.create_pipeline(config, Mlp, mesh_of(2, 1))
    variables = pipeline.init(KEY, jnp.ones((2, 3, WIDTH)))
    names = ", ".join(rngs) or "none"
    with pytest.raises(ValueError, match=f"draws random numbers, .*: it was given {names}. Give"):
        pipeline.apply(variables, jnp.ones((2, 3, WIDTH)), rngs=rngs)


def test_a_stage_of_nnx_in_linen_changes_no_variable():
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x, segment_ids, positions, deterministic, model_mode):
            return self.norm(x, use_running_average=deterministic)

    config = SimpleNamespace(num_decoder_layers=2)
    pipeline: Any = linen.create_pipeline(config, Normed, mesh_of(2, 1))
    x = jax.random.normal(KEY, (2, 3, WIDTH))
    variables = pipeline.init(KEY, x)
    np.testing.assert_allclose(pipeline.apply(variables, x, deterministic=True), x, rtol=1e-4)
    with pytest.raises(ValueError, match=r"changes its variables \['norm.mean', 'norm.var'\]"):
        pipeline.apply(variables, x)


@pytest.mark.parametrize(("ranks", "stacked"), [(2, (None, "stage")), (4, ("stage",))])
def test_variables_lie_where_maxtexts_rules_put_their_names(ranks, stacked):
    mesh, config = mesh_of(ranks, 2), SimpleNamespace(num_decoder_layers=4)
    config.logical_axis_rules = RULES
    pipeline: Any = linen.create_pipeline(config, Mlp, mesh)
    x = jnp.ones((8, 3, WIDTH))
    abstract = jax.eval_shape(pipeline.init, KEY, x)
    shardings = nn.spmd.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)
    kernel = shardings["params"]["layers"]["up"]["kernel"].spec
    assert kernel == PartitionSpec(*stacked, ("fsdp", "expert"), "tensor")
    made = jax.jit(pipeline.init, out_shardings=shardings)(KEY, x)
    eager = pipeline.init(KEY, x)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(eager), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    w = meta.unbox(eager)["params"]["layers"]["up"]["kernel"]
    assert w.sharding.shard_shape(w.shape) == (
        *((2, 1) if ranks == 2 else (1,)),
        WIDTH // 2,
        WIDTH,
    )


def test_a_layer_with_a_grouped_product_is_initialised():
    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            w = self.param("w", nn.initializers.lecun_normal(), (2, WIDTH, WIDTH))
            rows = x.reshape(-1, WIDTH)
            groups = jnp.array([rows.shape[0] // 2, rows.shape[0] - rows.shape[0] // 2])
            return x + jax.lax.ragged_dot(rows, w, groups).reshape(x.shape)

    config = SimpleNamespace(num_decoder_layers=4)
    pipeline: Any = linen.create_pipeline(config, Experts(), mesh_of(2, 1))
    x = jax.random.normal(KEY, (4, 3, WIDTH))
    variables = pipeline.init(KEY, x)
    flat = jax.tree.map(lambda w: w.reshape(4, *w.shape[2:]), variables["params"]["layers"])
    true = []
    for rows in x.reshape(2, 2, 3, WIDTH):
        for number in range(4):
            weights = jax.tree.map(lambda w: w[number], flat)  # noqa: B023
            rows = Experts().apply({"params": weights}, rows)
        true.append(rows)
    frontends.assert_trees_close(jax.jit(pipeline.apply)(variables, x), jnp.concatenate(true))


def test_a_window_is_prefetched_without_specs():
    config = SimpleNamespace(num_decoder_layers=4, pipeline_fsdp_ag_per_repeat=True)
    pipeline: Any = linen.create_pipeline(config, Mlp, mesh_of(2, 2))
    variables = pipeline.init(KEY, jnp.ones((8, 3, WIDTH)))
    bound = pipeline.bind(variables)
    weights = bound.stage_variables()
    window = bound.weight_prefetching(weights, None, 1)  # before iteration 2, in repeat 1
    w = weights["params"]["up"]["kernel"]
    np.testing.assert_array_equal(window["params"]["up"]["kernel"], np.stack([w[0], w[1]]))


@pytest.mark.parametrize("create", [linen.create_pipeline, nnx_pipelines.create_nnx_pipeline])
def test_what_is_no_stage_is_refused_when_the_pipeline_is_made(create):
    with pytest.raises(TypeError, match=r"is of the type .*that returns an NNX module"):
        create(SimpleNamespace(ici_pipeline_parallelism=2), NnxAddsOne(nnx.Rngs(0)), None)


def test_a_linen_module_is_no_factory():
    with pytest.raises(TypeError, match="`stage_factory` is of the type AddsOne"):
        nnx_pipelines.create_pipeline(SimpleNamespace(ici_pipeline_parallelism=2), AddsOne(), None)
