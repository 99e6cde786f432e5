"""Methods that MaxText documents, overridden in a subclass: the pipeline's call runs them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from harness import frontends
from harness.frontends import Row
from jaxpipe import linen, sharding
from jaxpipe import nnx as nnx_pipelines
from jaxpipe.compat.maxtext._method_loop import overridden_methods

KEY, WIDTH, M = jax.random.key(2), 8, 4

BASE = (
    "need_circ_storage",
    "iterations_to_complete_first_microbatch_one_repeat",
    "get_iteration_inputs",
    "get_microbatch_and_repeat_ids",
    "get_pipeline_remat_policy",
    "get_main_vmap_func_for_iterations",
    "init_states",
    "run_one_iteration",
    "iterations_to_complete_first_microbatch",
    "shard_dim_by_stages",
    "vmap_parallel_gather",
    "vmap_gather",
    "get_new_loop_state",
    "permute_output_micro_per_stage_dim",
)
LOOP = (
    *BASE,
    "get_current_stage_weights",
    "get_current_repeat_from_stages",
)
WINDOW = (
    *BASE,
    "gather_weights_across_stages_vmap",
    "gather_microbatch_inputs_vmap",
    "advance_circular_buffers",
    "realign_output_microbatches",
    "fetch_active_stage_weights",
    "get_current_weights_from_bsw",
    "from_all_variables_to_repeat_weights",
    "from_repeat_weights_to_bsw",
    "weight_prefetching",
)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        h = jnp.tanh(inputs @ self.param("w", init, (WIDTH, WIDTH)))
        self.sow("intermediates", "mean", jnp.mean(h))
        h = nn.Dropout(0.5)(h, deterministic=deterministic)
        return inputs + h if positions is None else inputs + h * positions[..., None]


class NNXLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.w = nnx.Param(init(rngs.params(), (WIDTH, WIDTH)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        h = jnp.tanh(inputs @ self.w)
        self.sow(nnx.Intermediate, "mean", jnp.mean(h))
        return inputs + self.dropout(h, deterministic=deterministic)


def counting(kind: type, names: tuple[str, ...], calls: dict[str, int]) -> Any:
    """A subclass whose methods count their calls and do what they did."""

    def wrapped(name: str) -> Any:
        def method(self, *arguments, **more):
            calls[name] = calls.get(name, 0) + 1
            return getattr(super(counted, self), name)(*arguments, **more)

        return method

    counted: Any = type("Counted", (kind,), {name: wrapped(name) for name in names})
    return counted


def with_gradients(module: Any, variables: Any, x: jax.Array, positions: jax.Array) -> Any:
    def loss(variables, x):
        y, sown = module.apply(
            variables,
            x,
            None,
            positions,
            rngs={"dropout": KEY},
            mutable=["intermediates"],
        )
        return frontends.scalar(y), sown

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    return nn.meta.unbox(run(variables, x))


CASES = [
    Row(2, 2, 1, fsdp=2),
    Row(3, 2, 1, "delay"),
    Row(2, 2, 1, "once flat", fsdp=2),
    Row(2, 3, 1, "repeat", fsdp=2),
    Row(2, 1, 1, "repeat unrolled remat"),
    pytest.param(Row(2, 1, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("row", CASES, ids=str)
def test_methods_that_are_wrapped_are_called_and_give_what_the_call_gives(row):
    plain: Any = linen.CircularPipeline if "repeat" in row.fields else linen.Pipeline
    names = WINDOW if "repeat" in row.fields else LOOP
    config, calls = row.config(num_pipeline_microbatches=2 * row.microbatches), {}
    module = plain(config, Layer(), row.mesh())
    x = jax.random.normal(KEY, (4 * row.microbatches, 3, WIDTH))
    positions = jnp.linspace(0.5, 1.5, x.size // WIDTH).reshape(x.shape[:2])
    variables = module.init(KEY, x)
    counted = counting(plain, names, calls)(config, Layer(), row.mesh())
    got = with_gradients(counted, variables, x, positions)
    skipped = {"get_pipeline_remat_policy"} if "remat" in row.fields else set()
    if row.repeats == 1:  # as in MaxText: all weights are of the one repeat
        skipped |= {
            "gather_weights_across_stages_vmap",
            "get_current_repeat_from_stages",
            "vmap_parallel_gather",
        }
    assert {*calls} == {*names} - skipped
    frontends.assert_trees_close(got, with_gradients(module, variables, x, positions))


def test_an_overridden_method_changes_the_loss():
    class Doubled(linen.Pipeline):
        def get_iteration_inputs(self, loop_iteration, state_io, circ_storage, shift):
            return 2 * super().get_iteration_inputs(loop_iteration, state_io, circ_storage, shift)

    class Scale(nn.Module):
        @nn.compact
        def __call__(self, inputs, *_):
            return inputs * self.param("scale", nn.initializers.constant(3.0), ())

    config = Row(2, 2, 1).config(num_pipeline_microbatches=M)
    x = jnp.ones((M, 2))
    for kind, factor in ((linen.Pipeline, 3.0), (Doubled, 6.0)):
        module: Any = kind(config, Scale(), None)
        variables = module.init(KEY, x)
        value, gradient = jax.value_and_grad(lambda v: jnp.sum(module.apply(v, x)))(variables)  # noqa: B023
        np.testing.assert_allclose(value, x.size * factor**4)
        np.testing.assert_allclose(
            gradient["params"]["layers"]["scale"], jnp.full((2, 2), x.size * factor**4 / 3)
        )


def test_an_overridden_gather_of_weights_and_state_change_what_they_say():
    class Scaled(linen.Pipeline):
        def get_current_stage_weights(self, pipeline_weights, loop_iteration, specs=None):
            weights = super().get_current_stage_weights(pipeline_weights, loop_iteration, specs)
            return jax.tree.map(lambda w: 0 * w, weights)

    class Frozen(linen.Pipeline):
        def get_new_loop_state(self, output, loop_state):
            return super().get_new_loop_state(jax.tree.map(jnp.zeros_like, output), loop_state)

    config = Row(2, 2, 1).config(num_pipeline_microbatches=M)
    x = jax.random.normal(KEY, (M, 3, WIDTH))
    variables = linen.Pipeline(config, Layer(), None).init(KEY, x)
    for kind, wanted in ((Scaled, x), (Frozen, jnp.zeros_like(x))):
        y = kind(config, Layer(), None).apply(variables, x, deterministic=True)
        np.testing.assert_array_equal(y, wanted)


def test_without_an_override_no_method_of_the_loop_runs(monkeypatch):
    config = Row(2, 2, 1).config(num_pipeline_microbatches=M)
    x = jax.random.normal(KEY, (M, 3, WIDTH))
    module: Any = linen.create_pipeline(config, Layer(), None)
    variables = module.init(KEY, x)
    assert overridden_methods(module) == ()
    assert overridden_methods(linen.CircularPipeline(config, Layer(), None)) == ()
    calls: dict[str, int] = {}
    original = linen.Pipeline.run_one_iteration

    def wrapped(self, *arguments, **more):
        calls["run_one_iteration"] = calls.get("run_one_iteration", 0) + 1
        return original(self, *arguments, **more)

    wanted = module.apply(variables, x, deterministic=True)
    monkeypatch.setattr(linen.Pipeline, "run_one_iteration", wrapped)
    assert overridden_methods(module) == ("run_one_iteration",)
    np.testing.assert_allclose(module.apply(variables, x, deterministic=True), wanted, rtol=1e-6)
    assert calls


@pytest.mark.parametrize("deterministic", [False, True])
def test_methods_of_nnx_are_called_too_and_draw_the_same_keys(deterministic):
    row, calls = Row(2, 2, 1, fsdp=2), {}
    config = row.config(num_pipeline_microbatches=M)
    x = jax.random.normal(KEY, (8, 3, WIDTH))
    results = []
    for kind in (nnx_pipelines.Pipeline, counting(nnx_pipelines.Pipeline, LOOP, calls)):
        pipeline = kind(config, NNXLayer, row.mesh(), rngs=nnx.Rngs(0))

        @nnx.jit
        def run(pipeline, x):
            def loss(pipeline):
                y, sown = nnx.capture(pipeline, nnx.Intermediate)(x, None, None, deterministic)
                return frontends.scalar(y), nnx.to_pure_dict(sown)

            return nnx.value_and_grad(loss, has_aux=True)(pipeline)

        (value, sown), gradients = run(pipeline, x)
        results.append(jax.device_get((value, sown, nnx.to_pure_dict(gradients))))
        (counts,) = jax.tree.leaves(nnx.to_pure_dict(nnx.state(pipeline, nnx.RngCount)))
        np.testing.assert_array_equal(counts, jnp.full((2, 2), 0 if deterministic else 1))
    frontends.assert_trees_close(results[1], results[0])
    assert {*calls} == {*LOOP} - {"vmap_gather"}  # there are no positions


def test_explicit_axes_run_overridden_methods():
    mesh = sharding.make_mesh({"stage": 2, "fsdp": 2}, devices=jax.devices()[:4], explicit=True)
    config = Row(2, 2, 1).config(num_pipeline_microbatches=M, shard_mode="explicit")
    x, calls = jax.random.normal(KEY, (8, 3, WIDTH)), {}
    results = []
    for kind in (linen.Pipeline, counting(linen.Pipeline, LOOP, calls)):
        module = kind(config, Layer(), mesh)
        variables = module.init(KEY, x)
        run = jax.jit(lambda v, x: module.apply(v, x, deterministic=True))  # noqa: B023
        results.append(jax.device_get(run(variables, x)))
    frontends.assert_trees_close(results[1], results[0])


def test_what_methods_cannot_run_is_refused():
    row = Row(2, 1, 1, "rows", fsdp=2)
    module = counting(linen.Pipeline, ("vmap_gather",), {})(row.config(), Layer(), row.mesh())
    x = jax.random.normal(KEY, (4, 3, WIDTH))
    variables = module.init(KEY, x)
    with pytest.raises(ValueError, match="`vmap_gather` is overridden and `pipeline_batch_axes`"):
        module.apply(variables, x, deterministic=True)
