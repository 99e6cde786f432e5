"""A pipeline compares itself with the user's own program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe import engines
from jaxpipe.api.inspection import Comparison
from jaxpipe.api.inspection._check import check_steps, checked_step

D, B = 4, 8


def dropout_layer(w: Any, x: Any, batch: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.75, x.shape)
    return x + jnp.where(kept, jnp.tanh(x @ w), jnp.zeros_like(x)), {"size": jnp.mean(x * x)}


MODEL = jp.Model(
    embed=lambda w, batch: batch["x"] @ w,
    layer=dropout_layer,
    loss=lambda w, x, batch: jp.Weighted(
        jnp.sum((x @ w - batch["y"]) ** 2), jnp.sum(batch["weight"])
    ),
)


def example() -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    params = {
        "embed": jax.random.normal(next(keys), (D, D)),
        "layers": [jax.random.normal(next(keys), (D, D)) / D for _ in range(2)],
        "head": jax.random.normal(next(keys), (D,)),
    }
    batch = {"x": jax.random.normal(next(keys), (B, D)), "y": jnp.arange(float(B))}
    return params, batch | {"weight": 1 + batch["y"]}


@pytest.mark.parametrize(
    ("sizes", "engine"), [({"stage": 2, "data": 2}, "auto"), ({"stage": 2}, "mpmd")]
)
def test_a_pipeline_checks_itself(sizes: dict[str, int], engine: str):
    params, batch = example()
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: 2 * len(sizes)])
    pipe = jp.pipeline(MODEL, schedule="1f1b", mesh=mesh, microbatches=2, engine=engine)
    found = pipe.check(pipe.shard(params), batch, jax.random.key(1))
    names = ["loss", "metrics['size']", "gradients['embed']", "gradients['head']"]
    assert list(found.errors) == [*names, *(f"gradients['layers'][{i}]" for i in range(2))]
    assert found.largest <= 1e-5
    lines = str(found).splitlines()
    assert lines[0].split() == ["leaf", "relative", "error"]
    assert [line.split()[0] for line in lines[1:-1]] == names + list(found.errors)[4:]
    assert lines[-1] == (
        "reference: the functions of the model on 2 microbatches, each with dropout masks of its "
        "own, on one device; tolerance 1e-05, for float32"
    )


def test_a_long_table_has_the_loss_and_the_largest_errors():
    errors = {"loss": 0.0} | {f"gradients['layers'][{i}]": i * 1e-9 for i in range(60)}
    lines = str(Comparison(errors)).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["loss", *list(errors)[-40:]]
    assert lines[-1] == "and 20 leaves with smaller errors; the largest of all is 5.9e-08"


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch):
    right = engines.ENGINES["unpipelined"]

    def wrong(*arguments: Any) -> Any:
        value, grads = right.value_and_grad(*arguments)
        stages = jax.tree.map(lambda leaf: leaf.at[..., 0, 0].set(jnp.nan), grads["stages"])
        return value, grads | {"stages": stages}

    toy = dataclasses.replace(right, name="toy", value_and_grad=wrong)
    monkeypatch.setitem(engines.ENGINES, "toy", toy)
    params, batch = example()
    mesh = jp.make_mesh({"stage": 1}, devices=jax.devices()[:1])
    pipe = jp.pipeline(MODEL, schedule=None, mesh=mesh, microbatches=2, engine="toy")
    expected = r"in 2 of \d+ results: the relative error nan of gradients\['layers'\]\[0\] is above"
    with pytest.raises(AssertionError, match=expected):
        pipe.check(params, batch, jax.random.key(1))


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w)


def errors(w: Any, x: Any, batch: Any) -> Any:
    return (x @ w - batch["y"]) ** 2


def mean(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean(errors(w, x, batch))


PLAIN = jp.Model(embed=lambda w, batch: batch["x"] @ w, layer=layer, loss=mean)


def pipeline(model: Any, schedule: Any = "1f1b", **options: Any) -> Any:
    sizes = {"stage": 1 if schedule is None else 2} | options.pop("sizes", {})
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = jp.make_mesh(sizes, devices=devices)
    return jp.pipeline(model, **{"schedule": schedule, "mesh": mesh, "microbatches": 4} | options)


def normalised(x: Any) -> Any:
    centred = x - jnp.mean(x, axis=0)
    return centred / jnp.sqrt(jnp.mean(centred * centred, axis=0) + 1e-5)


def with_positions(w: Any, batch: Any) -> Any:
    return batch["x"] @ w + 0.1 * jnp.arange(len(batch["x"]), dtype=jnp.float32)[:, None]


def contrastive(w: Any, x: Any, batch: Any) -> Any:
    return -jnp.mean(jnp.diag(jax.nn.log_softmax((x * w) @ x.T)))


def capacity(w: Any, x: Any, batch: Any) -> Any:
    """Keeps what the first rows that choose an expert make, as a mixture of experts does."""
    chosen = jax.nn.one_hot(jnp.argmax(x, axis=-1), D)
    place = jnp.cumsum(chosen, axis=0) * chosen
    kept = jnp.sum(jnp.where((place > 0) & (place <= 1), chosen, jnp.zeros_like(chosen)), axis=-1)
    return x + jnp.tanh(x @ w) * kept[:, None]


def masked(w: Any, x: Any, batch: Any) -> Any:
    return jnp.sum(errors(w, x, batch) * batch["weight"]) / jnp.sum(batch["weight"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    # The table of the issue.
    "masked mean": ({"loss": masked}, r"The loss is no mean.*`jp.Weighted\(jnp.sum\(loss \* mask"),
    "sum of rows": (
        {"loss": lambda w, x, batch: jnp.sum(errors(w, x, batch))},
        "The loss is no mean.*It is a sum over rows: return the mean",
    ),
    "root of a mean": (
        {"loss": lambda w, x, batch: jnp.sqrt(mean(w, x, batch))},
        "The loss is no mean.*It is the root of a mean: return the mean",
    ),
    "contrastive": (
        {"loss": contrastive},
        "The loss is no mean.*contrastive.*fewer `microbatches`",
    ),
    "batch statistics": (
        {"layer": lambda w, x, batch: x + jnp.tanh(normalised(x) @ w)},
        "`layer` of layer 0 mixes rows.*batch statistics.*4 microbatches of 2 rows",
    ),
    "positions": ({"embed": with_positions}, r"`embed` mixes rows.*positions by `jnp.arange\(rows"),
    "table": (
        {"embed": lambda w, batch: (batch["x"] + batch["table"][:1]) @ w},
        "`embed` mixes rows.*a table with an entry for every row",
    ),
    # More.
    "capacity": ({"layer": capacity}, "`layer` of layer . mixes rows"),
    "logarithm": (
        {"loss": lambda w, x, batch: jnp.log(mean(w, x, batch))},
        "The loss is no mean.*a logarithm .* outside of `loss`",
    ),
    "largest": ({"loss": lambda w, x, batch: jnp.max(errors(w, x, batch))}, "The loss is no mean"),
    "sum as a metric": (
        {"loss": lambda w, x, batch: (mean(w, x, batch), {"sum": jnp.sum(x)})},
        "The metric 'sum' of `loss` is no mean.*It is a sum over rows",
    ),
    "variance of a layer": (
        {"layer": lambda w, x, batch: (layer(w, x, batch), {"loss": jnp.var(x)})},
        "The metric 'loss' of `layer` of layer 0 is no mean.*Metrics are averaged",
    ),
    "first row": (
        {"layer": lambda w, x, batch: layer(w, x, batch) + 0.1 * x[:1]},
        "`layer` of layer 0 mixes rows",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_another_thing_in_microbatches_is_named_with_what_to_write(name: str):
    changes, match = WRONG[name]
    params, batch = example()
    table = {"table": jax.random.normal(jax.random.key(7), (B, D))}
    pipe = pipeline(dataclasses.replace(PLAIN, **changes))
    with pytest.raises(AssertionError, match=f"(?s)differs from the user's program.*{match}"):
        pipe.check(params, batch | table)
    # In one microbatch nothing is cut.
    assert pipeline(pipe.model, None, microbatches=1).check(params, batch | table).largest <= 1e-5


def test_a_masked_mean_by_name_is_that_of_plain():
    def weighted(w: Any, x: Any, batch: Any) -> Any:
        total = jnp.sum(errors(w, x, batch) * batch["weight"])
        return jp.Weighted(total, jnp.sum(batch["weight"])), {"x": jnp.mean(x)}

    def plain(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["embed"]
        for w in params["layers"]:
            x = layer(w, x, batch)
        return masked(params["head"], x, batch), {"x": jnp.mean(x), "other": jnp.ones(())}

    params, batch = example()
    for options in ({}, {"engine": "mpmd"}, {"schedule": "circular"}, {"sizes": {"data": 2}}):
        pipe = pipeline(dataclasses.replace(PLAIN, loss=weighted), **options)
        found = pipe.check(params, batch, plain=plain)
        assert "metrics['x']" in found.errors and "metrics['other']" not in found.errors
        assert "reference: `plain`, on one device" in str(found)
    with pytest.raises(AssertionError, match="`plain` is another program than the functions"):
        pipe.check(params, batch, plain=lambda *given: 2 * plain(*given)[0])
    # A loss that is meant to be of microbatches has a plain program too.
    pipe = pipeline(dataclasses.replace(PLAIN, loss=masked))

    def in_microbatches(params: Any, batch: Any) -> Any:
        cut = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        return jnp.mean(jax.lax.map(lambda rows: plain(params, rows)[0], cut))

    assert pipe.check(params, batch, plain=in_microbatches).largest <= 1e-5


def test_rows_of_a_device_that_are_said_to_be_enough_are_named():
    params, batch = example()
    mixing = dataclasses.replace(
        PLAIN, layer=lambda w, x, batch: (layer(w, x, batch), {"loss": jnp.var(x)})
    )
    options = {"sizes": {"data": 2}, "microbatches": 1, "schedule": "gpipe"}
    assert pipeline(mixing, **options).check(params, batch).largest <= 1e-5
    with pytest.raises(
        AssertionError, match=r"(?s)`layer` of layer 0 mixes rows.*row_wise=\{'layer': False\}"
    ):
        pipeline(mixing, row_wise=True, **options).check(params, batch)


def attending(w: Any, x: Any, batch: Any, wrong: float = 0.0) -> Any:
    """Attention over the entries of a row. A bias of its keys changes no weight."""
    q, k = x[:, :, None] * w["q"], x[:, :, None] * w["k"] + w["bias"]
    nearer = jnp.tril(jnp.ones((D, D), jnp.float32))  # says float32, as masks of Flax do
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2) + nearer)
    return x + (weights @ x[:, :, None])[:, :, 0] + wrong * jnp.mean(w["bias"] * w["q"])


def attending_example() -> tuple[Any, Any]:
    params, batch = example()
    keys = iter(jax.random.split(jax.random.key(4), 6))
    layers = [
        {n: jax.random.normal(next(keys), (D,)) for n in ("q", "k", "bias")} for _ in range(2)
    ]
    return params | {"layers": layers}, batch


@pytest.mark.parametrize("options", [{}, {"schedule": "circular"}, {"engine": "mpmd"}])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_error(options: dict[str, Any]):
    params, batch = attending_example()
    pipe = pipeline(dataclasses.replace(PLAIN, layer=attending), **options)
    found = pipe.check(params, batch)
    assert found.noise == {f"gradients['layers'][{i}]['bias']" for i in range(2)}
    assert found.largest <= 1e-5 and "(rounding)" in str(found)

    def plain(params: Any, batch: Any) -> Any:  # a gradient that is not zero is no noise
        x = batch["x"] @ params["embed"]
        for w in params["layers"]:
            x = attending(w, x, batch, 1e-3)
        return mean(params["head"], x, batch)

    with pytest.raises(AssertionError, match="`plain` is another program"):
        pipe.check(params, batch, plain=plain)


def test_a_gradient_that_is_zero_with_any_dropout_mask_is_no_error():
    """Its program in float64 draws other masks."""
    params, batch = attending_example()

    def dropping(w: Any, x: Any, batch: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return jnp.where(kept, attending(w, x, batch), x)

    model = dataclasses.replace(PLAIN, layer=dropping)
    pipe = pipeline(model, schedule="circular")
    biases = {f"gradients['layers'][{i}]['bias']" for i in range(2)}
    noise: set[str] = set()
    for seed in range(10):  # on some CPUs both programs round to the same zeros with some masks
        found = pipe.check(params, batch, jax.random.key(seed))
        assert found.noise <= biases and found.largest <= 1e-5
        noise |= found.noise
        if noise:
            break
    assert noise


def test_rounding_is_not_taken_for_a_function_that_sees_all_rows():
    params, batch = example()
    mixing = dataclasses.replace(
        PLAIN, layer=lambda w, x, batch: (layer(w, x, batch), {"loss": jnp.var(x)})
    )
    pipe = pipeline(mixing, sizes={"stage": 2, "data": 2}, microbatches=1, schedule="gpipe")
    with pytest.raises(AssertionError, match=r"are those of rounding"):
        pipe.check(params, batch, tolerance=1e-12)


@pytest.mark.parametrize(
    "returned", [(1.0, {}, {}), (1.0, 2.0), np.ones(3), {"loss": 1.0}, None], ids=str
)
def test_what_plain_may_return_is_said(returned: Any):
    with pytest.raises(ValueError, match=r"`plain` returned .*Return a scalar or `jp.Weighted"):
        pipeline(PLAIN).check(*example(), plain=lambda params, batch: returned)


def test_dropout_hides_no_loss_that_is_no_mean():
    params, batch = example()
    pipe = pipeline(dataclasses.replace(MODEL, loss=masked))
    with pytest.raises(AssertionError, match=r"(?s)not the user's program.*jp.Weighted"):
        pipe.check(params, batch, jax.random.key(1))
    with pytest.raises(ValueError, match="`plain` is given, and a function of the model takes"):
        pipe.check(params, batch, jax.random.key(1), plain=lambda params, batch: 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "mpmd"},
        {"schedule": "circular"},
        {"gather": "layer", "sizes": {"fsdp": 2}},
        {"gather": "layer", "sizes": {"fsdp": 2}, "schedule": "circular"},
    ],
)
def test_imaginary_parts_are_compared(options: dict[str, Any]):
    params, batch = example()
    turned = [jax.lax.complex(w, w.T) for w in params["layers"]]

    def of_complex(w: Any, x: Any, batch: Any) -> Any:
        turn = jax.lax.complex(jnp.cos(jnp.real(w)[0]), jnp.sin(jnp.real(w)[0]))
        y = x.astype(w.dtype) @ w * turn * turn
        y = y + jnp.fft.fft(jnp.real(y)) / 9
        y = y + jnp.fft.irfft(jnp.fft.rfft(x) * turn[:1], x.shape[-1]).astype(w.dtype)
        return x + jnp.tanh(jnp.real(y) + jnp.imag(y))

    def loss(w: Any, x: Any, batch: Any) -> Any:
        value = mean(w, x, batch)
        return value, {"phase": jax.lax.complex(value, jnp.mean(x))}

    def plain(params: Any, batch: Any, wrong: float = 0.0) -> Any:
        x = batch["x"] @ params["embed"]
        for w in params["layers"]:
            x = of_complex(w, x, batch)
        value, metrics = loss(params["head"], x, batch)
        return value, {"phase": metrics["phase"] + 1j * wrong}

    params = params | {"layers": turned}
    pipe = pipeline(dataclasses.replace(PLAIN, layer=of_complex, loss=loss), **options)
    pipe.check(params, batch)
    pipe.check(params, batch, plain=plain)
    with pytest.raises(AssertionError, match=r"metrics\['phase'\]"):
        pipe.check(params, batch, plain=lambda *given: plain(*given, wrong=499.0))


def test_the_tolerance_is_that_of_the_dtype():
    def narrow(w: Any, x: Any, batch: Any) -> Any:
        return layer(w.astype(jnp.bfloat16), x, batch)

    params, batch = example()
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
    for model, given in (
        (PLAIN, low),
        (
            dataclasses.replace(
                PLAIN,
                embed=lambda w, batch: (batch["x"] @ w).astype(jnp.bfloat16),
                layer=narrow,
                loss=lambda w, x, batch: mean(w, x.astype(jnp.float32), batch),
            ),
            (params, batch),
        ),
    ):
        for options in ({}, {"engine": "mpmd"}):
            found = pipeline(model, **options).check(*given)
            assert abs(found.tolerance - 0.5 * 96**0.5 * 2**-7) < 1e-9
            text = "tolerance 0.038, 4.9 eps of bfloat16, in which 2 layers round at other places"
            assert text in str(found)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, batch))
        for options in ({}, {"engine": "mpmd"}, {"schedule": "circular"}):
            found = pipeline(PLAIN, **options).check(*wide)
            assert found.tolerance == 1e-12 >= found.largest
    with pytest.raises(
        AssertionError, match=r"(?s)above the tolerance 1e-12.*are those of rounding"
    ):
        pipeline(PLAIN).check(params, batch, tolerance=1e-12)


def test_16_bits_hide_no_function_that_mixes_rows():
    params, batch = example()
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
    params = params | {"layers": [0.03 * w for w in params["layers"]]}

    def first_row(w: Any, x: Any, batch: Any) -> Any:
        return x + jnp.tanh((x[:1] + x) @ w)

    pipe = pipeline(dataclasses.replace(PLAIN, layer=first_row))
    loss_error = pipe.check(params, batch, tolerance=2.0).errors["loss"]
    assert loss_error < 0.038
    with pytest.raises(AssertionError, match=r"`layer` of layer 0 mixes rows"):
        pipe.check(params, batch)


def only_matrices(params: Any) -> Any:
    """The commonest mask of weight decay. Stored leaves [chunks, ranks, ...] have more dims."""
    return jax.tree.map(lambda w: w.ndim >= 2, params)


@pytest.mark.parametrize("frozen", [None, lambda path, leaf: "embed" in path])
@pytest.mark.parametrize("options", [{}, {"schedule": "circular"}, {"engine": "mpmd"}])
def test_parameters_after_steps_of_an_optimizer_are_compared(options: Any, frozen: Any):
    params, batch = example()
    pipe = pipeline(PLAIN, frozen=frozen, **options)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01, mask=only_matrices))
    found = pipe.check(params, batch, optimizer=tx, steps=3)
    trained = [n for n in ("['embed']", "['head']") if not (frozen and n == "['embed']")]
    names = [name for name in found.errors if name.startswith("parameters")]
    layers = [f"parameters['layers'][{i}]" for i in range(2)]
    assert names == [f"parameters{name}" for name in trained] + layers
    assert "parameters after 3 steps of the optimizer" in str(found)
    assert found.largest <= 1e-5
    lifted = pipe.optimizer(optax.adamw(0.0101, mask=only_matrices))
    with pytest.raises(AssertionError, match=r"After 3 steps of the optimizer .* differs"):
        check_steps(checked_step(pipe, params, batch, None, None), lifted, tx, 3, found)


def test_steps_with_dropout_have_the_masks_of_the_pipeline():
    params, batch = example()
    pipe = pipeline(MODEL, microbatches=2)
    found = pipe.check(params, batch, jax.random.key(1), optimizer=optax.adam(0.01), steps=2)
    assert found.largest <= 1e-5
