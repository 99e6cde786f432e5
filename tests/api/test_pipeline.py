"""One model under every engine: its loss and gradients are those of the plain program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe import engines, schedules

D, V, L, B, T = 8, 12, 6, 16, 4
RATE = 0.25


def init(num_layers: int = L) -> dict[str, Any]:
    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-1] ** 0.5

    keys = jax.random.split(jax.random.key(0), num_layers + 2)
    layers = [{"up": normal(k, D, V), "down": normal(k, V, D)} for k in keys[2:]]
    return {"embed": normal(keys[0], V, D), "layers": layers, "head": {"scale": jnp.ones(D)}}


def batch() -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(1), (B, T + 1), 0, V)
    weights = jax.random.bernoulli(jax.random.key(2), 0.7, (B, T))
    return {"tokens": tokens, "weights": weights.astype(jnp.float32)}


def embed(w: Any, batch: Any) -> Any:
    return w[batch["tokens"][:, :-1]]


def layer(w: Any, x: Any, batch: Any) -> Any:
    h = jnp.tanh(x @ w["up"]) @ w["down"]
    return x + h, {"size": jnp.mean(h * h), "loss": 0.01 * jnp.mean(h * h)}


def dropout_layer(w: Any, x: Any, batch: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 1 - RATE, x.shape)
    return layer(w, jnp.where(kept, x / (1 - RATE), jnp.zeros_like(x)), batch)[0]


def token_losses(w: Any, x: Any, batch: Any) -> jax.Array:
    logits = jax.nn.log_softmax((x * w["head"]["scale"]) @ w["embed"].T)
    targets = jax.nn.one_hot(batch["tokens"][:, 1:], V)
    return -jnp.sum(logits * targets, axis=-1)


def mean_loss(w: Any, x: Any, batch: Any) -> Any:
    losses = token_losses(w, x, batch)
    return jnp.mean(losses), {"largest": jnp.mean(jnp.max(losses, axis=-1))}


def weighted_loss(w: Any, x: Any, batch: Any) -> Any:
    losses = token_losses(w, x, batch) * batch["weights"]
    return jp.Weighted(jnp.sum(losses), jnp.sum(batch["weights"]))


MEAN = jp.Model(embed, layer, mean_loss, tied=True)
WEIGHTED = jp.Model(embed, dropout_layer, weighted_loss, tied=True)


def plain(params: Any, batch: Any) -> Any:
    """The program that a user would write without a pipeline."""
    x, extra, size = embed(params["embed"], batch), 0.0, 0.0
    for w in params["layers"]:
        x, aux = layer(w, x, batch)
        extra, size = extra + aux["loss"], size + aux["size"]
    loss, metrics = mean_loss({"head": params["head"], "embed": params["embed"]}, x, batch)
    return loss + extra, metrics | {"size": size}


def mesh(**sizes: int) -> Any:
    count = int(np.prod(list(sizes.values())))
    return jp.make_mesh(sizes, devices=jax.devices()[:count])


def close(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def run(pipe: Any, params: Any, key: Any = None) -> tuple[Any, Any]:
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    value, grads = step(pipe.shard(params), batch())
    return jax.tree.map(float, value), pipe.unshard(grads)


ROWS = {
    "unpipelined": (None, {"stage": 2}, {}),
    "circular": ("circular", {"stage": 2}, {"chunks": 3}),
    "circular, data and fsdp": ("circular", {"stage": 2, "data": 2, "fsdp": 2}, {}),
    "1f1b, uneven": ("1f1b", {"stage": 4}, {}),
    "zero bubble, a layout": ("zero_bubble_h1", {"stage": 3}, {"layers_per_stage": "Et|t*3|t*2L"}),
    "zbv, fsdp": ("zbv", {"stage": 2, "fsdp": 4}, {}),
    "dualpipe, uneven, fsdp": ("dualpipe", {"stage": 4, "fsdp": 2}, {"microbatches": 8}),
    "mpmd, dualpipe": ("dualpipe", {"stage": 2}, {"engine": "mpmd"}),
    "mpmd, interleaved": ("interleaved_1f1b", {"stage": 2}, {"engine": "mpmd"}),
    "mpmd, uneven, fsdp": ("1f1b", {"stage": 4, "fsdp": 2}, {"engine": "mpmd"}),
}


@pytest.mark.parametrize("row", ROWS)
def test_loss_and_gradients_are_those_of_the_plain_program(row: str):
    schedule, sizes, options = ROWS[row]
    options = {"microbatches": 4} | options
    pipe = jp.pipeline(MEAN, schedule=schedule, mesh=mesh(**sizes), **options)
    wanted, grads = jax.value_and_grad(plain, has_aux=True)(init(), batch())
    got = run(pipe, init())
    close(got, (wanted, grads))


@pytest.mark.parametrize(
    ("schedule", "engine"),
    [
        ("circular", "auto"),
        ("zero_bubble_h1", "auto"),
        ("1f1b", "mpmd"),
        pytest.param("dualpipe", "auto", marks=pytest.mark.slow),
    ],
)
def test_dropout_and_weighted_losses_are_the_same_in_every_engine(schedule: str, engine: str):
    key = jax.random.key(3)
    reference = jp.pipeline(WEIGHTED, schedule=None, mesh=mesh(stage=1), microbatches=4)
    pipe = jp.pipeline(
        WEIGHTED, schedule=schedule, mesh=mesh(stage=2), microbatches=4, engine=engine
    )
    close(run(pipe, init(), key), run(reference, init(), key))


def test_a_value_alone_is_the_loss_of_the_plain_program():
    pipe = jp.pipeline(MEAN, schedule="1f1b", mesh=mesh(stage=2), microbatches=4)
    value = jax.jit(pipe.value)(pipe.shard(init()), batch())
    close(jax.tree.map(float, value), plain(init(), batch()))


def test_a_mesh_may_be_the_sizes_of_its_axes():
    given: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4}
    by_name = jp.pipeline(MEAN, mesh={"stage": 4, "data": 2}, **given)
    assert by_name.mesh == jp.make_mesh({"stage": 4, "data": 2})
    with pytest.raises(ValueError, match="needs 3 devices and there are 8"):
        jp.pipeline(MEAN, mesh={"stage": 3}, **given)


def test_parameters_come_back_as_they_went_in():
    stacked = init() | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *init()["layers"])}
    for params in (init(), stacked):
        for schedule, engine in ((None, "auto"), ("1f1b", "auto"), ("1f1b", "mpmd")):
            pipe = jp.pipeline(
                MEAN, schedule=schedule, mesh=mesh(stage=4), microbatches=4, engine=engine
            )
            back = pipe.unshard(pipe.shard(params))
            assert jax.tree.structure(back) == jax.tree.structure(params)
            jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize(("schedule", "engine"), [("1f1b", "auto"), ("interleaved_1f1b", "mpmd")])
def test_init_makes_the_shards_of_every_device_and_the_same_numbers(schedule: str, engine: str):
    pipe = jp.pipeline(
        MEAN, schedule=schedule, mesh=mesh(stage=2, fsdp=2), microbatches=4, engine=engine
    )
    made, sharded = pipe.init(init), pipe.shard(init())
    assert jax.tree.structure(made) == jax.tree.structure(sharded)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(sharded), strict=True):
        assert a.sharding == b.sharding
    close(pipe.unshard(made), init())


def refused(match: str, model: Any = MEAN, params: Any = None, **options: Any) -> None:
    given = {"schedule": "1f1b", "mesh": mesh(stage=2), "microbatches": 4} | options
    with pytest.raises(ValueError, match=match):
        pipe = jp.pipeline(model, **given)
        jax.eval_shape(pipe.value, pipe.shard(init() if params is None else params), batch())


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda x: None, "returned None and was given"),
        (lambda x: (x, jnp.ones(3)), r"behind x.*\(x, aux\) with a dict"),
        (lambda x: (x, jnp.ones(())), r"behind x.*\(x, aux\) with a dict"),
        (lambda x: (x, {}, {}), "`layer` returned"),
    ],
)
def test_what_a_layer_may_return_is_said(returned: Any, match: str):
    model = dataclasses.replace(MEAN, layer=lambda w, x, batch: returned(x))
    for schedule in ("1f1b", "circular", None):
        refused(match, model=model, schedule=schedule)


def test_bad_input_is_refused_before_anything_compiles():
    params = init()
    refused("do not divide into 5 microbatches", microbatches=5, schedule="gpipe")
    refused("no family|`1f1c`|'1f1c'", schedule="1f1c")
    refused("named 'stage'", mesh=jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))
    refused("one of unpipelined, circular", engine="mpd")
    refused("`microbatches` is 2.5. Give an integer", microbatches=2.5)
    refused("`slices` is 2, and `schedule` is None. Leave", schedule=None, slices=2)
    built = schedules.build("1f1b", ranks=2, microbatches=4)
    refused("`chunks` is 2, and `schedule` is a `Schedule`", schedule=built, chunks=2)
    refused(r"is \(-1, 7\). Give the number of layers of each", layers_per_stage=(-1, 7))
    refused(r"is \(1.5, 4.5\). Give the number", layers_per_stage=(1.5, 4.5))
    refused("'circular', which runs no other", engine="circular")
    refused("6 layers and the schedule 2 stages", layers_per_stage=(1, 2))
    refused("fewer ranks or chunks", mesh=mesh(stage=8), microbatches=8)
    refused("`model` is function. Give a `jaxpipe.Model`", model=layer)
    refused("'embed', 'layers' and 'head'", params={"embed": (), "layers": ()})
    params["layers"][3] = {"up": jnp.ones((D, V)), "down": jnp.ones((V, D + 1))}
    refused(r"`params\['layers'\]\[3\]\['down'\]` is float32\[12, 9\]", params=params)
    params["layers"][3] = {"up": jnp.ones((D, V))}
    refused(r"\[3\]` differs from .*\['down'\]", params=params)
    refused("which takes|takes a dropout key", model=WEIGHTED)
    vector = dataclasses.replace(MEAN, loss=lambda w, x, batch: jnp.mean(x, axis=(0, 1)))
    refused("Return a scalar", model=vector)
    learnt = dataclasses.replace(
        MEAN, loss=lambda w, x, batch: jp.Weighted(jnp.sum(x), jnp.sum(w["embed"]))
    )
    refused("follow from the batch alone", model=learnt)
    with pytest.raises(ValueError, match="`layer` takes"):
        jp.Model(embed, lambda w, x: x, mean_loss)
    pipe = jp.pipeline(MEAN, schedule="1f1b", mesh=mesh(stage=2), microbatches=4)
    for call in (lambda: pipe.value_and_grad(init(), batch()), lambda: pipe.unshard(init())):
        with pytest.raises(ValueError, match=r"Give what `pipe.shard\(params\)` or"):
            call()


def test_parameters_of_another_pipeline_are_refused():
    def pipeline(schedule: str, layers_per_stage: Any = None) -> Any:
        return jp.pipeline(
            MEAN,
            schedule=schedule,
            mesh=mesh(stage=2),
            microbatches=4,
            layers_per_stage=layers_per_stage,
        )

    others = (("interleaved_1f1b", None), ("zbv", None)), (("1f1b", (2, 4)), ("1f1b", (4, 2)))
    for own, other in others:
        stored = pipeline(*own).shard(init())
        with pytest.raises(ValueError, match="other layers in its stages, or its stages on other"):
            jax.eval_shape(pipeline(*other).value, stored, batch())
    stored = pipeline("circular").shard(init())
    jax.eval_shape(pipeline("1f1b").value, stored, batch())


def test_a_fifth_engine_is_a_record_and_a_line_in_the_registry(monkeypatch: Any):
    ran = []

    def value_and_grad(*arguments: Any) -> Any:
        ran.append(arguments[0].layout.dims)
        return engines.ENGINES["unpipelined"].value_and_grad(*arguments)

    toy = dataclasses.replace(
        engines.ENGINES["unpipelined"], name="toy", value_and_grad=value_and_grad
    )
    monkeypatch.setitem(engines.ENGINES, "toy", toy)
    pipe = jp.pipeline(MEAN, schedule=None, mesh=mesh(stage=2), microbatches=4, engine="toy")
    wanted, grads = jax.value_and_grad(plain, has_aux=True)(init(), batch())
    close(run(pipe, init()), (wanted, grads))
    assert ran == [(1, 1, L)]
