"""Schedules with slices in the front door: one model runs slices and whole sequences."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.autodiff import keep, recompute
from jaxpipe.schedules import build, check, parse, peak_activations
from jaxpipe.schedules.lock_step import tick_tables

D, V, B, T = 8, 12, 8, 12


def normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / shape[0] ** 0.5


def init(num_layers: int = 4) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), num_layers + 2)
    names = ("q", "k", "v", "up")
    layers = [
        dict(zip(names, (normal(k, D, D) for k in jax.random.split(key, 4)), strict=True))
        for key in keys[2:]
    ]
    return {"embed": normal(keys[0], V, D), "layers": layers, "head": normal(keys[1], D, V)}


def batch(length: int = T) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1), 3)
    tokens = jax.random.randint(keys[0], (B, length + 1), 0, V)
    weights = jax.random.uniform(keys[1], (B, length))
    scale = jax.random.uniform(keys[2], (B,))
    return {"x": tokens[:, :-1], "y": tokens[:, 1:], "weights": weights, "scale": scale}


def embed(w: Any, batch: Any) -> Any:
    return w[batch["x"]] * batch["scale"][:, None, None]


def layer(w: Any, x: Any, batch: Any, past: Any) -> Any:
    q, k, v = (x @ w[name] for name in ("q", "k", "v"))
    (keys, values), past = past.append((k, v))
    scores = q @ jnp.swapaxes(keys, 1, 2) / D**0.5
    scores = jnp.where(past.causal_mask(x.shape[1]), scores, -jnp.inf)
    x = x + jax.nn.softmax(scores) @ values
    h = jnp.tanh(x @ w["up"])
    return x + h, {"size": jnp.mean(h * h), "loss": 0.01 * jnp.mean(h * h)}, past


def loss(w: Any, x: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(x @ w)
    losses = -jnp.sum(logits * jax.nn.one_hot(batch["y"], V), axis=-1) * batch["weights"]
    return jp.Weighted(jnp.sum(losses), jnp.sum(batch["weights"]))


def mean_loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean((x @ w) ** 2), {"largest": jnp.mean(jnp.max(x, axis=-1))}


MODEL = jp.Model(embed, layer, loss)


def mesh(**sizes: int) -> Any:
    count = int(np.prod(list(sizes.values())))
    return jp.make_mesh(sizes, devices=jax.devices()[:count])


def sliced(
    slices: int, model: jp.Model = MODEL, microbatches: int = 4, **options: Any
) -> jp.PipelinedModel:
    sizes = {name: options.pop(name) for name in ("stage", "data", "fsdp") if name in options}
    return jp.pipeline(
        model,
        schedule="seq1f1b",
        slices=slices,
        mesh=mesh(**sizes),
        microbatches=microbatches,
        **options,
    )


def shared_layer(w: Any, x: Any, batch: Any, past: Any) -> Any:
    return layer(w["layer"] | {"v": w["shared"]}, x, batch, past)


def silent_layer(w: Any, x: Any, batch: Any, past: Any) -> Any:
    """Carries keys alone, and returns no auxiliary losses."""
    keys, past = past.append(x @ w["k"])
    scores = jnp.where(past.causal_mask(x.shape[1]), x @ jnp.swapaxes(keys, 1, 2), -jnp.inf)
    return jnp.tanh(x + jax.nn.softmax(scores) @ keys @ w["up"]), past


SHARED = replace(MODEL, layer=shared_layer, shared=True)
KINDS = jp.Model(embed, {"first": layer, "second": silent_layer}, mean_loss)
ROWS = {
    "2 ranks, 2 slices, uneven": ({"stage": 2, "slices": 2}, MODEL, 3),
    **{
        f"{ranks} ranks, {slices} slices": ({"stage": ranks, "slices": slices}, MODEL, 8)
        for ranks in (2, 3, 4, 8)
        for slices in (1, 2, 3)
    },
    "data and fsdp": ({"stage": 2, "data": 2, "fsdp": 2, "slices": 3, "microbatches": 2}, MODEL, 4),
    "everything is stored": ({"stage": 2, "slices": 4, "remat": keep}, MODEL, 4),
    "shared": ({"stage": 2, "slices": 2}, SHARED, 4),
    "two kinds": ({"stage": 2, "slices": 3}, KINDS, 4),
    "frozen": ({"stage": 2, "slices": 2, "frozen": lambda path, _: "'k'" in path}, MODEL, 4),
}
# Programs of every rank: stages of unequal lengths are no padded ones, and kinds are only some.
ROWS |= {
    f"mpmd, {name}": (options | {"engine": "mpmd"}, model, num_layers)
    for name, (options, model, num_layers) in {
        **{
            f"{ranks} ranks, {slices} slices": ({"stage": ranks, "slices": slices}, MODEL, 5)
            for ranks in (2, 4)
            for slices in (2, 3)
        },
        **{name: row for name, row in ROWS.items() if "slices" not in name},
    }.items()
}
IN_FIRST_JOB = "2 ranks, 2 slices, uneven", "mpmd, 2 ranks, 3 slices"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_FIRST_JOB else pytest.mark.slow) for n in ROWS]
)
def test_slices_compute_what_whole_sequences_do(name: str):
    options, model, num_layers = ROWS[name]
    params = init(num_layers)
    if model is SHARED:
        params |= {"shared": normal(jax.random.key(3), D, D)}
        params["layers"] = [{n: w[n] for n in w if n != "v"} for w in params["layers"]]
    if model is KINDS:
        params["layers"] = {"first": params["layers"][:1], "second": params["layers"][1:]}
    sliced(model=model, **options).check(params, batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "engine"), [("circular", "auto"), ("zero_bubble_h1", "auto"), ("1f1b", "mpmd")]
)
def test_the_same_model_runs_whole_sequences_with_every_engine(schedule, engine):
    pipe = jp.pipeline(MODEL, schedule=schedule, mesh=mesh(stage=2), microbatches=4, engine=engine)
    pipe.check(init(), batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "remat"), [("scheduled", recompute), ("scheduled", keep), ("mpmd", recompute)]
)
def test_backwards_of_slices_may_be_split(engine, remat):
    whole = build("seq1f1b", ranks=2, microbatches=4, slices=3)
    text = re.sub(r"(\d+)B(\d+s\d+)", r"\1I\2 \1W\2", str(whole))
    schedule = check(parse(text))
    options: dict[str, Any] = {"engine": engine, "remat": remat}
    pipe = jp.pipeline(MODEL, schedule=schedule, mesh=mesh(stage=2), microbatches=4, **options)
    pipe.check(init(), batch())


@pytest.mark.parametrize("engine", ["scheduled", "mpmd"])
def test_a_value_alone_runs_the_forwards_of_slices(engine):
    pipe, plain = (
        sliced(3, stage=2, engine=engine),
        jp.pipeline(MODEL, schedule=None, mesh=mesh(stage=1), microbatches=4),
    )
    found, wanted = (
        jax.tree.map(float, p.jit(p.value)(p.shard(init()), batch())) for p in (pipe, plain)
    )
    np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(wanted), rtol=1e-5)


def test_slices_run_where_64_bits_are_enabled():
    with jax.enable_x64(True):
        sliced(3, stage=2).check(init(), batch())


def test_a_whole_sequence_is_plain_attention():
    w, x = init()["layers"][0], normal(jax.random.key(5), 2, T, D)
    q, k, v = (x @ w[name] for name in ("q", "k", "v"))
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), q @ jnp.swapaxes(k, 1, 2), -jnp.inf)
    h = x + jax.nn.softmax(scores / D**0.5) @ v
    wanted = h + jnp.tanh(h @ w["up"])
    found, _ = MODEL.layer_functions[0](w, x, {}, ())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_slices_need_less_memory_than_1f1b():
    def wide(w: Any, x: Any, batch: Any, past: Any) -> Any:
        x, _, past = layer(w, x, batch, past)
        for _ in range(8):
            x = jnp.tanh(x @ w["up"])
        return x, past

    model, given = replace(MODEL, layer=wide), batch(64)

    def temporary(**options: Any) -> int:
        pipe = jp.pipeline(model, mesh=mesh(stage=4), microbatches=8, remat=keep, **options)
        stored = pipe.shard(init())
        compiled = jax.jit(pipe.value_and_grad).lower(stored, given).compile()
        analysis: Any = compiled.memory_analysis()
        return analysis.temp_size_in_bytes

    whole, two, four = (
        temporary(schedule="1f1b"),
        temporary(schedule="seq1f1b", slices=2),
        temporary(schedule="seq1f1b", slices=4),
    )
    assert four < two < whole


def test_the_estimate_counts_slices_and_what_they_carry():
    params, rows = jax.eval_shape(init), B // 4
    whole = jp.pipeline(MODEL, schedule="1f1b", mesh=mesh(stage=4), microbatches=4)
    one_input = rows * T * D * 4  # float32
    pipe = sliced(3, stage=4)
    entries = []
    for each in (whole, pipe):
        assert each.ticks is not None
        slots = tick_tables(each.ticks).num_slots
        waiting = slots["inputs"] + slots["cotangents"] + 1
        entries.append(slots["residuals_for_backward"] + waiting)
    assert whole.memory(params, batch()).ranks[0].activations == entries[0] * one_input
    states = (slots["past"] + slots["past_cotangents"]) * 2 * one_input  # keys and values
    inputs = entries[1] * one_input / 3
    assert pipe.memory(params, batch()).ranks[0].activations == pytest.approx(states + inputs)
    programs = sliced(3, stage=4, engine="mpmd")
    assert programs.schedule is not None
    inputs = (max(peak_activations(programs.schedule)) + 3) * one_input / 3
    most = max(rank.activations for rank in programs.memory(params, batch()).ranks)
    assert most == pytest.approx(states + inputs)


def test_slices_of_a_microbatch_stay_on_one_rank():
    text = "0F0s0 0F0s1 1F0s1 1B0s1 0B0s1 0B0s0\n1F0s0 1B0s0"
    with pytest.raises(ValueError, match="slices of microbatch 0 of stage 1 on ranks 0 and 1"):
        jp.pipeline(MODEL, schedule=parse(text), mesh=mesh(stage=2), microbatches=1, engine="mpmd")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer": lambda w, x, batch: x},
            "`layer` has no parameter `past`, by which a",
        ),
        (
            {"layer": lambda w, x, batch, past, key: (x, past.append(x)[1])},
            "takes a dropout key. Masks that are drawn for slices are not those of whole",
        ),
        ({"engine": "circular"}, "`engine` is 'circular', which runs no other"),
    ],
)
def test_pipelines_that_cannot_run_slices_are_refused(change, message):
    engine = change.pop("engine", "auto")
    with pytest.raises(ValueError, match=message):
        sliced(2, replace(MODEL, **change), stage=2, engine=engine)


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (
            {},
            batch(10),
            r"3 slices, which do not divide their lengths: `batch\['weights'\]` 10",
        ),
        (
            {},
            batch() | {"x": batch(T + 1)["x"]},
            r"different lengths .*`batch\['x'\]` 13",
        ),
        ({"sliced_leaves": {"x": True}}, batch(), "`Model.sliced_leaves` is no prefix"),
        (
            {"layer": lambda w, x, batch, past: (x, past)},
            batch(),
            r"`layer` takes `past` and must return it last, as \(x, past\)",
        ),
        (
            {"layer": lambda w, x, batch, past: (x, past.append(x)[1].append(x)[1])},
            batch(),
            "`past.append` was called twice in one layer",
        ),
        (
            {"sliced_leaves": True},
            batch(),
            r"`Model.sliced_leaves` is true for `batch\['scale'\]`, which has no dim 1",
        ),
        (
            {"layer": lambda w, x, batch, past: (x, past.append(x[:, ::2])[1])},
            batch(),
            r"`past` is given what has no tokens in dim 1: a slice selects tokens",
        ),
        (
            {"layer": lambda w, x, batch, past: (x, past.append(x[0, :, 0])[1])},
            batch(),
            r"a leaf of shape \(12,\). Give leaves \[b, t, ...\]",
        ),
    ],
)
def test_batches_and_layers_that_do_not_suit_are_refused(change, given, message):
    pipe = sliced(3, replace(MODEL, **change), stage=2)
    params = jax.eval_shape(init)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(pipe.value_and_grad, pipe.shapes(params), given)


def with_positions(w: Any, batch: Any) -> Any:
    return embed(w, batch) + jnp.arange(batch["x"].shape[1])[:, None] / T


def shifted(w: Any, batch: Any) -> Any:
    x = embed(w, batch)
    return x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def shifted_loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean((x @ w)[:, :-1] * jax.nn.one_hot(batch["x"][:, 1:], V))


def appending(change: Any) -> Any:
    """Returns a layer whose x is changed by a function of its x and of the positions."""

    def changed(w: Any, x: Any, batch: Any, past: Any) -> Any:
        y, aux, new = layer(w, x, batch, past)
        return y + change(x, past), aux, new

    return changed


def attention_to_all(w: Any, x: Any, batch: Any, past: Any) -> Any:
    keys, past = past.append(x @ w["k"])
    return x + jax.nn.softmax(x @ jnp.swapaxes(keys, 1, 2)) @ keys, past


def attention_with_positions(w: Any, x: Any, batch: Any, past: Any) -> Any:
    at = jnp.sin(past.positions(x.shape[1]).astype(x.dtype)[:, None])
    keys, past = past.append(x @ w["k"] + at)
    return x + jax.nn.softmax((x @ w["q"] + at) @ jnp.swapaxes(keys, 1, 2)) @ keys, past


def attention_by(mask: Any) -> Any:
    """Returns a layer with a mask, of what is appended beside keys, of positions and the past."""

    def masked(w: Any, x: Any, batch: Any, past: Any) -> Any:
        at = past.positions(x.shape[1])
        of_keys = jnp.broadcast_to(at, x.shape[:2])
        (keys, of_keys), past = past.append((x @ w["k"], of_keys))
        scores = x @ w["q"] @ jnp.swapaxes(keys, 1, 2)
        scores = jnp.where(mask(of_keys[:, None], at[:, None], past), scores, -1e9)
        return x + jax.nn.softmax(scores) @ keys, past

    return masked


def loss_of_keys(w: Any, x: Any, batch: Any, past: Any) -> Any:
    keys, past = past.append(x @ w["k"])
    scores = jnp.where(past.causal_mask(x.shape[1]), x @ jnp.swapaxes(keys, 1, 2), -jnp.inf)
    return x + jax.nn.softmax(scores) @ keys, {"loss": jnp.mean(keys**2)}, past


MIXING = {
    "positions in embed": ({"embed": with_positions}, "what embed returns .*tokens are counted"),
    "embed shifts": ({"embed": shifted}, r"what embed returns .*\(test_slices.py:\d+\)"),
    "loss shifts": ({"loss": shifted_loss}, "what loss returns .*slice"),
    "a sum as loss": (
        {"loss": lambda w, x, batch: jnp.sum((x @ w) ** 2)},
        "what loss returns .*the loss is no mean over tokens",
    ),
    "the last token": (
        {"loss": lambda w, x, batch: jnp.mean((x @ w)[:, -1] ** 2)},
        "what loss returns .*`slice` depends on the number of tokens",
    ),
    "a maximum as metric": (
        {"loss": lambda w, x, batch: (jnp.mean(x @ w), {"largest": jnp.max(x)})},
        r"what loss returns .*metrics\['largest'\]",
    ),
    "a mean in a layer": (
        {"layer": appending(lambda x, past: jnp.mean(x, axis=1, keepdims=True))},
        "what layer returns .*tokens",
    ),
    "positions in a layer": (
        {"layer": appending(lambda x, past: jnp.arange(x.shape[1])[:, None] / T)},
        "what layer returns .*tokens are counted",
    ),
    "no mask": ({"layer": attention_to_all}, "what layer returns .*later tokens append"),
    "positions and no mask": ({"layer": attention_with_positions}, "later tokens append"),
    "a mask of carried positions": (
        {"layer": attention_by(lambda keys, queries, past: keys <= queries)},
        r"`reduce_max` reads what later tokens append, .*\(test_slices.py:\d+\)",
    ),
    "a mask the wrong way round": (
        {"layer": attention_by(lambda keys, queries, past: jnp.arange(T) >= queries)},
        "no mask before it that hides them",
    ),
    "a window alone": (
        {"layer": attention_by(lambda keys, queries, past: abs(jnp.arange(T) - queries) < 3)},
        "no mask before it that hides them",
    ),
    "a prefix without a mask": (
        {
            "layer": attention_by(
                lambda keys, queries, past: (jnp.arange(T) < 6) | past.causal_mask(len(queries))
            )
        },
        "later tokens append",
    ),
    "a mean of all keys": ({"layer": loss_of_keys}, "`reduce_sum` reads what later tokens append"),
}


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_tokens_are_refused_by_name(name):
    change, message = MIXING[name]
    pipe = sliced(3, replace(MODEL, **change), stage=2)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(pipe.value_and_grad, pipe.shapes(jax.eval_shape(init)), batch())


def linear_attention(w: Any, x: Any, batch: Any, past: Any) -> Any:
    """Divides by the number of all positions."""
    (k, v), past = past.append((x @ w["k"], x @ w["v"]))
    scores = jnp.where(past.causal_mask(x.shape[1]), x @ w["q"] @ jnp.swapaxes(k, 1, 2), 0)
    return x + scores @ v / k.shape[1], past


def test_the_length_of_the_past_is_not_read_where_it_grows():
    model = replace(MODEL, layer=linear_attention)
    sliced(3, model, stage=2).check(init(), batch())
    pipe = sliced(3, model, stage=2, engine="mpmd")
    message = r"`div` is given a number that depends on the length .*\(test_slices.py:\d+\)"
    with pytest.raises(ValueError, match=message):
        pipe.jit(pipe.value)(pipe.shard(init()), batch())


def test_outputs_that_mix_tokens_are_refused_by_name():
    model = replace(MODEL, output=lambda w, x, batch: jnp.cumsum(x @ w, axis=1))
    pipe = sliced(3, model, stage=2)
    with pytest.raises(ValueError, match=r"what output returns .*tokens"):
        jax.eval_shape(pipe.apply, pipe.shapes(jax.eval_shape(init)), batch())


@pytest.mark.parametrize(
    "positions",
    [
        lambda x, past: past.positions(x.shape[1])[:, None] / T,
        lambda x, past: (past.offset + jnp.arange(x.shape[1]))[:, None] / T,
        lambda x, past: jax.lax.dynamic_slice_in_dim(
            jnp.sin(jnp.arange(2.0 * T)), past.offset, x.shape[1]
        )[:, None],
    ],
)
def test_positions_of_slices_are_those_of_their_sequences(positions):
    sliced(3, replace(MODEL, layer=appending(positions)), stage=2).check(init(), batch())


def flat_loss(w: Any, x: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(x.reshape(-1, D) @ w)
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(batch["y"].reshape(-1), V), axis=-1))


def chunked_loss(w: Any, x: Any, batch: Any) -> Any:
    """Adds up chunks of two tokens in the carry of a loop."""
    cut = lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, 2, *a.shape[2:]), 1, 0)  # noqa: E731

    def chunk(total: Any, part: Any) -> Any:
        logits = jax.nn.log_softmax(part[0] @ w)
        return total + jnp.sum(logits * jax.nn.one_hot(part[1], V)), None

    total, _ = jax.lax.scan(chunk, jnp.float32(0), (cut(x), cut(batch["y"])))
    return -total / batch["y"].size


def biased_layer(w: Any, x: Any, batch: Any, past: Any) -> Any:
    """Adds a bias for each of the T positions to its scores."""
    (k, v), past = past.append((x @ w["k"], x @ w["v"]))
    scores = x @ w["q"] @ jnp.swapaxes(k, 1, 2) + jnp.linspace(-1.0, 1.0, T)
    scores = jnp.where(past.causal_mask(x.shape[1]), scores, -jnp.inf)
    return x + jax.nn.softmax(scores) @ v @ w["up"], past


def with_mask_of_numbers(w: Any, x: Any, batch: Any, past: Any) -> Any:
    mask = jnp.where(np.tri(T, dtype=bool), 0.0, -1e9)
    mask = jax.lax.dynamic_slice_in_dim(mask, past.offset, x.shape[1])
    keys, past = past.append(x @ w["k"])
    scores = x @ w["q"] @ jnp.swapaxes(keys, 1, 2) + mask
    return x + jax.nn.softmax(scores) @ keys, past


SLICEABLE: dict[str, Any] = {
    "rows are flattened": {"loss": flat_loss},
    "a loss in chunks": {"loss": chunked_loss},
    "the length is known": {"layer": biased_layer},
    "a mask of numbers": {"layer": with_mask_of_numbers},
    "two masks": {
        "layer": attention_by(
            lambda keys, queries, past: (keys > queries - 3) & past.causal_mask(len(queries))
        )
    },
}


@pytest.mark.parametrize("name", SLICEABLE)
def test_functions_that_slices_can_run_are_run(name: str):
    sliced(3, replace(MODEL, **SLICEABLE[name]), stage=2).check(init(), batch())


def test_a_layer_with_past_in_another_place_is_refused():
    with pytest.raises(ValueError, match="`past` must be the fourth parameter"):
        jp.Model(embed, lambda w, past, x, batch: x, loss)


def test_leaves_with_a_sequence_can_be_named():
    given = batch() | {"pixels": jnp.ones((B, 5))}

    def with_pixels(w: Any, batch: Any) -> Any:
        return embed(w, batch) * jnp.sum(batch["pixels"], axis=1)[:, None, None]

    named = {"x": True, "y": True, "weights": True, "scale": False, "pixels": False}
    model = replace(MODEL, embed=with_pixels, sliced_leaves=named)
    sliced(2, model, stage=1).check(init(1), given)
