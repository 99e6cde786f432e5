"""Prints, callbacks, and gradients of what functions close over: done right or refused by name."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxpipe as jp
from jaxpipe import autodiff

D, L, M = 4, 4, 4
ROWS = {
    "unpipelined": (None, {}),
    "circular": ("circular", {}),
    "scheduled": ("1f1b", {}),
    "mpmd": ("1f1b", {"engine": "mpmd"}),
}
ONE_PROGRAM = ("circular", "scheduled")


def params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), L + 2)
    layers = [jax.random.normal(key, (D, D)) / D for key in keys[2:]]
    head = jax.random.normal(keys[1], (D,))
    return {"embed": jax.random.normal(keys[0], (D, D)), "layers": layers, "head": head}


def batch() -> dict[str, jax.Array]:
    return {"x": jax.random.normal(jax.random.key(1), (4 * M, D)), "y": jnp.arange(4.0 * M)}


def embed(w: Any, batch: Any) -> Any:
    return batch["x"] @ w


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w)


def loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean((x @ w - batch["y"]) ** 2)


FUNCTIONS = {"embed": embed, "layer": layer, "loss": loss}


def model(**changes: Callable) -> jp.Model:
    functions: dict[str, Any] = FUNCTIONS | changes
    return jp.Model(**functions)


def pipeline(model: Any, row: str, mesh: Any = None, **options: Any) -> Any:
    schedule, more = ROWS[row]
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2]) if mesh is None else mesh
    return jp.pipeline(model, schedule=schedule, mesh=mesh, microbatches=M, **more, **options)


def showing(name: str, seen: Counter) -> dict[str, Callable]:
    """Returns one function of the model, which also calls back."""
    function = FUNCTIONS[name]

    def show(*arguments: Any) -> Any:
        array = arguments[1]["x"] if name == "embed" else arguments[1]
        jax.debug.callback(lambda x: seen.update([float(x)]), jnp.sum(array))
        return function(*arguments)

    # The front door reads the signature.
    if name == "embed":
        return {name: lambda w, batch: show(w, batch)}
    return {name: lambda w, x, batch: show(w, x, batch)}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("row", ["unpipelined", "mpmd"])
def test_a_print_shows_every_layer_and_microbatch_once(row: str, name: str):
    seen: Counter = Counter()
    pipe = pipeline(model(**showing(name, seen)), row, remat=autodiff.keep)
    jax.block_until_ready(
        jax.tree.leaves(pipe.jit(pipe.value_and_grad)(pipe.shard(params()), batch()))
    )
    jax.effects_barrier()
    assert len(seen) == (L * M if name == "layer" else M)
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("row", ONE_PROGRAM)
def test_a_print_in_one_program_is_refused_with_what_can_print(row: str, name: str):
    pipe = pipeline(model(**showing(name, Counter())), row)
    stored = pipe.shard(params())
    match = f"`{name}` calls `jax.debug.callback`, .* '{row}' .*try it with `engine='mpmd'`"
    for f in (pipe.value, pipe.value_and_grad):
        with pytest.raises(ValueError, match=match):
            pipe.jit(f)(stored, batch())


@pytest.mark.parametrize("row", ["circular", "scheduled", "mpmd"])
def test_a_callback_that_must_run_once_is_refused(row: str):
    def counting(w: Any, x: Any, batch: Any) -> Any:
        return io_callback(lambda x: x, jax.typeof(x), layer(w, x, batch))

    pipe = pipeline(model(layer=counting), row)
    with pytest.raises(ValueError, match=r"`layer` calls `jax.experimental.io_callback`"):
        pipe.jit(pipe.value_and_grad)(pipe.shard(params()), batch())


@pytest.mark.parametrize("row", ROWS)
def test_a_pure_callback_runs_or_the_mesh_is_named(row: str):
    def on_host(x: Any) -> Any:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.tanh, result, x, vmap_method="sequential")

    def calling(w: Any, x: Any, batch: Any) -> Any:
        return layer(w, x, batch) + jax.lax.stop_gradient(on_host(jax.lax.stop_gradient(x)))

    def plain(params: Any) -> Any:
        x = embed(params["embed"], batch())
        for w in params["layers"]:
            x = layer(w, x, batch()) + jax.lax.stop_gradient(jnp.tanh(x))
        return loss(params["head"], x, batch())

    def run(mesh: Any) -> Any:
        pipe = pipeline(model(layer=calling), row, mesh)
        value, grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params()), batch())
        return float(value[0]), pipe.unshard(grads)

    wanted = jax.value_and_grad(plain)(params())
    for a, b in zip(
        jax.tree.leaves(run(jax.sharding.Mesh(jax.devices()[:2], ("stage",)))),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-5 * np.abs(b).max()
    if row in ONE_PROGRAM:
        with pytest.raises(ValueError, match=r"`layer` calls `jax.pure_callback`, and `mesh` has"):
            run(None)


def scaled(scale: Any, name: str) -> jp.Model:
    """Returns the model, of which one function closes over an array."""
    if name == "embed":
        return model(embed=lambda w, batch: embed(w, batch) * scale)
    if name == "layer":
        return model(layer=lambda w, x, batch: x + jnp.tanh(x @ w) * scale)
    return model(loss=lambda w, x, batch: loss(w, x, batch) * scale)


def plain_of_scale(name: str) -> Callable:
    def plain(scale: Any) -> Any:
        own = scaled(scale, name)
        x = own.embed(params()["embed"], batch(), ())
        for w in params()["layers"]:
            x = own.layer(w, x, batch(), ())  # pyright: ignore[reportCallIssue]
        return own.loss(params()["head"], x, batch(), ())

    return plain


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("row", ["unpipelined", pytest.param("circular", marks=pytest.mark.slow)])
def test_a_gradient_by_what_a_function_closes_over_is_right(row: str, name: str):
    stored = pipeline(model(), row).shard(params())

    def value(scale: Any) -> Any:
        return pipeline(scaled(scale, name), row).value(stored, batch())[0]

    wanted = jax.value_and_grad(plain_of_scale(name))(jnp.float32(1.5))
    for f in (value, jax.jit(value)):
        got = jax.value_and_grad(f)(jnp.float32(1.5))
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("row", ["circular", "scheduled", "mpmd"])
def test_a_gradient_inside_a_step_by_what_a_function_closes_over_is_refused(row: str, name: str):
    outer = pipeline(model(), row)

    def step(stored: Any, scale: Any, batch: Any) -> Any:
        def value(scale: Any) -> Any:
            return pipeline(scaled(scale, name), row).value(stored, batch)[0]

        return jax.value_and_grad(value)(scale)

    with pytest.raises(ValueError, match="differentiated") as error:
        outer.jit(step)(outer.shard(params()), jnp.float32(1.5), batch())
    assert "treduce" not in str(error.value)


@pytest.mark.parametrize("f", ["value", "value_and_grad"])
@pytest.mark.parametrize("row", ["scheduled", "mpmd"])
def test_differentiating_a_schedule_is_refused_and_does_not_hang(row: str, f: str):
    pipe = pipeline(model(), row)
    stored = pipe.shard(params())

    def first(stored: Any, batch: Any) -> Any:
        return jax.tree.leaves(getattr(pipe, f)(stored, batch))[0]

    with pytest.raises(ValueError, match=r"second result of `(pipe\.)?value_and_grad`"):
        pipe.jit(jax.grad(first))(stored, batch())


def test_a_loop_around_a_step_of_mpmd_speaks_of_the_front_door():
    pipe = pipeline(model(), "mpmd")
    stored = pipe.shard(params())

    def until(stored: Any, batch: Any) -> Any:
        return jax.lax.while_loop(
            lambda x: x < 1, lambda x: x + pipe.value(stored, batch)[0], jnp.zeros(())
        )

    with pytest.raises(ValueError, match=r"`value` is called inside `lax.while_loop`") as error:
        pipe.jit(until)(stored, batch())
    assert "treduce" not in str(error.value)
    step = pipe.jit(lambda stored, x: pipe.value(stored, x)[0])
    step(stored, batch())
    with pytest.raises(ValueError, match=r"is called inside of `jax.jit`, `jax.grad` or"):
        jax.jit(lambda x: step(stored, x))(batch())
