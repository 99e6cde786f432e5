"""A user's own Linen decoder layer in a pipeline: the numbers of a loop over its layers."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import meta
from flax.linen import fp8_ops
from jax.sharding import AxisType, Mesh

from harness import frontends
from harness.frontends import Row
from jaxpipe import linen
from jaxpipe.schedules.builders import circular_ticks


def dense(width: int, name: str, axes: tuple[str, str]) -> nn.Dense:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
    return nn.Dense(width, use_bias=False, kernel_init=init, name=name)


class Decoder(nn.Module):
    """Attention and an MLP, with dropout; sows the mean of its hidden layer."""

    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        assert model_mode == "train"
        h = nn.RMSNorm(name="norm1")(inputs)
        q, k, v = (dense(frontends.EMBED, name, ("embed", "heads"))(h) for name in "qkv")
        mixed = frontends.attention(q, k, v, segment_ids, positions)
        x = inputs + dense(frontends.EMBED, "out", ("heads", "embed"))(mixed)
        h = nn.gelu(dense(frontends.MLP, "up", ("embed", "mlp"))(nn.RMSNorm(name="norm2")(x)))
        self.sow("metrics", "hidden", jnp.mean(h))
        h = nn.Dropout(0.2)(h, deterministic=deterministic)
        return x + dense(frontends.EMBED, "down", ("mlp", "embed"))(h), None


class Small(nn.Module):
    """A layer that compiles fast."""

    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        place = (segment_ids * positions)[..., None].astype(inputs.dtype)
        h = nn.Dense(frontends.EMBED, use_bias=False)(inputs + place)
        return inputs + nn.Dropout(0.2)(jnp.tanh(h), deterministic=deterministic)


class Stage(nn.Module):
    """Several layers, one after the other, as MaxText's decoder hands them in."""

    num_layers: int

    @nn.compact
    def __call__(self, inputs, *rest):
        for i in range(self.num_layers):
            inputs, _ = Decoder(name=f"layers_{i}")(inputs, *rest)
        return inputs, None


KEY = jax.random.key(7)


def stage_of(row: Row) -> nn.Module:
    return Decoder() if row.layers == 1 else Stage(row.layers)


def built(row: Row, stage: nn.Module | None = None) -> tuple[Any, Any]:
    """(pipeline, its variables)"""
    pipeline: Any = linen.create_pipeline(row.config(), stage or stage_of(row), row.mesh())
    return pipeline, jax.jit(pipeline.init)(KEY, *row.batch())


def true_outputs(row: Row, weights: Any, base: Any, *batch: Any) -> Any:
    """Without a pipeline. `base` is what the pipeline folds its dropout keys from."""

    def stage(w, x, segments, positions, number, m):
        key = jax.random.fold_in(jax.random.fold_in(base, number), m)
        rngs = {"dropout": key}
        return stage_of(row).apply(w, x, segments, positions, False, "train", rngs=rngs)[0]

    return frontends.plain_loop(stage, row, weights, *batch)


@pytest.mark.parametrize("row", frontends.EXACT, ids=str)
def test_loss_and_all_gradients_are_those_of_a_loop_over_the_layers(row):
    pipeline, variables = built(row)
    inputs, *batch_inputs = row.batch()
    dropout = {"dropout": jax.random.key(11)}
    base = pipeline.apply(variables, "dropout", method="make_rng", rngs=dropout)

    def loss(variables, inputs):
        return frontends.scalar(pipeline.apply(variables, inputs, *batch_inputs, rngs=dropout))

    def true_loss(variables, inputs):
        weights = {"params": meta.unbox(variables)["params"]["layers"]}
        return frontends.scalar(true_outputs(row, weights, base, inputs, *batch_inputs))

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, inputs)
    frontends.assert_trees_close(
        got, jax.jit(jax.value_and_grad(true_loss, (0, 1)))(variables, inputs)
    )


@pytest.mark.parametrize("row", frontends.BY_HAND, ids=str)
def test_driven_by_hand_it_gives_what_the_call_gives(row):
    inputs, segments, positions = row.batch()
    pipeline, variables = built(row, Small())
    dropout = {"dropout": jax.random.key(11)}
    wanted = jax.jit(lambda: pipeline.apply(variables, inputs, segments, positions, rngs=dropout))()
    xs, seg, pos = (
        x.reshape(row.microbatches, -1, *x.shape[1:]) for x in (inputs, segments, positions)
    )

    @jax.jit
    def step(state, weights):
        bound = pipeline.bind(variables)
        return bound.run_one_iteration(state, weights, pos, seg, False, "train")

    bound = pipeline.bind(variables, rngs=dropout)
    weights, state, M = bound.stage_variables(), bound.init_states(xs), row.microbatches
    in_use = weights
    for t in range(circular_ticks(row.ranks, row.repeats, M, 1 + ("delay" in row.fields))):
        if "repeat" in row.fields and t % M == 0:
            in_use = bound.weight_prefetching(weights, None, t - 1)
        state = step(state, in_use)
    done = (
        bound.realign_output_microbatches(state["state_io"])
        if isinstance(bound, linen.CircularPipeline)
        else bound.permute_output_micro_per_stage_dim(state["state_io"])
    )
    frontends.assert_trees_close(done.reshape(inputs.shape), wanted)


def test_a_layers_first_weights_depend_on_its_number_alone():
    flat = []
    for row in (Row(2, 2, 1), Row(4, 1, 1, fsdp=2)):
        flat.append(frontends.by_stage(row, meta.unbox(built(row, Small())[1])))
    jax.tree.map(np.testing.assert_array_equal, flat[0], flat[1])
    pipeline: Any = linen.create_pipeline(Row(2, 2, 1).config(), Small(), None)
    base = pipeline.apply({}, "params", method="make_rng", rngs={"params": KEY})
    x, segments, positions = (a[: frontends.ROWS] for a in Row(2, 2, 1).batch())
    alone = Small().init(jax.random.fold_in(base, 3), x, segments, positions, False, "train")
    third = jax.tree.map(lambda w: w[3], flat[0]["params"]["layers"])
    frontends.assert_trees_close(third, meta.unbox(alone["params"]))


def test_names_of_stacked_dims_stand_in_front_of_the_layers_own():
    row = Row(2, 2, 1)
    pipeline, variables = built(row)
    specs = nn.get_partition_spec(variables)["params"]["layers"]
    stacked = ("circular_repeats", "layers")
    assert tuple(specs["q"]["kernel"]) == (*stacked, "embed", "heads")
    logical = pipeline.get_weight_sharding(*row.batch())["params"]
    assert tuple(logical["down"]["kernel"]) == (*stacked, "mlp", "embed")
    assert tuple(logical["norm1"]["scale"]) == stacked  # has no box
    removed = linen.Pipeline.get_logical_spec_repeats_removed(logical)
    assert tuple(removed["up"]["kernel"]) == ("layers", "embed", "mlp")


def test_names_that_are_mesh_axes_stay_mesh_axes():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", None))
            return nn.Dense(4, kernel_init=init)(x)

    row = Row(2, 1, 1, fsdp=2)
    pipeline: Any = linen.create_pipeline(row.config(), Layer(), row.mesh())
    variables = pipeline.init(KEY, jnp.ones((4, 3, 4)))
    spec = nn.get_partition_spec(variables)["params"]["layers"]["Dense_0"]["kernel"]
    assert tuple(spec) == ("stage", "fsdp", None)


def test_what_layers_sow_comes_out_per_layer_and_microbatch():
    row = Row(2, 2, 1, "delay")
    pipeline, variables = built(row)
    assert set(variables) == {"params"}  # what is sown at `init` is not kept
    inputs, segments, positions = row.batch()

    def run(variables):
        return pipeline.apply(
            variables, inputs, segments, positions, deterministic=True, mutable=["metrics"]
        )

    _, sown = jax.jit(run)(variables)
    (hidden,) = sown["metrics"]["layers"]["hidden"]
    assert hidden.shape == (2, 2, 4)  # [R, S, M]
    weights = {"params": meta.unbox(variables)["params"]["layers"]}
    true = np.zeros((4, 4))

    def layer(w, x, segments, positions, number, m):
        (y, _), sown = Decoder().apply(
            w, x, segments, positions, True, "train", mutable=["metrics"]
        )
        jax.debug.callback(true.__setitem__, (number, m), sown["metrics"]["hidden"][0])
        return y

    frontends.plain_loop(layer, row, weights, inputs, segments, positions)
    jax.effects_barrier()
    frontends.assert_trees_close(hidden.reshape(4, 4), true)


def test_a_loss_that_is_sown_has_its_gradient():
    row = Row(2, 1, 1)
    pipeline, variables = built(row)

    def loss(variables):
        _, sown = pipeline.apply(variables, *row.batch(), deterministic=True, mutable=["metrics"])
        return jnp.sum(sown["metrics"]["layers"]["hidden"][0])

    grads = meta.unbox(jax.jit(jax.grad(loss))(variables))["params"]["layers"]
    assert np.abs(grads["up"]["kernel"]).min() >= 0 and np.abs(grads["up"]["kernel"]).max() > 0
    assert np.abs(grads["q"]["kernel"][0]).max() > 0
    assert np.abs(grads["down"]["kernel"][1]).max() == 0  # no layer comes after it


class Sowing(nn.Module):
    """Sows `of(hidden)`."""

    of: Any

    @nn.compact
    def __call__(self, x, *_):
        h = jnp.tanh(nn.Dense(frontends.EMBED)(x))
        self.sow("metrics", "sown", self.of(h))
        return x + h


def test_what_devices_sow_of_their_own_rows_is_added_up():
    def loss_and_sown(fields: str) -> Any:
        row = Row(2, 2, 1, fields, fsdp=2)
        pipeline: Any = linen.create_pipeline(row.config(), Sowing(jnp.sum), row.mesh())
        inputs, *_ = row.batch()

        def loss(variables):
            y, sown = pipeline.apply(variables, inputs, mutable=["metrics"])
            (of_layers,) = sown["metrics"]["layers"]["sown"]
            return frontends.scalar(y) + frontends.scalar(of_layers), of_layers

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(pipeline.init(KEY, inputs))

    frontends.assert_trees_close(loss_and_sown("rows"), loss_and_sown(""))


@pytest.mark.parametrize(
    ("of", "rngs", "message"),
    [
        (jnp.mean, {"dropout": KEY}, "and stages have random streams"),
        (lambda h: h[0], {}, r"The stage records .*'sown'.* of shape \(4, 16\), and with"),
    ],
    ids=["random numbers", "arrays"],
)
def test_devices_with_their_own_rows_refuse_what_concerns_all_rows(of, rngs, message):
    row = Row(2, 1, 1, "rows", fsdp=2)
    pipeline: Any = linen.create_pipeline(row.config(), Sowing(of), row.mesh())
    inputs, *_ = row.batch()
    variables = pipeline.init(KEY, inputs)
    with pytest.raises(ValueError, match=message):
        pipeline.apply(variables, inputs, rngs=rngs, mutable=["metrics"])


def test_batch_axes_must_be_of_the_mesh():
    row = Row(2, 1, 1, "rows", fsdp=2)
    with pytest.raises(ValueError, match=r"are no axes that `mesh` has .*It has data, fsdp, tens"):
        linen.create_pipeline(row.config(pipeline_batch_axes=("rows",)), Decoder(), row.mesh())
    with pytest.raises(ValueError, match="names an axis twice"):
        linen.create_pipeline(row.config(pipeline_batch_axes=("fsdp",) * 2), Decoder(), row.mesh())


@pytest.mark.parametrize(
    ("axes", "mesh_axes", "explicit", "message"),
    [
        (("tensor",), {"tensor": 2}, (), r"'Dense_0'.*over 'tensor', one of `pipeline_batch_axes`"),
        (("fsdp",), {"fsdp": 2, "tensor": 2}, ("tensor",), "over 'tensor', which is Explicit"),
    ],
)
def test_axes_that_stay_in_a_weight_can_be_neither_manual_nor_explicit(
    axes, mesh_axes, explicit, message
):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            return x + dense(frontends.EMBED, "Dense_0", ("embed", "mlp"))(x)

    sizes = {"stage": 2} | mesh_axes
    types = dict.fromkeys(sizes, AxisType.Auto)
    mode = "explicit" if explicit else "auto"
    if explicit:
        types |= dict.fromkeys(("stage", *axes, *explicit), AxisType.Explicit)
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))])
    mesh = Mesh(devices.reshape(*sizes.values()), (*sizes,), axis_types=(*types.values(),))
    config = Row(2, 1, 1).config(pipeline_batch_axes=axes, shard_mode=mode)
    pipeline: Any = linen.create_pipeline(config, Layer(), mesh)
    x = jnp.ones((4, 4, frontends.EMBED))
    with jax.set_mesh(mesh):
        variables = pipeline.init(KEY, x)
        with pytest.raises(ValueError, match=message):
            pipeline.apply(variables, x)


def test_arrays_may_be_split_into_microbatches_beforehand():
    row = Row(2, 2, 1, "rows", fsdp=2)
    pipeline: Any = linen.create_pipeline(row.config(), Small(), row.mesh())
    batch = row.batch()
    split = [x.reshape(row.microbatches, frontends.ROWS, *x.shape[1:]) for x in batch]
    call = partial(pipeline.apply, deterministic=True)
    variables = pipeline.init(KEY, *split, microbatched=True)
    y = jax.jit(partial(call, microbatched=True))(variables, *split)
    with pytest.raises(ValueError, match=r"`inputs` has dims \(4, 4, 16\). With `microbatched`"):
        call(variables, *batch, microbatched=True)
    frontends.assert_trees_close(y.reshape(batch[0].shape), jax.jit(call)(variables, *batch))


def test_any_pytree_may_be_the_activation_and_its_pairs_stay_pairs():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, inputs, *_):
            x, visits = inputs
            return nn.Dense(3)(x), visits + 1

    pipeline: Any = linen.create_pipeline(
        SimpleNamespace(ici_pipeline_parallelism=2), Layer(), None
    )
    inputs = (jnp.ones((4, 3)), jnp.zeros(4, jnp.int32))
    variables = pipeline.init(KEY, inputs)
    _, visits = pipeline.apply(variables, inputs)
    np.testing.assert_array_equal(visits, [2, 2, 2, 2])


class Fp8(nn.Module):
    """A matrix product in FP8: its scales are overwritten with their gradients."""

    @nn.compact
    def __call__(self, x, *_):
        cls = partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=2)
        return x + jnp.tanh(nn.Dense(8, dot_general_cls=cls)(x))


@pytest.mark.parametrize("row", [Row(2, 2, 1, fsdp=2), Row(2, 2, 1, "rows", fsdp=2)], ids=str)
def test_steps_in_fp8_take_the_largest_scale_of_the_microbatches_and_none_of_a_bubble(row):
    pipeline: Any = linen.create_pipeline(row.config(), Fp8(), row.mesh())
    rows = row.microbatches * frontends.ROWS
    x = jax.random.normal(KEY, (rows, 4, 8)) * jnp.linspace(1, 9, rows)[:, None, None]
    variables = pipeline.init(KEY, x)
    pipelined = jax.jit(jax.grad(lambda v: frontends.scalar(pipeline.apply(v, x))))

    layer: Any = Fp8()

    def microbatch_loss(weights, x, share):
        flat = frontends.by_stage(row, weights)
        y, _ = jax.lax.scan(lambda x, w: (layer.apply(w, x), None), x, flat)
        return jnp.sum(jnp.sin(y) * share)

    share = jnp.linspace(0.5, 1.5, x.size).reshape(row.microbatches, -1, *x.shape[1:])
    xs = x.reshape(share.shape)
    one_by_one = jax.jit(jax.vmap(jax.grad(microbatch_loss), (None, 0, 0)))
    name = fp8_ops.OVERWRITE_WITH_GRADIENT
    for _ in range(3):  # steps, each from the state that the pipeline's last one left
        got = pipelined(variables)
        each = one_by_one({name: of["layers"] for name, of in variables.items()}, xs, share)
        true = {"params": jax.tree.map(lambda g: jnp.sum(g, 0), each["params"])}
        true[name] = jax.tree.map(lambda g: jnp.max(g, 0), each[name])
        frontends.assert_trees_close({name: of["layers"] for name, of in got.items()}, true)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], got["params"])
        variables = {"params": params, name: got[name]}


class Normed(nn.Module):
    """Keeps running statistics, as no pipeline can while it trains."""

    @nn.compact
    def __call__(self, x, segment_ids, positions, deterministic, model_mode):
        return nn.BatchNorm(use_running_average=deterministic)(x)


def test_running_statistics_are_read_and_not_written():
    pipeline: Any = linen.create_pipeline(
        SimpleNamespace(ici_pipeline_parallelism=2), Normed(), None
    )
    x = jax.random.normal(KEY, (4, 3, 4))
    variables = pipeline.init(KEY, x)
    mean = variables["batch_stats"]["layers"]["BatchNorm_0"]["mean"]
    assert mean.shape == (2, 4)
    y = pipeline.apply(variables, x, deterministic=True)
    np.testing.assert_allclose(y, x, rtol=1e-4)
    with pytest.raises(ValueError, match=r"'batch_stats' is mutable.*next microbatch"):
        pipeline.apply(variables, x, mutable=["batch_stats"])
    with pytest.raises(
        ValueError, match=r"\"mean\" in .*next microbatch.*use_running_average=True"
    ) as caught:
        pipeline.apply(variables, x)
    assert ".." not in str(caught.value)


def test_a_cache_that_a_call_would_make_is_refused():
    class Caches(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            self.variable("cache", "last", lambda: x).value = x
            return nn.Dense(3)(x)

    pipeline: Any = linen.create_pipeline(
        SimpleNamespace(ici_pipeline_parallelism=2), Caches(), None
    )
    variables = pipeline.init(KEY, jnp.ones((2, 3)))
    variables = {"params": variables["params"]}
    with pytest.raises(ValueError, match="'cache' is mutable"):
        pipeline.apply(variables, jnp.ones((2, 3)), mutable=["cache"])


@pytest.mark.parametrize(
    ("fields", "message"), frontends.REFUSED.values(), ids=frontends.REFUSED.keys()
)
def test_a_config_that_cannot_work_is_refused(fields, message):
    config = SimpleNamespace(**{"ici_pipeline_parallelism": 2} | fields)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        linen.create_pipeline(config, Decoder(), None)


def test_a_batch_or_a_layer_that_does_not_fit_is_refused():
    config = SimpleNamespace(ici_pipeline_parallelism=2, micro_batch_size_to_train_on=4)
    pipeline: Any = linen.create_pipeline(config, nn.Dense(3), None)
    with pytest.raises(ValueError, match=r"`inputs` has 6 rows .*is 4"):
        pipeline.init(KEY, jnp.ones((6, 3)))

    class Wider(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            return nn.Dense(5)(x)

    pipeline: Any = linen.create_pipeline(config, Wider(), None)
    variables = pipeline.init(KEY, jnp.ones((4, 3)))
    with pytest.raises(ValueError, match=r"The stage was given .*\[2, 3\].* and returned"):
        pipeline.apply(variables, jnp.ones((4, 3)))


def test_the_gather_per_repeat_chooses_the_class():
    config = SimpleNamespace(ici_pipeline_parallelism=2)
    assert isinstance(linen.create_pipeline(config, Decoder(), None), linen.Pipeline)
    config.pipeline_fsdp_ag_per_repeat = True
    assert isinstance(linen.create_pipeline(config, Decoder(), None), linen.CircularPipeline)
