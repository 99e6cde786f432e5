"""Functions that mix rows, on meshes that divide rows: the numbers are those of the plain program.

The plain program is written here, in plain JAX: each function of the user on each whole microbatch,
one after the other on one device, averaged over microbatches.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe import models, sharding
from jaxpipe.ir.rows import Mixed, Rows, Sum, Whole, compare
from jaxpipe.kernels import dot_product_attention
from small_models import small_llama, stack

D, V, L, B, T, M = 8, 12, 4, 16, 4, 4
EXPERTS, CAPACITY = 4, 5


def normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / shape[-2] ** 0.5 if len(shape) > 1 else jnp.ones(shape)


def init() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), L + 2)

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        k = jax.random.split(key, 5)
        return {
            "router": normal(k[0], D, EXPERTS),
            "up": normal(k[1], EXPERTS, D, 2 * D),
            "down": normal(k[2], EXPERTS, 2 * D, D),
            "square": normal(k[3], D, D),
            "scale": jnp.ones(D),
        }

    head = {"w": normal(keys[1], D, V), "temperature": jnp.float32(3)}
    return {"embed": normal(keys[0], V, D), "layers": [layer(k) for k in keys[2:]], "head": head}


def batch() -> dict[str, jax.Array]:
    return {
        "tokens": jax.random.randint(jax.random.key(1), (B, T + 1), 0, V),
        "mask": jax.random.bernoulli(jax.random.key(2), 0.6, (B, T)).astype(jnp.float32),
    }


def embed(w: Any, batch: Any) -> Any:
    return w[batch["tokens"][:, :-1]]


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w["square"]) * w["scale"]


def token_losses(w: Any, x: Any, batch: Any) -> jax.Array:
    logits = jax.nn.log_softmax(x @ w["w"])
    return -jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], -1)[..., 0]


def loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean(token_losses(w, x, batch)) * w["temperature"]


def mixture(w: Any, x: Any, batch: Any) -> Any:
    """Experts with a capacity, and a loss that balances them: both over all tokens."""
    tokens = x.reshape(-1, D)
    shares = jax.nn.softmax(tokens @ w["router"])
    chosen = jax.nn.one_hot(jnp.argmax(shares, -1), EXPERTS)
    place = jnp.cumsum(chosen, 0) * chosen - 1
    slots = (
        jax.nn.one_hot(place.astype(jnp.int32), CAPACITY)
        * jnp.where(place >= 0, 1.0, 0.0)[..., None]
    )
    given = jnp.einsum("nec,nd->ecd", slots, tokens)
    done = jnp.einsum(
        "ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", given, w["up"])), w["down"]
    )
    y = jnp.einsum("nec,ecd,n->nd", slots, done, jnp.max(shares, -1))
    balance = EXPERTS * jnp.sum(shares.mean(0) * chosen.mean(0))
    return x + y.reshape(x.shape), {"loss": 0.1 * balance, "dropped": 1 - slots.sum() / len(tokens)}


def batch_norm(w: Any, x: Any, batch: Any) -> Any:
    mean, spread = x.mean((0, 1)), x.std((0, 1))
    return x + jnp.tanh(((x - mean) / (spread + 1e-3)) @ w["square"]) * w["scale"]


def with_rolled_rows(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(jnp.roll(x, 1, axis=0) @ w["square"])


def with_row_ids(w: Any, x: Any, batch: Any) -> Any:
    ids = jnp.arange(len(x)) / len(x)
    return x + jnp.tanh(x @ w["square"] + ids[:, None, None])


def with_sorted_rows(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.sort(x @ w["square"], axis=0) * w["scale"]


def with_attention_over_rows(w: Any, x: Any, batch: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("btd,ctd->tbc", x @ w["square"], x))
    return x + jnp.einsum("tbc,ctd->btd", scores, x)


def contrastive(w: Any, x: Any, batch: Any) -> Any:
    z = x.mean(1) @ w["w"]
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    scores = jax.nn.log_softmax(z @ z.T * w["temperature"])
    return loss(w, x, batch) - jnp.mean(jnp.diag(scores)), {"largest": jnp.max(scores)}


def masked_mean(w: Any, x: Any, batch: Any) -> Any:
    return jnp.sum(token_losses(w, x, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def sum_of_rows(w: Any, x: Any, batch: Any) -> Any:
    return jnp.sum(token_losses(w, x, batch))


def root_of_a_mean(w: Any, x: Any, batch: Any) -> Any:
    return jnp.sqrt(jnp.mean(token_losses(w, x, batch) ** 2))


Functions = tuple[Callable, Callable, Callable]


def plain(
    embed: Callable, layer: Callable, loss: Callable, params: Any, batch: Any
) -> tuple[Any, dict[str, Any]]:
    """Runs each microbatch whole, one after the other."""
    totals: dict[str, Any] = {}
    total = jnp.float32(0)
    for m in range(M):
        rows = slice(m * B // M, (m + 1) * B // M)
        microbatch = {name: leaf[rows] for name, leaf in batch.items()}
        x, found = embed(params["embed"], microbatch), {}
        for w in params["layers"]:
            x = layer(w, x, microbatch)
            if isinstance(x, tuple):
                x, aux = x
                found = {name: found.get(name, 0.0) + value for name, value in aux.items()}
        value = loss(params["head"], x, microbatch)
        value, metrics = value if isinstance(value, tuple) else (value, {})
        value += found.pop("loss", 0.0)
        total += value / M
        for name, metric in (found | metrics).items():
            totals[name] = totals.get(name, 0.0) + metric / M
    return total, totals


def mesh(**sizes: int) -> Any:
    return jp.make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def close(got: Any, wanted: Any, *, most: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= most, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def run(pipe: Any, params: Any, key: Any = None) -> Any:
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    value, grads = step(pipe.shard(params), batch())
    return jax.tree.map(float, value), pipe.unshard(grads)


WANTED: dict[Any, Any] = {}


def check_against_plain(functions: Functions, pipe: Any) -> None:
    if functions not in WANTED:  # of several tests
        value_and_grad = jax.value_and_grad(
            lambda params: plain(*functions, params, batch()), has_aux=True
        )
        value, grads = jax.jit(value_and_grad)(init())
        WANTED[functions] = jax.tree.map(float, value), grads
    close(run(pipe, init()), WANTED[functions])


PIPELINES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "unpipelined": (None, {}),
    "circular": ("circular", {}),
    "circular, two chunks": ("circular", {"chunks": 2}),
    "1f1b": ("1f1b", {}),
    "zero bubble": ("zero_bubble_h1", {}),
    "interleaved": ("interleaved_1f1b", {}),
    "mpmd": ("1f1b", {"engine": "mpmd"}),
    "mpmd, zero bubble": ("zero_bubble_h1", {"engine": "mpmd"}),
}
MESHES = {
    "fsdp 2": {"stage": 2, "fsdp": 2},
    "data 2": {"stage": 2, "data": 2},
    "expert 2": {"stage": 2, "expert": 2},
    "stage 4, fsdp 2": {"stage": 4, "fsdp": 2},
    "data 2, fsdp 2": {"stage": 2, "data": 2, "fsdp": 2},
}
QUICK = [
    ("unpipelined", "fsdp 2"),
    ("circular", "data 2"),
    ("circular, two chunks", "data 2, fsdp 2"),
    ("1f1b", "fsdp 2"),
    ("1f1b", "expert 2"),
    ("zero bubble", "stage 4, fsdp 2"),
    ("interleaved", "data 2"),
    ("mpmd", "fsdp 2"),
]


@pytest.mark.parametrize(
    ("pipeline", "sizes"),
    [
        pytest.param(pipeline, sizes, marks=() if (pipeline, sizes) in QUICK else pytest.mark.slow)
        for pipeline in PIPELINES
        for sizes in MESHES
        if not (sizes == "stage 4, fsdp 2" and pipeline in ("interleaved", "circular, two chunks"))
    ],
)
def test_experts_with_capacity_and_a_contrastive_loss_are_those_of_the_plain_program(
    pipeline: str, sizes: str
):
    schedule, options = PIPELINES[pipeline]
    functions = embed, mixture, contrastive
    pipe = jp.pipeline(
        jp.Model(*functions),
        schedule=schedule,
        mesh=mesh(**MESHES[sizes]),
        microbatches=M,
        **options,
    )
    check_against_plain(functions, pipe)


LAYERS = [batch_norm, with_rolled_rows, with_row_ids, with_sorted_rows, with_attention_over_rows]
LOSSES = [masked_mean, sum_of_rows, root_of_a_mean]


@pytest.mark.parametrize(
    ("functions", "pipeline", "sizes"),
    [
        pytest.param(functions, pipeline, sizes, id=f"{name}, {pipeline}, {sizes}")
        for (name, functions), (pipeline, sizes) in zip(
            [
                *((f.__name__, (embed, f, loss)) for f in LAYERS),
                *((f.__name__, (embed, layer, f)) for f in LOSSES),
            ],
            [
                ("1f1b", {"stage": 2, "fsdp": 4}),
                ("zero bubble", {"stage": 2, "data": 2, "fsdp": 2}),
                ("circular", {"stage": 2, "fsdp": 4}),
                ("mpmd", {"stage": 2, "data": 2}),
                ("interleaved", {"stage": 2, "fsdp": 2}),
                ("1f1b", {"stage": 2, "data": 4}),
                ("unpipelined", {"stage": 1, "fsdp": 4}),
                ("circular", {"stage": 2, "data": 2}),
            ],
            strict=True,
        )
    ],
)
def test_what_mixes_rows_is_that_of_the_plain_program(
    functions: Functions, pipeline: str, sizes: dict[str, int]
):
    schedule, options = PIPELINES[pipeline]
    pipe = jp.pipeline(
        jp.Model(*functions), schedule=schedule, mesh=mesh(**sizes), microbatches=M, **options
    )
    check_against_plain(functions, pipe)


@pytest.mark.parametrize("pipeline", ["circular", "1f1b", "mpmd"])
def test_rows_of_activations_in_bfloat16_are_gathered(pipeline: str):
    """XLA:CPU ends the process where it is asked to sum in bfloat16."""

    def functions(dtype: Any) -> Functions:
        def low(w: Any) -> Any:
            return jax.tree.map(lambda x: x.astype(dtype), w)

        return (
            lambda w, batch: embed(low(w), batch),
            lambda w, x, batch: batch_norm(low(w), x, batch),
            lambda w, x, batch: contrastive(w, x.astype(jnp.float32), batch),
        )

    def gradients(dtype: Any) -> Any:
        return jax.jit(jax.grad(lambda p: plain(*functions(dtype), p, batch())[0]))(init())

    def distance(a: Any, b: Any) -> float:
        return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)))

    schedule, options = PIPELINES[pipeline]
    model = jp.Model(*functions(jnp.bfloat16))
    pipe = jp.pipeline(
        model, schedule=schedule, mesh=mesh(stage=2, fsdp=2), microbatches=M, **options
    )
    _, grads = run(pipe, init())
    exact = gradients(jnp.float32)
    assert 0 < distance(grads, exact) < 1.25 * distance(gradients(jnp.bfloat16), exact)


@pytest.mark.parametrize("name", ["embed", "layer", "loss"])
def test_one_function_that_mixes_rows_is_named_with_its_line(name: str):
    functions: dict[str, Any] = {"embed": embed, "layer": layer, "loss": loss}
    mixing = {
        "embed": lambda w, batch: embed(w, batch) - embed(w, batch).mean(0),
        "layer": with_sorted_rows,
        "loss": masked_mean,
    }
    model = jp.Model(**functions | {name: mixing[name]})
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2, fsdp=2), microbatches=M)
    report = pipe.rows(init(), batch())
    assert report.whole_microbatches and report.seen_rows == 4
    assert [f.name for f in report.functions if not f.is_row_wise] == [name]
    (reason,) = [f.reason for f in report.functions if f.name == name]
    assert "test_rows.py:" in reason
    assert f"whole microbatches, as {name} may mix rows" in repr(pipe)


def test_row_wise_functions_see_the_rows_of_a_device_and_the_report_says_so():
    pipe = jp.pipeline(
        jp.Model(embed, layer, loss), schedule="1f1b", mesh=mesh(stage=2, fsdp=2), microbatches=M
    )
    assert "row" not in repr(pipe)
    assert str(pipe.rows(init(), batch())) == (
        "embed  row-wise: by its program\n"
        "layer  row-wise: by its program\n"
        "loss   row-wise: by its program\n"
        "Functions see 2 of 4 rows, those of a device."
    )
    assert repr(pipe).endswith("mesh stage 2, fsdp 2; row-wise: embed, layer, loss)")
    check_against_plain((embed, layer, loss), pipe)


def test_one_row_for_each_device_is_enough():
    pipe = jp.pipeline(
        jp.Model(embed, layer, loss), schedule="1f1b", mesh=mesh(stage=2, fsdp=4), microbatches=M
    )
    assert pipe.rows(init(), batch()).seen_rows == 1


def lowered(**options: Any) -> str:
    pipe = jp.pipeline(
        jp.Model(embed, layer, loss),
        schedule="1f1b",
        mesh=mesh(stage=2, fsdp=2),
        microbatches=M,
        **options,
    )
    return pipe.jit(pipe.value_and_grad).lower(pipe.shard(init()), batch()).as_text()


def test_where_no_axis_divides_rows_the_report_says_what_would_be():
    model = jp.Model(embed, with_sorted_rows, loss)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2), microbatches=M)
    report = pipe.rows(init(), batch())
    assert [f.is_row_wise for f in report.functions] == [True, False, True]
    assert str(report).endswith("No axis divides rows: functions see microbatches of 4 rows.")
    of_one_row = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2), microbatches=B)
    assert all(f.is_row_wise for f in of_one_row.rows(init(), batch()).functions)


@pytest.mark.parametrize("name", ["embed", "layer", "loss"])
@pytest.mark.parametrize("pipeline", ["1f1b", "circular"])
def test_an_error_of_a_function_is_raised_as_it_is(name: str, pipeline: str):
    def fail(*arguments: Any) -> Any:
        raise ValueError("no such thing")

    def failing(w: Any, x: Any, batch: Any) -> Any:
        return fail(w, x, batch)

    functions: dict[str, Any] = {"embed": embed, "layer": layer, "loss": loss, name: failing}
    if name == "embed":
        functions["embed"] = lambda w, batch: fail(w, batch)
    schedule, options = PIPELINES[pipeline]
    sizes = mesh(stage=2, fsdp=2)
    model = jp.Model(**functions)
    pipe = jp.pipeline(model, schedule=schedule, mesh=sizes, microbatches=M, **options)
    with pytest.raises(ValueError, match=r"^no such thing"):
        pipe.jit(pipe.value_and_grad)(pipe.shard(init()), batch())
    report = str(pipe.rows(init(), batch()))
    assert "may mix rows: tracing it alone raised ValueError: no such thing" in report


def test_the_program_of_a_row_wise_model_is_that_without_an_analysis():
    text = lowered()
    assert text == lowered(row_wise=True)
    assert text != lowered(row_wise=False)
    manual = re.findall(r"manual_axes=\{(.*?)\}", text)
    assert any({'"stage"', '"fsdp"'} <= set(axes.split(", ")) for axes in manual)


def test_the_user_may_overrule_the_analysis():
    options: dict[str, Any] = {"schedule": "circular", "mesh": mesh(stage=2, fsdp=2)}
    model = jp.Model(embed, batch_norm, loss)
    trusted = jp.pipeline(model, microbatches=M, row_wise={"layer": True}, **options)
    report = trusted.rows(init(), batch())
    assert not report.whole_microbatches
    assert [f.reason for f in report.functions if f.name == "layer"] == ["as `row_wise` says"]
    value, _ = run(trusted, init())
    wanted, _ = plain(embed, batch_norm, loss, init(), batch())
    assert abs(value[0] - wanted) > 1e-4, "the user's word was taken"
    careful = jp.pipeline(jp.Model(embed, layer, loss), microbatches=M, row_wise=False, **options)
    assert "row_wise embed False, layer False, loss False" in repr(careful)
    check_against_plain((embed, layer, loss), careful)
    assert careful.rows(init(), batch()).seen_rows == 4


@pytest.mark.parametrize(
    ("row_wise", "message"),
    [
        ({"layers": True}, "`row_wise` names 'layers'. The functions of the model are 'embed'"),
        ({"layer": 1}, "Give True or False for all functions, or a dict such as {'layer': True}"),
        ("layer", "Give True or False"),
    ],
)
def test_a_wrong_word_about_rows_is_refused(row_wise: Any, message: str):
    with pytest.raises(ValueError, match=message.replace("{", "\\{")):
        jp.pipeline(
            jp.Model(embed, layer, loss),
            schedule=None,
            mesh=mesh(stage=1),
            microbatches=M,
            row_wise=row_wise,
        )


RATE = 0.25


def dropout_layer(w: Any, x: Any, batch: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 1 - RATE, x.shape)
    return layer(w, jnp.where(kept, x / (1 - RATE), 0), batch)


def noisy_embed(w: Any, batch: Any, key: Any) -> Any:
    return embed(w, batch) + 0.1 * jax.random.normal(key, (*batch["mask"].shape, D))


def noisy_loss(w: Any, x: Any, batch: Any, key: Any) -> Any:
    return loss(w, x + 0.1 * jax.random.normal(key, x.shape), batch)


@pytest.mark.parametrize(
    ("pipeline", "sizes"),
    [
        ("unpipelined", {"stage": 1, "data": 2}),
        ("circular", {"stage": 2, "fsdp": 4}),
        ("zero bubble", {"stage": 2, "data": 2, "fsdp": 2}),
        ("mpmd", {"stage": 2, "fsdp": 2}),
    ],
)
def test_one_key_draws_the_same_on_every_mesh(pipeline: str, sizes: dict[str, int]):
    model, key = jp.Model(noisy_embed, dropout_layer, noisy_loss), jax.random.key(3)
    reference = jp.pipeline(model, schedule=None, mesh=mesh(stage=1), microbatches=M)
    schedule, options = PIPELINES[pipeline]
    pipe = jp.pipeline(model, schedule=schedule, mesh=mesh(**sizes), microbatches=M, **options)
    close(run(pipe, init(), key), run(reference, init(), key))


def rematerialized(w: Any, x: Any, batch: Any, key: Any) -> Any:
    first, second = jax.random.split(key)
    x = jax.checkpoint(lambda x: dropout_layer(w, x, batch, first))(x)
    same_for_all = jax.random.bernoulli(second, 0.5, (T, D))
    return jnp.where(jax.jit(jax.random.bernoulli, static_argnums=2)(key, 0.9, x.shape), x, 0) + (
        0.1 * same_for_all.astype(jnp.float32)
    )


def draws_in_a_loop(w: Any, x: Any, batch: Any, key: Any) -> Any:
    def step(x: Any, key: Any) -> Any:
        return dropout_layer(w, x, batch, key), None

    return jax.lax.scan(step, x, jax.random.split(key, 2))[0]


def shuffled(w: Any, x: Any, batch: Any, key: Any) -> Any:
    return x + layer(w, jax.random.permutation(key, x), batch)


@pytest.mark.parametrize(
    ("draw", "loss", "verdict"),
    [
        (rematerialized, loss, "draws for all rows: one key draws the same on every mesh"),
        (dropout_layer, masked_mean, "draws for all rows: one key draws the same on every mesh"),
        (draws_in_a_loop, loss, "may mix rows: it draws random numbers in a loop or a branch"),
        (shuffled, loss, "may mix rows: "),
    ],
)
def test_draws_in_branches_are_those_of_all_rows(draw: Callable, loss: Callable, verdict: str):
    model, key = jp.Model(embed, draw, loss), jax.random.key(4)
    reference = jp.pipeline(model, schedule=None, mesh=mesh(stage=1), microbatches=M)
    for sizes in ({"stage": 2, "data": 2, "fsdp": 2}, {"stage": 2, "fsdp": 4}):
        pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(**sizes), microbatches=M)
        close(run(pipe, init(), key), run(reference, init(), key))
        assert f"layer  {verdict}" in str(pipe.rows(init(), batch()))


def test_a_device_draws_and_computes_for_its_own_rows_alone():
    """No array of all rows is in the program, neither of bits nor of activations."""
    model = jp.Model(embed, dropout_layer, loss)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2, fsdp=2), microbatches=M)
    step = pipe.jit(pipe.value_and_grad)
    text = step.lower(pipe.shard(init()), batch(), jax.random.key(0)).as_text()
    assert f"tensor<{B // M // 2}x{T}x{D}xui32>" in text
    assert f"tensor<{B // M}x{T}x{D}x" not in text


def test_a_key_that_is_not_used_asks_for_nothing():
    model = jp.Model(embed, lambda w, x, batch, key: layer(w, x, batch), loss)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2, fsdp=2), microbatches=M)
    assert not pipe.rows(init(), batch()).whole_microbatches


def test_sums_with_weights_are_row_wise_and_other_pairs_are_not():
    def weighted(w: Any, x: Any, batch: Any) -> Any:
        return jp.Weighted(
            jnp.sum(token_losses(w, x, batch) * batch["mask"]), jnp.sum(batch["mask"])
        )

    def unlike(w: Any, x: Any, batch: Any) -> Any:
        return jp.Weighted(jnp.mean(token_losses(w, x, batch)), jnp.sum(batch["mask"]))

    found = {}
    for f in (weighted, unlike):
        model = jp.Model(embed, layer, f)
        pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2, fsdp=2), microbatches=M)
        found[f] = pipe.rows(init(), batch()).functions[-1]
    assert found[weighted].is_row_wise
    assert found[unlike].reason == "the total and the weight do not both add up over rows"


def weighted_over_rows(w: Any, x: Any, batch: Any) -> Any:
    """The total of a microbatch depends on all its rows, and so does its weight."""
    largest = jnp.max(jnp.sum(batch["mask"], 1))
    return jp.Weighted(largest * masked_mean(w, x, batch), largest)


@pytest.mark.parametrize("pipeline", ["circular", "1f1b", "mpmd"])
def test_a_weighted_loss_that_mixes_rows_is_that_of_whole_microbatches(pipeline: str):
    model = jp.Model(embed, layer, weighted_over_rows)
    reference = jp.pipeline(model, schedule=None, mesh=mesh(stage=1), microbatches=M)
    schedule, options = PIPELINES[pipeline]
    sizes = mesh(stage=2, fsdp=2)
    pipe = jp.pipeline(model, schedule=schedule, mesh=sizes, microbatches=M, **options)
    close(run(pipe, init()), run(reference, init()))


def test_a_metric_that_is_no_mean_is_named():
    def with_count(w: Any, x: Any, batch: Any) -> Any:
        return loss(w, x, batch), {"tokens": jnp.sum(batch["mask"])}

    def with_total(w: Any, x: Any, batch: Any) -> Any:
        return layer(w, x, batch), {"total": jnp.sum(x)}

    model = jp.Model(embed, with_total, with_count)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2, fsdp=2), microbatches=M)
    reasons = [f.reason for f in pipe.rows(init(), batch()).functions[1:]]
    assert reasons == [
        "aux['total'] is no mean over rows: a sum over rows",
        "metrics['tokens'] is no mean over rows: a sum over rows",
    ]
    check_against_plain((embed, with_total, with_count), pipe)


def with_encoder() -> tuple[jp.Model, Any]:
    params = init()
    layers = {"encoder": params["layers"][:2], "decoder": params["layers"][2:]}
    kinds = {"encoder": layer, "decoder": with_rolled_rows}
    return jp.Model(embed, kinds, loss), params | {"layers": layers}


def with_shared() -> tuple[jp.Model, Any]:
    def mixing(w: Any, x: Any, batch: Any) -> Any:
        return batch_norm(w["layer"], x @ w["shared"]["mix"], batch)

    mix = normal(jax.random.key(7), D, D)
    return jp.Model(embed, mixing, masked_mean, shared=True), init() | {"shared": {"mix": mix}}


def with_rolling_layers() -> tuple[jp.Model, Any]:
    return jp.Model(embed, with_rolled_rows, masked_mean), init()


def with_a_counter_in_x() -> tuple[jp.Model, Any]:
    """x has a leaf without rows, to which layers add a mean, and the loss adds that."""

    def embed_both(w: Any, batch: Any) -> Any:
        return {"x": embed(w, batch), "total": jnp.float32(0)}

    def add_mean(w: Any, both: Any, batch: Any) -> Any:
        x = layer(w, both["x"], batch)
        return {"x": x, "total": both["total"] + 0.1 * jnp.mean(x * x)}

    def loss_of_both(w: Any, both: Any, batch: Any) -> Any:
        return masked_mean(w, both["x"], batch) + both["total"]

    return jp.Model(embed_both, add_mean, loss_of_both), init()


def with_zeros_in_x() -> tuple[jp.Model, Any]:
    """The embedding fills a leaf of x with zeros, to which layers add rows."""

    def embed_both(w: Any, batch: Any) -> Any:
        x = embed(w, batch)
        return {"x": x, "sum": jnp.zeros_like(x)}

    def add_rows(w: Any, both: Any, batch: Any) -> Any:
        x = layer(w, both["x"], batch)
        return {"x": x, "sum": both["sum"] + x}

    def loss_of_both(w: Any, both: Any, batch: Any) -> Any:
        return masked_mean(w, both["x"] + both["sum"], batch)

    return jp.Model(embed_both, add_rows, loss_of_both), init()


UNEVEN = {"layers_per_stage": (3, 1)}


@pytest.mark.parametrize(
    ("make", "pipeline", "options"),
    [
        (with_encoder, "circular", {}),
        (with_encoder, "zero bubble", {}),
        pytest.param(with_encoder, "mpmd", {}, marks=pytest.mark.slow),
        (with_shared, "1f1b", {}),
        pytest.param(with_shared, "circular", {}, marks=pytest.mark.slow),
        pytest.param(with_shared, "mpmd", {}, marks=pytest.mark.slow),
        (with_rolling_layers, "circular", UNEVEN),
        pytest.param(with_rolling_layers, "1f1b", UNEVEN, marks=pytest.mark.slow),
        (with_a_counter_in_x, "1f1b", {}),
        (with_zeros_in_x, "1f1b", {}),
        pytest.param(with_a_counter_in_x, "circular", {}, marks=pytest.mark.slow),
    ],
)
def test_models_of_every_form_are_those_of_a_mesh_that_divides_no_rows(
    make: Callable, pipeline: str, options: dict[str, Any]
):
    model, params = make()
    reference = jp.pipeline(model, schedule=None, mesh=mesh(stage=1), microbatches=M)
    schedule, more = PIPELINES[pipeline]
    sizes = mesh(stage=2, fsdp=2)
    pipe = jp.pipeline(model, schedule=schedule, mesh=sizes, microbatches=M, **options, **more)
    close(run(pipe, params), run(reference, params))


@pytest.mark.parametrize(
    "pipeline",
    [
        "unpipelined",
        pytest.param("circular", marks=pytest.mark.slow),
        "zero bubble",
        pytest.param("mpmd", marks=pytest.mark.slow),
    ],
)
def test_frozen_parameters_of_functions_that_mix_rows(pipeline: str):
    functions = embed, batch_norm, contrastive
    schedule, options = PIPELINES[pipeline]
    pipe = jp.pipeline(
        jp.Model(*functions),
        schedule=schedule,
        mesh=mesh(stage=2, fsdp=2),
        microbatches=M,
        frozen=lambda path, leaf: "square" in path or "embed" in path,
        **options,
    )
    value, grads = run(pipe, init())
    check_against_plain(
        functions,
        jp.pipeline(jp.Model(*functions), schedule=None, mesh=mesh(stage=1), microbatches=M),
    )
    wanted, wanted_grads = WANTED[functions]
    close(value, wanted)
    assert grads["embed"] is None
    close(grads["head"], wanted_grads["head"])
    for got, layer in zip(grads["layers"], wanted_grads["layers"], strict=True):
        close(got["scale"], layer["scale"])


@pytest.mark.parametrize("engine", ["auto", pytest.param("mpmd", marks=pytest.mark.slow)])
def test_slices_of_sequences_mix_the_rows_of_a_microbatch(engine: str):
    def mixing(w: Any, x: Any, batch: Any, past: Any) -> Any:
        keys, past = past.append(x @ w["square"])
        scores = jnp.where(past.causal_mask(x.shape[1]), x @ keys.swapaxes(1, 2), -jnp.inf)
        y = jax.nn.softmax(scores) @ keys
        return x + y - y.mean(0), past

    def loss_of_slice(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((x @ w["w"]) ** 2)

    def embed_slice(w: Any, batch: Any) -> Any:
        return w[batch["tokens"]]

    model = jp.Model(embed_slice, mixing, loss_of_slice)
    cut = {"tokens": batch()["tokens"][:, :T]}

    def value_and_grads(**sizes: int) -> Any:
        pipe = jp.pipeline(
            model, schedule="seq1f1b", slices=2, mesh=mesh(**sizes), microbatches=M, engine=engine
        )
        value, grads = pipe.jit(pipe.value_and_grad)(pipe.shard(init()), cut)
        return jax.tree.map(float, value), pipe.unshard(grads)

    close(value_and_grads(stage=2, fsdp=2), value_and_grads(stage=2))


@pytest.mark.parametrize("schedule", ["1f1b", "circular"])
def test_parameters_may_be_divided_over_other_axes_too(schedule: str):
    functions = embed, batch_norm, masked_mean
    pipe = jp.pipeline(
        jp.Model(*functions),
        schedule=schedule,
        mesh=mesh(stage=2, fsdp=2, tensor=2),
        microbatches=M,
        param_specs=lambda path, leaf: P(None, "tensor") if "square" in path else None,
    )
    check_against_plain(functions, pipe)


def test_two_axes_divide_rows_beside_layers_that_gather_their_own_parameters():
    """XLA of jax 0.12 aborted on manual axes on both sides of `stage` in the mesh."""
    functions = embed, batch_norm, masked_mean
    sizes = mesh(stage=2, data=2, fsdp=2)
    options: dict[str, Any] = {"schedule": "circular", "gather": "layer", "microbatches": M}
    check_against_plain(functions, jp.pipeline(jp.Model(*functions), mesh=sizes, **options))


@pytest.mark.parametrize("schedule", ["1f1b", "circular"])
def test_explicit_axes_divide_rows_too(schedule: str):
    explicit = jax.make_mesh((2, 2), ("stage", "fsdp"), devices=jax.devices()[:4])
    assert AxisType.Explicit in explicit.axis_types
    functions = embed, batch_norm, contrastive
    pipe = jp.pipeline(jp.Model(*functions), schedule=schedule, mesh=explicit, microbatches=M)
    check_against_plain(functions, pipe)


def test_without_a_pipeline_explicit_axes_divide_rows_of_functions_that_treat_them_one_by_one():
    explicit = jax.make_mesh((1, 2, 2), ("stage", "data", "fsdp"), devices=jax.devices()[:4])

    def embed_by_product(w: Any, batch: Any) -> Any:  # a look-up has no sharding of its own
        return jax.nn.one_hot(batch["tokens"][:, :-1], V) @ w

    functions = embed_by_product, layer, loss
    pipe = jp.pipeline(jp.Model(*functions), schedule=None, mesh=explicit, microbatches=M)
    check_against_plain(functions, pipe)


@pytest.mark.parametrize(("schedule", "engine"), [(None, "auto"), ("1f1b", "mpmd")])
def test_explicit_axes_are_refused_where_xla_would_divide_rows(schedule: Any, engine: str):
    explicit = jax.make_mesh((2, 2), ("stage", "fsdp"), devices=jax.devices()[:4])
    model = jp.Model(embed, batch_norm, loss)
    pipe = jp.pipeline(model, schedule=schedule, engine=engine, mesh=explicit, microbatches=M)
    message = r"whole microbatches \(layer: .*test_rows.py:.* fsdp of `mesh`, .* are explicit"
    with pytest.raises(ValueError, match=message):
        pipe.jit(pipe.value_and_grad)(pipe.shard(init()), batch())


def test_a_sum_in_x_is_refused_where_devices_would_gather_it():
    def embed_both(w: Any, batch: Any) -> Any:
        return {"x": embed(w, batch), "count": jnp.sum(batch["mask"])}

    def loss_of_both(w: Any, both: Any, batch: Any) -> Any:
        return masked_mean(w, both["x"], batch) * both["count"]

    model = jp.Model(
        embed_both, lambda w, both, b: both | {"x": layer(w, both["x"], b)}, loss_of_both
    )
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2, fsdp=2), microbatches=M)
    with pytest.raises(
        ValueError, match="x has a leaf that is neither rows nor a mean: a sum over"
    ):
        pipe.jit(pipe.value_and_grad)(pipe.shard(init()), batch())


def test_the_houses_llama_is_row_wise_and_its_loss_adds_up():
    config = small_llama()
    embed, layer, loss = models.llama(
        config,
        attention=dot_product_attention,
        constrain=sharding.no_constraint,
        num_vocab_tiling=2,  # with a derivative of its own
    )
    shapes = models.llama_weights(config)
    layers = jax.tree.map(lambda w: jnp.zeros((2, *w.shape)), shapes["layer"])
    boundary = jax.tree.map(lambda w: jnp.zeros(w.shape), {k: shapes[k] for k in ("embed", "head")})

    def of_rows(num_rows: int) -> dict[str, Any]:
        ids = jax.ShapeDtypeStruct((num_rows, 8), jnp.int32)
        weights = jax.ShapeDtypeStruct((num_rows, 8), jnp.float32)
        names = ("tokens", "positions", "segment_ids", "targets")
        return dict.fromkeys(names, ids) | {"target_weights": weights}

    def relations(function: Callable, weights: Any, has_x: bool) -> Any:
        def traced(num_rows: int) -> Any:
            x = [jax.ShapeDtypeStruct((num_rows, 8, 16), jnp.float32)] if has_x else []
            return jax.make_jaxpr(function)(weights, *x, of_rows(num_rows))

        count = 5 + has_x
        known = [*[Whole()] * len(jax.tree.leaves(weights)), *[Rows(0)] * count]
        return compare(traced(4), traced(1), known, 4)

    assert relations(embed, boundary["embed"], False) == [Rows(0)]
    assert relations(lambda w, x, b: stack(layer)(w, x, b, ())[0], layers, True) == [Rows(0)]
    found = relations(loss, boundary, True)
    assert not any(isinstance(relation, Mixed) for relation in found)
    assert found[0] == Sum(0)
