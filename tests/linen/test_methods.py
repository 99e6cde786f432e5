"""The methods that MaxText documents, on a mesh of 2 ranks x 2 shards."""

import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from harness.frontends import Row, scalar
from jaxpipe import linen, sharding, xla
from jaxpipe import nnx as nnx_pipelines

KEY = jax.random.key(5)
ROW = Row(2, 2, 1, fsdp=2)
M, WIDTH = 4, 8


class Layer(nn.Module):
    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return inputs + jnp.tanh(inputs @ self.param("w", init, (WIDTH, WIDTH)))


def pipeline(fields: str = "", mesh=None, **more) -> tuple[Any, Any, Any]:
    config = Row(2, 2, 1, fields).config(num_pipeline_microbatches=M, **more)
    module: Any = linen.create_pipeline(config, Layer(), ROW.mesh() if mesh is None else mesh)
    x = jax.random.normal(KEY, (8, 3, WIDTH))
    return module, module.init(KEY, x), x


def shard(x: jax.Array) -> tuple[int, ...]:
    return x.sharding.shard_shape(x.shape)


def bound(fields: str = "", **more) -> tuple[Any, Any, Any]:
    module, variables, _ = pipeline(fields, **more)
    module = module.bind(variables)
    weights = module.stage_variables()
    specs = {"params": {"w": PartitionSpec("stage", "fsdp", None)}}
    return module, weights, specs


def test_iterations_are_counted_as_documented():
    plain, slow = pipeline()[0], pipeline("delay")[0]
    assert plain.iterations_to_complete_first_microbatch_one_repeat() == 1
    assert plain.iterations_to_complete_first_microbatch() == 5
    assert slow.iterations_to_complete_first_microbatch_one_repeat() == 2
    assert plain.need_circ_storage() and not slow.need_circ_storage()
    microbatches, repeats = plain.get_microbatch_and_repeat_ids(4)
    np.testing.assert_array_equal(microbatches, [0, 3])
    np.testing.assert_array_equal(repeats, [1, 0])


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_setup_gives_the_documented_attributes(framework):
    mesh = sharding.make_mesh({"stage": 2, "fsdp": 2}, devices=jax.devices()[:4], explicit=True)
    config = Row(2, 2, 1).config(
        num_pipeline_microbatches=M, micro_batch_size_to_train_on=8, shard_mode="explicit"
    )
    for where in (mesh, None):
        module: Any = (
            linen.create_pipeline(config, Layer(), where)
            if framework == "linen"
            else nnx_pipelines.create_pipeline(
                config, lambda rngs: nnx.Linear(2, 2, rngs=rngs), where
            )
        )
        sizes = module.num_stages, module.forwarding_delay, module.microbatches_per_stage
        assert sizes == (2, 1, 2) and module.pipeline_microbatch_size == 2
        assert module.use_circ_storage and module.remat_policy is None
        assert module.config is config
        names = ("activation_batch", "activation_length", "activation_embed")
        assert module.stages_in_logical == ("activation_stage", *names)
        assert module.state_io_logical == ("activation_stage", None, *names)
    assert module.stages_in_sharding is None and module.spmd_axis_name == "stage"
    explicit: Any = linen.create_pipeline(config, Layer(), mesh)
    rows, length = ("data", "fsdp", "expert"), "context"
    assert explicit.stages_in_spec == PartitionSpec("stage", rows, length, None)
    assert explicit.state_io_spec == PartitionSpec("stage", None, rows, length, None)
    assert explicit.state_io_sharding == NamedSharding(mesh, explicit.state_io_spec)
    assert explicit.input_sharding.spec == PartitionSpec(None, rows, length, None)
    assert explicit.output_sharding.spec == PartitionSpec(rows, length, None)
    assert explicit.spmd_axis_name is None


def test_the_remat_policy_is_one_for_jax_checkpoint(capsys):
    def saved(policy: Any) -> list[str]:
        def f(x):
            x = checkpoint_name(jnp.sin(x), "iteration_input")
            return jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x), "query_proj")) ** 3)

        print_saved_residuals(jax.checkpoint(f, policy=policy), jnp.ones(3))
        text = capsys.readouterr().out
        return [name for name in ("iteration_input", "query_proj") if f"'{name}'" in text]

    def of(**more):
        return pipeline(**more)[0].get_pipeline_remat_policy()

    assert saved(of()) == ["iteration_input"]
    assert saved(of(remat_policy="save_qkv_proj")) == ["iteration_input", "query_proj"]
    assert saved(of(remat_policy="custom", query_proj="device")) == ["query_proj"]


@pytest.mark.parametrize(("fields", "repeats", "microbatches"), [("", 2, 6), ("delay", 1, 6)])
def test_outputs_are_permuted_by_the_iterations_before_the_first(fields, repeats, microbatches):
    config = Row(2, repeats, 1, fields).config(num_pipeline_microbatches=microbatches)
    loop: Any = linen.create_pipeline(config, Layer(), None)
    config.pipeline_fsdp_ag_per_repeat = True
    window: Any = linen.create_pipeline(config, Layer(), None)
    state_io = jnp.arange(2 * 3 * 5).reshape(2, 3, 5)
    first = microbatches * (repeats - 1) + (2 if fields else 1)  # in which microbatch 0 leaves
    wanted = np.asarray(state_io)[:, [(first + i) % 3 for i in range(3)]]
    np.testing.assert_array_equal(loop.permute_output_micro_per_stage_dim(state_io), wanted)
    np.testing.assert_array_equal(window.realign_output_microbatches(state_io), wanted)


def test_states_have_the_documented_shapes():
    state = bound()[0].init_states(jnp.ones((M, 2, 3)))
    shapes = {name: getattr(x, "shape", None) for name, x in state.items()}
    assert shapes == {
        "state_io": (2, 2, 2, 3),
        "shift": (2, 2, 3),
        "prev_outputs": None,
        "circ_storage": (2, M, 2, 3),
        "circ_storage_mover": (2, 2, 3),
        "loop_iteration": (),
        "keys": None,
    }
    module, weights, _ = bound("repeat delay")
    assert module.init_states(jnp.ones((M, 2, 3)), weights)["bsw"].keys() == weights.keys()
    state = module.init_states(jnp.ones((M, 2, 3)))
    assert state["prev_outputs"].shape == (2, 2, 3) and state["circ_storage"] is None
    assert state["bsw"]["params"]["w"].shape == (2, 2, WIDTH, WIDTH)


def test_gathers_take_what_each_stage_asks_for():
    module, weights, specs = bound()
    w = weights["params"]["w"]
    ids = jnp.array([1, 0])
    taken = module.vmap_parallel_gather(weights, specs, ids, 0, 1)["params"]["w"]
    np.testing.assert_array_equal(taken, np.stack([w[1, 0], w[0, 1]]))
    assert shard(taken) == (1, WIDTH, WIDTH)
    swapped = jax.tree.map(lambda w: jnp.swapaxes(w, 0, 1), weights)
    same = module.vmap_parallel_gather(swapped, None, ids, 1, 0)["params"]["w"]
    np.testing.assert_array_equal(same, taken)
    xs = jnp.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(module.vmap_gather(xs, ids, 1), xs[:, ids])
    other = bound("repeat")[0]
    np.testing.assert_array_equal(other.gather_microbatch_inputs_vmap(xs, ids, 0), xs[ids])
    again = other.gather_weights_across_stages_vmap(weights, ids)["params"]["w"]
    np.testing.assert_array_equal(again, taken)
    current = module.get_current_stage_weights(weights, 4)["params"]["w"]
    np.testing.assert_array_equal(current, taken)


def test_weights_are_whole_where_they_are_said_to_be():
    module, weights, _ = bound()
    logical = module.get_weight_sharding()
    assert shard(weights["params"]["w"]) == (2, 1, WIDTH // 2, WIDTH)
    whole = module.all_gather_over_fsdp(weights, logical)["params"]["w"]
    assert shard(whole) == (2, 1, WIDTH, WIDTH)
    x = jnp.ones((2, 4, 6))
    assert shard(module.shard_dim_by_stages(x, 0)) == (1, 4, 6)
    spec = PartitionSpec(None, None, "fsdp")
    assert shard(module.shard_dim_by_stages(x, 0, spec)) == (1, 4, 3)
    assert shard(module.shard_dim_by_stages(x, 0, spec, is_stage_weight=True)) == (1, 4, 6)


@pytest.mark.parametrize("use_shardmap", [False, True])
def test_a_block_of_the_window_is_gathered_and_its_gradient_scattered(use_shardmap):
    module, weights, specs = bound("repeat")
    repeat = module.from_all_variables_to_repeat_weights(weights, M)
    np.testing.assert_array_equal(repeat["params"]["w"], weights["params"]["w"][1])

    def gather(w):
        return module.from_repeat_weights_to_bsw(w, specs, use_shardmap=use_shardmap)

    block, pull = jax.vjp(jax.jit(gather), repeat)
    assert shard(block["params"]["w"]) == (1, WIDTH, WIDTH)
    np.testing.assert_array_equal(block["params"]["w"], repeat["params"]["w"])
    (gradient,) = pull(block)
    np.testing.assert_array_equal(gradient["params"]["w"], repeat["params"]["w"])


def test_the_window_holds_the_repeats_that_ranks_are_in():
    module, weights, specs = bound("repeat")
    w = weights["params"]["w"]
    window = module.weight_prefetching(weights, specs, M - 1)
    assert window["params"]["w"].shape == (2, 2, WIDTH, WIDTH)
    active = module.fetch_active_stage_weights(window, M)["params"]["w"]
    np.testing.assert_array_equal(active, np.stack([w[1, 0], w[0, 1]]))
    active = module.fetch_active_stage_weights(window, M + 1)["params"]["w"]
    np.testing.assert_array_equal(active, w[1])


@pytest.mark.parametrize("when", ["tick", "once", "repeat"])
def test_the_call_gathers_weights_when_the_config_says(when):
    module, variables, x = pipeline("" if when == "tick" else when)
    text = jax.jit(module.apply).lower(variables, x).compile().as_text() or ""
    gathers = [site for site in xla.audit(text).sites if site.kind == "all-gather"]
    found = [(g.shape, g.executions) for g in gathers if g.shape.endswith(f"{WIDTH},{WIDTH}]")]
    of_a_repeat, of_all = f"f32[{WIDTH},{WIDTH}]", f"f32[2,{WIDTH},{WIDTH}]"
    if when == "tick":
        assert {shape for shape, _ in found} == {of_a_repeat}
        assert sum(executions for _, executions in found) > M  # and not one for each of 2 repeats
    else:
        assert found == [({"once": of_all, "repeat": of_a_repeat}[when], 1)]
    if when == "repeat":  # the first at once, and a part of the next in every tick
        part = f"f32[{WIDTH},1,{WIDTH // M}]"
        assert [g.executions for g in gathers if g.shape == part] == [2 * M + 1]


def test_weights_are_gathered_over_fsdp_transpose_too():
    mesh = jax.make_mesh((2, 2), ("stage", "fsdp_transpose"), (AxisType.Auto,) * 2)
    rules = [["layers", "stage"], ["embed", "fsdp_transpose"], ["mlp", None]]
    module, variables, x = pipeline("once", mesh, logical_axis_rules=rules)
    assert shard(nn.meta.unbox(variables)["params"]["layers"]["w"]) == (2, 1, WIDTH // 2, WIDTH)
    text = jax.jit(module.apply).lower(variables, x).compile().as_text() or ""
    gathers = [site for site in xla.audit(text).sites if site.kind == "all-gather"]
    assert (f"f32[2,{WIDTH},{WIDTH}]", 1) in [(g.shape, g.executions) for g in gathers]


def test_all_stages_are_made_and_run_at_once():
    module, _, x = pipeline()
    keys = {"params": jax.random.split(KEY, 2)}
    init = module.get_vmap_func_for_init()
    made = init(keys, x[:2], None, None, False, "train")
    made = nn.meta.unbox(made)["params"]["w"]
    assert made.shape == (2, WIDTH, WIDTH)
    xs = x[:4].reshape(2, 2, 3, WIDTH)
    run = module.get_main_vmap_func_for_iterations()
    y = jax.jit(lambda w: run(None, {"params": {"w": w}}, xs))(made)
    np.testing.assert_allclose(y, xs + jnp.tanh(xs @ made[:, None]), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("float64")  # of entries near zero float32 leaves few digits
def test_driven_by_hand_on_a_mesh_gradients_are_those_of_the_call():
    module, variables, x = pipeline("repeat")
    xs = x.reshape(M, 2, 3, WIDTH)

    def by_hand(variables):
        bound = module.bind(variables)
        weights, logical = bound.stage_variables(), bound.get_weight_sharding()
        specs = {"params": {"w": PartitionSpec("stage", "fsdp", None)}}
        state = bound.init_states(xs)
        for t in range(9):
            if t % M == 0:
                window = bound.weight_prefetching(weights, specs, t - 1)
            state = bound.run_one_iteration(state, window, logical_partition_spec=logical)
        return scalar(bound.realign_output_microbatches(state["state_io"]))

    got = jax.jit(jax.grad(by_hand))(variables)
    true = jax.jit(jax.grad(lambda v: scalar(module.apply(v, x).reshape(xs.shape))))(variables)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {"float64"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), got, true)


def test_another_layer_may_run_in_place_of_the_pipelines_own():
    class Doubles(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            return 2 * x

    module, weights, _ = bound()
    state = module.init_states(jnp.ones((M, 2, 3, WIDTH)))
    step = jax.jit(lambda s: module.run_one_iteration(s, weights, decoder_layer_instance=Doubles()))
    for _ in range(9):
        state = step(state)
    done = module.permute_output_micro_per_stage_dim(state["state_io"])
    np.testing.assert_array_equal(done, jnp.full((2, M // 2, 2, 3, WIDTH), 16.0))


@pytest.mark.usefixtures("float64")
def test_explicit_sharding_gives_the_same_numbers():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("stage", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    got = []
    for kind, more in ((None, {}), (mesh, {"shard_mode": "explicit"})):
        module, variables, x = pipeline(mesh=kind, **more)
        grad = jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(module.apply(v, x)))))  # noqa: B023
        with jax.set_mesh(ROW.mesh() if kind is None else kind):
            got.append(jax.device_get(nn.meta.unbox(grad(variables))))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {"float64"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), *got)


def test_the_type_of_the_mesh_must_suit_the_shard_mode():
    config = SimpleNamespace(ici_pipeline_parallelism=2, shard_mode="explicit")
    message = r"'explicit', but `mesh` has axes of another type: stage Auto.*explicit=True\)"
    with pytest.raises(ValueError, match=message):
        linen.create_pipeline(config, Layer(), ROW.mesh())
    mesh = sharding.make_mesh({"stage": 2, "fsdp": 2}, devices=jax.devices()[:4], explicit=True)
    with pytest.raises(
        ValueError, match=r"'auto', but .* fsdp Explicit.*or give `shard_mode` = 'exp"
    ):
        linen.create_pipeline(SimpleNamespace(), Layer(), mesh)


def test_a_mesh_without_ranks_or_with_others_is_refused():
    mesh = sharding.make_mesh({"stage": 4}, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"is 2 x 1, but the axis 'stage' of `mesh` has 4"):
        linen.create_pipeline(SimpleNamespace(ici_pipeline_parallelism=2), Layer(), mesh)
    with pytest.raises(ValueError, match="needs one that is named 'stage'"):
        plain = Mesh(np.array(jax.devices()[:2]), ("data",))
        linen.create_pipeline(SimpleNamespace(), Layer(), plain)


def test_debug_sharding_logs_how_every_weight_lies(caplog):
    module, variables, x = pipeline(debug_sharding=True)
    with caplog.at_level(logging.INFO, "jaxpipe"):
        jax.eval_shape(module.apply, variables, x)
    line = "params.w  float32[2, 2, 8, 8]  ('circular_repeats', 'layers', 'embed', 'mlp') -> (N"
    assert line in caplog.text and "-> (None, 'stage', " in caplog.text


def test_own_rules_say_where_weights_lie():
    rules = [["layers", "stage"], ["mlp", ["fsdp"]], ["mlp", []], ["embed", None]]
    _, variables, _ = pipeline(logical_axis_rules=rules)
    w = nn.meta.unbox(variables)["params"]["layers"]["w"]
    assert shard(w) == (2, 1, WIDTH, WIDTH // 2)
