"""A user's own NNX decoder layer in a pipeline: the numbers of a loop over its layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from harness import frontends
from harness.frontends import Row
from jaxpipe import nnx as frontend
from jaxpipe.schedules.builders import circular_ticks
from jaxpipe.spmd import stepwise

# Layers may sow without `nnx.capture`, as before Flax 0.12.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow")
CONFIG = Row(2, 1, 1)


def linear(fan_in: int, width: int, axes: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    metadata = {"out_sharding": axes}
    return nnx.Linear(fan_in, width, use_bias=False, kernel_metadata=metadata, rngs=rngs)


class Mlp(nnx.Module):
    """Sows the mean of its hidden layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = linear(frontends.EMBED, frontends.MLP, ("embed", "mlp"), rngs)
        self.down = linear(frontends.MLP, frontends.EMBED, ("mlp", "embed"), rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x, deterministic):
        h = nnx.gelu(self.up(x))
        self.sow(nnx.Intermediate, "hidden", jnp.mean(h))
        return self.down(self.dropout(h, deterministic=deterministic))


class Decoder(nnx.Module):
    """Attention and an MLP, with dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.q, self.k, self.v = (
            linear(frontends.EMBED, frontends.EMBED, ("embed", "heads"), rngs) for _ in range(3)
        )
        self.out = linear(frontends.EMBED, frontends.EMBED, ("heads", "embed"), rngs)
        self.norm1 = nnx.RMSNorm(frontends.EMBED, rngs=rngs)
        self.norm2 = nnx.RMSNorm(frontends.EMBED, rngs=rngs)
        self.mlp = Mlp(rngs)

    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        assert model_mode == "train"
        h = self.norm1(inputs)
        mixed = frontends.attention(self.q(h), self.k(h), self.v(h), segment_ids, positions)
        x = inputs + self.out(mixed)
        return x + self.mlp(self.norm2(x), deterministic), None


class Stage(nnx.Module):
    """Two layers, one after the other, as MaxText's decoder hands them in."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers_0, self.layers_1 = Decoder(rngs), Decoder(rngs)

    def __call__(self, inputs, *rest):
        for layer in (self.layers_0, self.layers_1):
            inputs, _ = layer(inputs, *rest)
        return inputs, None


def stage_of(row: Row) -> Any:
    return {1: Decoder, 2: Stage}[row.layers]


def built(row: Row, **more: Any) -> Any:
    rngs = nnx.Rngs(7)
    return frontend.create_nnx_pipeline(row.config(**more), stage_of(row), row.mesh(), rngs=rngs)


def alone(key: Any, row: Row = CONFIG) -> Any:
    """A stage without a pipeline, or a mesh."""
    with nnx.use_eager_sharding(False):
        return stage_of(row)(nnx.Rngs(key))


@pytest.mark.parametrize("row", frontends.EXACT[:1], ids=str)
def test_loss_and_all_gradients_are_those_of_a_loop_over_the_layers(row):
    pipeline = built(row)
    inputs, *batch_inputs = row.batch()
    graph, params, rest = nnx.split(pipeline, nnx.Param, ...)
    stage_graph, _ = nnx.split(alone(0, row))
    rngs = frontends.by_stage(row, nnx.state(pipeline.layers, nnx.RngState))

    def loss(params, inputs):
        return frontends.scalar(nnx.merge(graph, params, rest, copy=True)(inputs, *batch_inputs))

    def stage(w, x, segments, positions, number, m):
        def draw(leaf):
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros((), leaf.dtype)
            return jax.random.fold_in(jax.random.fold_in(leaf[number], 0), m)  # of call 0

        decoder: Any = nnx.merge(stage_graph, w, jax.tree.map(draw, rngs), copy=True)
        return decoder(x, segments, positions, False, "train")[0]

    def true_loss(params, inputs):
        return frontends.scalar(
            frontends.plain_loop(stage, row, params["layers"], inputs, *batch_inputs)
        )

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, inputs)
    frontends.assert_trees_close(
        got, jax.jit(jax.value_and_grad(true_loss, (0, 1)))(params, inputs)
    )


class Recurrence(nnx.Module):
    """A state that begins with zeros, as those of Mamba do."""

    def __init__(self, rngs: nnx.Rngs):
        self.mix = linear(frontends.EMBED, frontends.EMBED, ("embed", "mlp"), rngs)

    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        def step(state, x):
            state = jnp.tanh(self.mix(state) + x)
            return state, state

        start = jnp.zeros((inputs.shape[0], inputs.shape[2]), inputs.dtype)
        _, states = jax.lax.scan(step, start, jnp.moveaxis(inputs, 1, 0))
        return inputs + jnp.moveaxis(states, 0, 1), None


def test_a_layer_may_scan_from_zeros():
    row = CONFIG
    rngs = nnx.Rngs(7)
    pipeline: Any = frontend.create_nnx_pipeline(row.config(), Recurrence, row.mesh(), rngs=rngs)
    inputs, *batch_inputs = row.batch()
    graph, params, rest = nnx.split(pipeline, nnx.Param, ...)
    with nnx.use_eager_sharding(False):
        stage_graph, _ = nnx.split(Recurrence(nnx.Rngs(0)))

    def loss(params):
        merged: Any = nnx.merge(graph, params, rest, copy=True)
        return frontends.scalar(merged(inputs, *batch_inputs))

    def stage(w, x, segments, positions, number, m):
        layer: Any = nnx.merge(stage_graph, w, copy=True)
        return layer(x, segments, positions, False, "train")[0]

    def true_loss(params):
        return frontends.scalar(
            frontends.plain_loop(stage, row, params["layers"], inputs, *batch_inputs)
        )

    got = jax.jit(jax.value_and_grad(loss))(params)
    frontends.assert_trees_close(got, jax.jit(jax.value_and_grad(true_loss))(params))


@pytest.mark.parametrize("row", frontends.BY_HAND[3::8], ids=str)
def test_driven_by_hand_it_gives_what_the_call_gives(row):
    inputs, segments, positions = row.batch()
    wanted = nnx.jit(lambda p: p(inputs, segments, positions))(built(row))
    pipeline, M = built(row), row.microbatches
    xs, seg, pos = (x.reshape(M, -1, *x.shape[1:]) for x in (inputs, segments, positions))
    weights, state = pipeline.stage_variables(), pipeline.init_states(xs)
    step = jax.jit(lambda state, w: pipeline.run_one_iteration(state, w, pos, seg, False, "train"))
    in_use = weights
    for t in range(circular_ticks(row.ranks, row.repeats, M, 1 + ("delay" in row.fields))):
        if "repeat" in row.fields and t % M == 0:
            in_use = pipeline.weight_prefetching(weights, None, t - 1)
        state = step(state, in_use)
    done = stepwise.permute_output(state["state_io"], pipeline.settings.pipeline_shape)
    frontends.assert_trees_close(done.reshape(inputs.shape), wanted)


def test_a_layers_first_weights_depend_on_its_number_alone():
    first, other = (
        frontends.by_stage(row, nnx.to_pure_dict(nnx.state(built(row).layers, nnx.Param)))
        for row in (Row(2, 2, 1), Row(4, 1, 1, fsdp=2))
    )
    jax.tree.map(np.testing.assert_array_equal, first, other)
    key = jax.random.fold_in(nnx.Rngs(7)(), 3)
    wanted = nnx.state(alone(key), nnx.Param)
    frontends.assert_trees_close(
        jax.tree.leaves(jax.tree.map(lambda w: w[3], first)), jax.tree.leaves(wanted)
    )


def test_names_of_stacked_dims_stand_in_front_and_weights_lie_where_they_say():
    row = Row(2, 2, 1, fsdp=2)
    pipeline = built(row)
    kernel = pipeline.layers.mlp.up.kernel
    stacked = ("circular_repeats", "layers")
    assert tuple(kernel.get_metadata()["out_sharding"]) == (*stacked, "embed", "mlp")
    value = kernel.get_value()
    assert value.sharding.shard_shape(value.shape) == (2, 1, frontends.EMBED // 2, frontends.MLP)
    logical = pipeline.get_weight_sharding()
    assert tuple(logical["mlp.up.kernel"]) == (*stacked, "embed", "mlp")
    assert tuple(logical["norm1.scale"]) == stacked  # names nothing


def test_dropout_differs_from_call_to_call_and_not_between_equal_pipelines():
    batch = CONFIG.batch()
    once, again = built(CONFIG), built(CONFIG)
    call = nnx.jit(lambda pipeline: pipeline(*batch))
    first, second = call(once), call(once)
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(call(again), first)


def test_what_layers_sow_comes_out_per_layer_and_microbatch_in_every_call_anew():
    row = Row(2, 2, 1, "delay")
    pipeline = built(row)
    batch = row.batch()
    for _ in range(2):
        nnx.jit(lambda pipeline: pipeline(*batch, deterministic=True))(pipeline)
        (hidden,) = pipeline.layers.mlp.hidden.get_value()
        assert hidden.shape == (2, 2, 4)  # [R, S, M]
    graph, params, rest = nnx.split(alone(0), nnx.Param, ...)
    del params
    true = np.zeros((4, 4))

    def layer(w, x, segments, positions, number, m):
        decoder: Any = nnx.merge(graph, w, rest, copy=True)
        y, _ = decoder(x, segments, positions, True, "train")
        jax.debug.callback(true.__setitem__, (number, m), decoder.mlp.hidden.get_value()[0])
        return y

    frontends.plain_loop(layer, row, nnx.state(pipeline.layers, nnx.Param), *batch)
    jax.effects_barrier()
    frontends.assert_trees_close(hidden.reshape(4, 4), true)
    left = nnx.pop(pipeline, nnx.Intermediate)

    @nnx.jit
    def captured(pipeline):
        return nnx.capture(pipeline, nnx.Intermediate)(*batch, deterministic=True)

    frontends.assert_trees_close(captured(pipeline)[1], left)
    assert not jax.tree.leaves(nnx.state(pipeline, nnx.Intermediate))


class Normed(nnx.Module):
    """Keeps running statistics, as no pipeline can while it trains."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x, segment_ids, positions, deterministic, model_mode):
        return self.norm(x, use_running_average=deterministic)


def test_running_statistics_are_read_and_not_written():
    pipeline = frontend.create_pipeline(CONFIG.config(), Normed, None)
    x = jax.random.normal(jax.random.key(0), (4, 3, 4))
    np.testing.assert_allclose(pipeline(x, deterministic=True), x, rtol=1e-4)
    with pytest.raises(ValueError, match=r"changes its variables \['norm.mean', 'norm.var'\]"):
        pipeline(x)


@pytest.mark.parametrize(
    ("fields", "message"), frontends.REFUSED.values(), ids=frontends.REFUSED.keys()
)
def test_a_config_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        frontend.create_pipeline(CONFIG.config(**fields), Decoder, None)


def test_the_gather_per_repeat_chooses_the_class():
    assert isinstance(built(CONFIG), frontend.Pipeline)
    assert isinstance(built(Row(2, 1, 1, "repeat")), frontend.CircularPipeline)
