"""What users do around a pipeline: NNX's jit, accumulated gradients, checkpoints."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxpipe as jp

D, V, L, B, T = 6, 10, 4, 8, 4


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def init() -> dict[str, Any]:
    layers = [{"up": normal(10 + i, D, V), "down": normal(20 + i, V, D)} for i in range(L)]
    return {"embed": normal(0, V, D), "layers": layers, "head": normal(1, D, V)}


def batch(step: int = 0) -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(step), (B, T + 1), 0, V)}


def embed(w: Any, batch: Any) -> Any:
    return w[batch["tokens"][:, :-1]]


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss(w: Any, x: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(batch["tokens"][:, 1:], V), axis=-1))


MODEL = jp.Model(embed, layer, loss)


def plain(params: Any, batch: Any) -> Any:
    x = embed(params["embed"], batch)
    for w in params["layers"]:
        x = layer(w, x, batch)
    return loss(params["head"], x, batch)


def pipeline(schedule: Any, sizes: Any = None, **options: Any) -> Any:
    sizes = sizes or {"stage": 2}
    count = int(np.prod(list(sizes.values())))
    mesh = jp.make_mesh(sizes, devices=jax.devices()[:count])
    return jp.pipeline(MODEL, schedule=schedule, mesh=mesh, microbatches=4, **options)


def close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def train(value_and_grad: Any, jit: Any, params: Any, tx: Any, steps: int = 4) -> Any:
    """Trains for some steps, each on a batch of its own."""

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    step, state, losses = jit(train_step), tx.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        for i in range(steps):
            params, state, value = step(params, state, batch(i))
            losses.append(float(value))
    return params, losses


def of_pipe(pipe: Any) -> Any:
    def value_and_grad(params: Any, batch: Any) -> Any:
        (value, _), grads = pipe.value_and_grad(params, batch)
        return value, grads

    return value_and_grad


@pytest.mark.parametrize(
    "schedule", ["circular", pytest.param("zero_bubble_h1", marks=pytest.mark.slow)]
)
def test_a_step_under_the_jit_of_nnx_is_that_of_the_plain_program(schedule: Any):
    """The state of the step is an NNX module, with the stored parameters in variables."""
    pipe = pipeline(schedule)
    tx = pipe.optimizer(optax.adam(1e-2))

    class State(nnx.Module):
        def __init__(self, params: Any):
            self.params = nnx.data(jax.tree.map(nnx.Param, params))
            self.optimizer = nnx.data(jax.tree.map(nnx.Variable, tx.init(params)))

    def values(tree: Any) -> Any:
        return jax.tree.map(lambda p: p.get_value(), tree, is_leaf=is_variable)

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    @nnx.jit
    def train_step(state: Any, batch: Any) -> Any:
        params = values(state.params)
        (value, _), grads = pipe.value_and_grad(params, batch)
        updates, new = tx.update(grads, values(state.optimizer), params)
        for tree, arrays in (
            (state.params, optax.apply_updates(params, updates)),
            (state.optimizer, new),
        ):
            jax.tree.map(lambda p, x: p.set_value(x), tree, arrays, is_leaf=is_variable)
        return value

    state = State(pipe.shard(init()))
    losses = [float(train_step(state, batch(i))) for i in range(4)]
    _, wanted = train(jax.value_and_grad(plain), jax.jit, init(), optax.adam(1e-2))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_a_train_step_compiles_once_also_after_a_restart(caplog: pytest.LogCaptureFixture):
    """Adam's count of steps begins on one device, uncommitted; Orbax restores it to one."""
    pipe = pipeline(None, {"stage": 2})
    tx, params = pipe.optimizer(optax.adam(1e-2)), pipe.shard(init())
    first = tx.init(params)
    restored = jax.tree.map(
        lambda x: x if x.shape else jax.device_put(x, jax.devices()[0]), tx.init(params)
    )

    @pipe.jit
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        (value, _), grads = pipe.value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    with jax.log_compiles(), jax.numpy_dtype_promotion("standard"):
        new, state, value = train_step(params, first, batch())
        train_step(new, state, batch())
        assert float(train_step(params, restored, batch())[2]) == float(value)
    done = [m for m in caplog.messages if "Finished XLA compilation of jit(train_step)" in m]
    assert len(done) == 1


def test_a_function_of_arrays_on_one_device_runs_there():
    pipe = pipeline(None, {"stage": 2})
    x = jax.device_put(jnp.ones(3), jax.devices()[1])
    assert pipe.jit(lambda x, scale: x * scale)(x, jnp.asarray(2.0)).devices() == x.devices()


def test_the_plain_program_gathers_weights_and_not_activations(capfd: pytest.CaptureFixture):
    """XLA warns where it copies an activation whole to every device, to come back to rows."""
    pipe = pipeline(None, {"stage": 2, "fsdp": 2})
    compiled = pipe.jit(pipe.value_and_grad).lower(pipe.shard(init()), batch()).compile()
    gathers = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    shapes = {re.findall(r"= \w+\[([\d,]*)\]", line)[0] for line in gathers}
    assert shapes == {f"{D},{V}", f"{V},{D}"}
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("gpipe", {"stage": 2, "fsdp": 2}),
        pytest.param("zbv", {"stage": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("circular", {"stage": 2, "data": 2}, marks=pytest.mark.slow),
    ],
)
def test_explicit_axes_divide_rows_and_parameters(schedule: str, sizes: Any):
    mesh = jp.make_mesh(sizes, devices=jax.devices()[:4], explicit=True)
    pipe = jp.pipeline(MODEL, schedule=schedule, mesh=mesh, microbatches=4)
    assert pipe.check(pipe.shard(init()), batch()).largest <= 1e-5


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_another_jit_around_programs_for_each_rank_is_refused(jit: Any):
    pipe = pipeline("1f1b", engine="mpmd")
    params = pipe.shard(init())
    with pytest.raises((ValueError, TypeError), match=r"`pipe\.jit`"):
        jit(lambda params, batch: pipe.value_and_grad(params, batch))(params, batch())
    with pytest.raises(ValueError, match=r"`pipe\.jit`"):
        jit(lambda batch: pipe.value_and_grad(params, batch))(batch())
    with pytest.raises(ValueError, match=r"`pipe\.jit`"):
        pipe.value_and_grad(params, batch())
    with pytest.raises(ValueError, match=r"`pipe\.jit`"):
        pipe.value(params, batch())


@pytest.mark.parametrize(
    ("schedule", "engine"),
    [("1f1b", "mpmd"), pytest.param("circular", "auto", marks=pytest.mark.slow)],
)
def test_accumulated_gradients_are_those_of_the_plain_program(schedule: str, engine: str):
    pipe = pipeline(schedule, engine=engine)
    tx = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)
    got, losses = train(of_pipe(pipe), pipe.jit, pipe.shard(init()), pipe.optimizer(tx))
    wanted, true = train(jax.value_and_grad(plain), jax.jit, init(), tx)
    np.testing.assert_allclose(losses, true, rtol=1e-5)
    close(pipe.unshard(got), wanted, 1e-4)  # Adam divides small gradients by their size


def test_a_checkpoint_in_the_users_tree_goes_into_another_schedule_and_mesh(tmp_path: Path):
    pipe = pipeline("circular", chunks=2)
    params = pipe.shard(init())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", pipe.unshard(params))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "params", jax.eval_shape(init))
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(init()), strict=True):
        np.testing.assert_array_equal(a, b)
    for other in (
        pipeline("zbv", {"stage": 2, "fsdp": 2}),
        pipeline("1f1b", {"stage": 4}, engine="mpmd"),
    ):
        for tree in (restored, pipe.unshard(params)):
            moved = other.unshard(other.shard(tree))
            jax.tree.map(np.testing.assert_array_equal, moved, init())


def test_a_checkpoint_as_stored_is_restored_shard_by_shard(tmp_path: Path):
    pipe = pipeline("1f1b", {"stage": 2, "fsdp": 2})
    params = pipe.shard(init())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        pipe.init(init),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "params", like)
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    (value, _), _ = pipe.jit(pipe.value_and_grad)(restored, batch())
    np.testing.assert_allclose(float(value), float(plain(init(), batch())), rtol=1e-5)
