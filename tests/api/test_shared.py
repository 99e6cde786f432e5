"""Parameters that all layers share: loss and gradients are those of the plain program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp

D, V, L, B, T = 6, 10, 4, 8, 4


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def batch() -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(1), (B, T + 1), 0, V)}


def embed(w: Any, batch: Any) -> Any:
    return w[batch["tokens"][:, :-1]]


def loss(w: Any, x: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax((x * w["head"]) @ w["embed"].T)
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(batch["tokens"][:, 1:], V), axis=-1))


def biased_layer(w: Any, x: Any, batch: Any) -> Any:
    """Attention with one table of relative positions for all layers, as in T5."""
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    bias = w["shared"]["positions"][distance + T - 1] * w["shared"]["scale"]
    weights = jax.nn.softmax(x @ jnp.swapaxes(x, -1, -2) + bias)
    return x + jnp.tanh(weights @ x @ w["layer"]["mix"]), {"loss": 0.01 * jnp.mean(bias**2)}


def albert_layer(w: Any, x: Any, batch: Any) -> Any:
    """A layer without parameters of its own."""
    return x + jnp.tanh(x @ w["shared"]["up"]) @ w["shared"]["down"]


def biased() -> tuple[jp.Model, Any]:
    layers = [{"mix": normal(10 + i, D, D)} for i in range(L)]
    shared = {"positions": normal(2, 2 * T - 1), "scale": jnp.ones(())}
    params = {"embed": normal(0, V, D), "layers": layers, "head": jnp.ones(D), "shared": shared}
    return jp.Model(embed, biased_layer, loss, tied=True, shared=True), params


def albert() -> tuple[jp.Model, Any]:
    shared = {"up": normal(2, D, 2 * D), "down": normal(3, 2 * D, D)}
    params = {"embed": normal(0, V, D), "layers": [{}] * L, "head": jnp.ones(D), "shared": shared}
    return jp.Model(embed, albert_layer, loss, tied=True, shared=True), params


def plain(model: Any, params: Any, batch: Any) -> Any:
    """The program that a user would write without a pipeline."""
    x, extra = embed(params["embed"], batch), 0.0
    for w in params["layers"]:
        given = {"layer": w, "shared": params["shared"]}
        if model.layer.__name__ == "albert_layer":
            x = albert_layer(given, x, batch)
        else:
            x, aux = biased_layer(given, x, batch)
            extra = extra + aux["loss"]
    return loss({"head": params["head"], "embed": params["embed"]}, x, batch) + extra


def pipeline(model: Any, schedule: Any, sizes: Any, **options: Any) -> Any:
    count = int(np.prod(list(sizes.values())))
    mesh = jp.make_mesh(sizes, devices=jax.devices()[:count])
    return jp.pipeline(model, schedule=schedule, mesh=mesh, microbatches=4, **options)


def close(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


MPMD = {"engine": "mpmd"}
ROWS = {
    "unpipelined": (biased, None, {"stage": 1}, {}),
    "circular": (biased, "circular", {"stage": 2}, {"chunks": 2}),
    "zero bubble, fsdp": (albert, "zero_bubble_h1", {"stage": 2, "fsdp": 2}, {}),
    "mpmd, interleaved": (biased, "interleaved_1f1b", {"stage": 2}, MPMD),
    "circular, uneven": (albert, "circular", {"stage": 2}, {"layers_per_stage": (3, 1)}),
    "dualpipe, uneven": (albert, "dualpipe", {"stage": 2}, {"layers_per_stage": (3, 1)}),
    "mpmd, dualpipe": (biased, "dualpipe", {"stage": 2, "fsdp": 2}, MPMD),
    "zbv": (biased, "zbv", {"stage": 2, "data": 2}, {}),
    "mpmd, uneven": (albert, "1f1b", {"stage": 2, "fsdp": 2}, MPMD | {"layers_per_stage": (3, 1)}),
}
QUICK = ("zero bubble, fsdp", "mpmd, uneven")


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=() if r in QUICK else pytest.mark.slow) for r in ROWS]
)
def test_loss_and_gradients_are_those_of_the_plain_program(row: str):
    make, schedule, sizes, options = ROWS[row]
    model, params = make()
    pipe = pipeline(model, schedule, sizes, **options)
    stored = pipe.shard(params)
    assert [leaf.shape for leaf in jax.tree.leaves(stored["shared"])] == [
        leaf.shape for leaf in jax.tree.leaves(params["shared"])
    ]
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch))
    (value, _), grads = step(stored, batch())
    wanted = jax.value_and_grad(lambda params: plain(model, params, batch()))(params)
    close((float(value), pipe.unshard(grads)), wanted)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), MPMD], ids=["scheduled", "mpmd"]
)
def test_three_steps_of_adam_are_those_of_the_plain_program(options: Any):
    model, params = biased()
    pipe, tx = pipeline(model, "1f1b", {"stage": 2}, **options), optax.adam(1e-2)
    stored_tx = pipe.optimizer(tx)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        (value, _), grads = pipe.value_and_grad(params, batch)
        updates, state = stored_tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def plain_step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda params: plain(model, params, batch))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def run(step: Any, tx: Any, params: Any) -> Any:
        state, losses = tx.init(params), []
        with jax.numpy_dtype_promotion("standard"):
            for _ in range(3):
                params, state, value = step(params, state, batch())
                losses.append(float(value))
        return params, losses

    got, losses = run(pipe.jit(train_step), stored_tx, pipe.shard(params))
    wanted, true = run(jax.jit(plain_step), tx, params)
    np.testing.assert_allclose(losses, true, rtol=1e-5)
    np.testing.assert_allclose(
        np.asarray(pipe.unshard(got)["shared"]["positions"]),
        np.asarray(wanted["shared"]["positions"]),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", ["zbv", "mpmd"])
def test_shared_parameters_may_be_frozen(row: str):
    model, params = biased()
    options = MPMD if row == "mpmd" else {}
    schedule = "1f1b" if row == "mpmd" else row
    frozen = lambda path, leaf: "positions" in path  # noqa: E731
    pipe = pipeline(model, schedule, {"stage": 2}, frozen=frozen, **options)
    stored = pipe.shard(params)
    assert pipe.partition(stored)[1]["shared"]["scale"] is None
    pipe.check(stored, batch())
    (_, _), grads = pipe.jit(pipe.value_and_grad)(stored, batch())
    wanted = jax.grad(lambda params: plain(model, params, batch()))(params)
    wanted["shared"]["positions"] = None
    close(pipe.unshard(grads), wanted)


def test_parameters_of_another_form_are_refused():
    model, params = biased()
    pipe = pipeline(model, "1f1b", {"stage": 2})
    with pytest.raises(ValueError, match="'shared', 'embed', 'layers' and 'head'"):
        pipe.shard({name: tree for name, tree in params.items() if name != "shared"})
    pipe = pipeline(jp.Model(embed, albert_layer, loss, tied=True), "1f1b", {"stage": 2})
    with pytest.raises(ValueError, match=r"`Model\(shared=True\)`"):
        pipe.shard(params)
