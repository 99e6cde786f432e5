"""Several kinds of layers under every engine: loss and gradients are those of the plain program."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp

B, D, T, V = 8, 6, 4, 10
DEPTH = 2  # layers that predict further tokens


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def make(seed: int, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def tokens(seed: int, length: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (B, length), 0, V)


def cross_entropy(table: Any, h: Any, targets: Any) -> jax.Array:
    logits = jax.nn.log_softmax(h @ table.T)
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(targets, V), axis=-1))


def attend(q: Any, kv: Any) -> jax.Array:
    return jax.nn.softmax(q @ jnp.swapaxes(kv, -1, -2)) @ kv


class Case(NamedTuple):
    """A model, its parameters and a batch."""

    model: jp.Model
    params: Any
    batch: Any


def encoder_layer(w: Any, x: Any, batch: Any) -> Any:
    h = x["encoder"]
    h = h + jnp.tanh(attend(h, h) @ w["up"]) @ w["down"]
    return x | {"encoder": h}, {"encoder_size": jnp.mean(h * h), "loss": 0.01 * jnp.mean(h * h)}


def decoder_layer(w: Any, x: Any, batch: Any) -> Any:
    h = x["decoder"] + attend(x["decoder"] @ w["query"], x["encoder"])
    return x | {"decoder": h + jnp.tanh(h @ w["mix"])}, {"loss": 0.02 * jnp.mean(h * h)}


def dropout_layer(w: Any, x: Any, batch: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.75, x["encoder"].shape)
    return encoder_layer(w, x | {"encoder": jnp.where(kept, x["encoder"], 0.0)}, batch)


def encoder_decoder(encoder: Any = encoder_layer) -> Case:
    model = jp.Model(
        embed=lambda w, batch: {
            "encoder": w[batch["source"]],
            "decoder": w[batch["target"][:, :-1]],
        },
        layer={"encoder": encoder, "decoder": decoder_layer},
        loss=lambda w, x, batch: (
            cross_entropy(w["embed"], x["decoder"] * w["head"], batch["target"][:, 1:]),
            {"decoder_size": jnp.mean(x["decoder"] ** 2)},
        ),
        tied=True,
    )
    layers = {
        "decoder": [make(20 + i, query=(D, D), mix=(D, D)) for i in range(3)],
        "encoder": [make(10 + i, up=(D, 2 * D), down=(2 * D, D)) for i in range(2)],
    }
    params = {"embed": normal(0, V, D), "layers": layers, "head": jnp.ones(D)}
    return Case(model, params, {"source": tokens(1, T + 1), "target": tokens(2, T + 1)})


def trunk_layer(w: Any, x: Any, batch: Any) -> Any:
    return x | {"h": x["h"] + jnp.tanh(x["h"] @ w)}


def mtp_layer(w: Any, x: Any, batch: Any) -> Any:
    """Stores h for the loss, and makes the h that predicts one token further."""
    ahead = jnp.roll(x["ahead"], -1, axis=1)
    stored = jnp.concatenate([x["mtp"][:, 1:], x["h"][:, None]], axis=1)
    return {"h": x["h"] @ w["h"] + ahead @ w["ahead"], "ahead": ahead, "mtp": stored}


def mtp() -> Case:
    def embed(w: Any, batch: Any) -> Any:
        h = w[batch["tokens"][:, :T]]
        return {"h": h, "ahead": h, "mtp": jnp.zeros((h.shape[0], DEPTH, *h.shape[1:]))}

    def loss(w: Any, x: Any, batch: Any) -> Any:
        hs = [*jnp.moveaxis(x["mtp"], 1, 0), x["h"]]
        losses = [
            cross_entropy(w["embed"], h[:, : T - k], batch["tokens"][:, 1 + k : 1 + T])
            for k, h in enumerate(hs)
        ]
        return losses[0] + 0.3 * jnp.mean(jnp.stack(losses[1:])), {"next_token": losses[0]}

    trunk = jnp.stack([normal(30 + i, D, D) for i in range(4)])  # leaves [L, ...]
    layers = {"trunk": trunk, "mtp": [make(40 + i, h=(D, D), ahead=(D, D)) for i in range(DEPTH)]}
    model = jp.Model(embed, {"trunk": trunk_layer, "mtp": mtp_layer}, loss, tied=True)
    params = {"embed": normal(0, V, D), "layers": layers, "head": ()}
    return Case(model, params, {"tokens": tokens(3, T + 1)})


def vision_tower() -> Case:
    def vision_layer(w: tuple[Any, Any], x: Any, batch: Any) -> Any:
        return x | {"image": x["image"] + jnp.tanh(x["image"] @ w[0] + w[1])}

    def project(w: Any, x: Any, batch: Any) -> Any:
        text = x["text"] + jnp.where(batch["is_image"][..., None], x["image"] @ w, 0.0)
        return x | {"text": text}

    model = jp.Model(
        embed=lambda w, batch: {
            "image": batch["patches"] @ w["patch"],
            "text": w["token"][batch["tokens"][:, :-1]],
        },
        layer={
            "vision": vision_layer,
            "projector": project,
            "language": lambda w, x, batch: x | {"text": x["text"] + jnp.tanh(x["text"] @ w)},
        },
        loss=lambda w, x, batch: cross_entropy(w, x["text"], batch["tokens"][:, 1:]),
    )
    layers = {
        "vision": [(normal(50 + i, 2 * D, 2 * D), normal(55 + i, 2 * D)) for i in range(2)],
        "projector": [normal(60, 2 * D, D)],
        "language": [normal(61 + i, D, D) for i in range(3)],
    }
    params = {"embed": make(70, patch=(3, 2 * D), token=(V, D)), "layers": layers}
    batch = {"patches": normal(5, B, T, 3), "is_image": normal(6, B, T) > 0.3}
    return Case(model, params | {"head": normal(4, V, D)}, batch | {"tokens": tokens(7, T + 1)})


CASES = {"encoder-decoder": encoder_decoder(), "mtp": mtp(), "vision tower": vision_tower()}


def plain(case: Case, params: Any, batch: Any) -> Any:
    """The program that a user would write without a pipeline."""
    model, aux = case.model, {}
    x = model.embed(params["embed"], batch, ())
    for kind, layer in model.layer.items():  # pyright: ignore[reportAttributeAccessIssue]
        for w in params["layers"][kind]:
            x = layer(w, x, batch, ())
            x, new = x if isinstance(x, tuple) else (x, {})
            aux = aux | {name: aux.get(name, 0.0) + value for name, value in new.items()}
    head = {"head": params["head"], "embed": params["embed"]} if model.tied else params["head"]
    loss = model.loss(head, x, batch, ())
    loss, metrics = loss if isinstance(loss, tuple) else (loss, {})
    return loss + aux.pop("loss", 0.0), metrics | aux


@functools.cache
def wanted(name: str) -> Any:
    """Returns ((loss, metrics), gradients) of the whole batch in the plain program."""
    case = CASES[name]
    compute = jax.jit(jax.value_and_grad(lambda p, b: plain(case, p, b), has_aux=True))
    return compute(case.params, case.batch)


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


def run(case: Case, **options: Any) -> tuple[Any, Any]:
    pipe = jp.pipeline(case.model, microbatches=4, **options)
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch))
    value, grads = step(pipe.shard(case.params), case.batch)
    return jax.tree.map(float, value), pipe.unshard(grads)


ROWS = {
    "unpipelined": ("encoder-decoder", None, {"stage": 1}, {}),
    "zero bubble, uneven": ("encoder-decoder", "zero_bubble_h1", {"stage": 2}, {}),
    "mpmd, 1f1b, uneven": ("encoder-decoder", "1f1b", {"stage": 3}, {"engine": "mpmd"}),
    "mpmd, interleaved": ("encoder-decoder", "interleaved_1f1b", {"stage": 2}, {"engine": "mpmd"}),
    "mtp, 1f1b": ("mtp", "1f1b", {"stage": 2}, {"layers_per_stage": "Et*3|tmmL"}),
    "mtp, circular": ("mtp", "circular", {"stage": 2}, {"chunks": 2}),
    "mtp, mpmd": (
        "mtp",
        "interleaved_1f1b",
        {"stage": 2},
        {"engine": "mpmd", "layers_per_stage": "Et*2|t|tm|mL"},
    ),
    "tower, fsdp": ("vision tower", "1f1b", {"stage": 2, "fsdp": 2}, {}),
    "dualpipe": ("encoder-decoder", "dualpipe", {"stage": 2}, {}),
    "mpmd, dualpipe": ("mtp", "dualpipe", {"stage": 2}, {"engine": "mpmd"}),
    "tower, mpmd": ("vision tower", "1f1b", {"stage": 3}, {"engine": "mpmd"}),
}
SLOW = [name for name in ROWS if "dualpipe" in name]


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=pytest.mark.slow if r in SLOW else ()) for r in ROWS]
)
def test_loss_and_gradients_are_those_of_the_plain_program(row: str):
    name, schedule, sizes, options = ROWS[row]
    close(run(CASES[name], schedule=schedule, mesh=mesh(**sizes), **options), wanted(name))


BOTH = [pytest.param("scheduled", marks=pytest.mark.slow), "mpmd"]


@pytest.mark.parametrize("engine", BOTH)
def test_dropout_is_the_same_in_every_engine(engine: str):
    case = encoder_decoder(dropout_layer)
    pipe = jp.pipeline(
        case.model, schedule="1f1b", mesh=mesh(stage=2), microbatches=4, engine=engine
    )
    assert pipe.check(case.params, case.batch, jax.random.key(3)).largest <= 1e-5


@pytest.mark.parametrize("engine", BOTH)
def test_a_vision_tower_may_be_frozen(engine: str):
    grads = run(
        CASES["vision tower"],
        schedule="1f1b",
        mesh=mesh(stage=2),
        engine=engine,
        frozen=lambda path, leaf: "vision" in path,
    )[1]
    assert not jax.tree.leaves(grads["layers"].pop("vision"))
    trained = {
        kind: w
        for kind, w in wanted("vision tower")[1]["layers"].items()
        if kind in grads["layers"]
    }
    close(grads, wanted("vision tower")[1] | {"layers": trained})


@pytest.mark.parametrize("engine", ["scheduled", "mpmd"])
def test_parameters_come_back_as_they_went_in(engine: str):
    for case in CASES.values():
        pipe = jp.pipeline(
            case.model, schedule="1f1b", mesh=mesh(stage=4), microbatches=4, engine=engine
        )
        back = pipe.unshard(pipe.shard(case.params))
        assert jax.tree.structure(back) == jax.tree.structure(case.params)
        jax.tree.map(np.testing.assert_array_equal, back, case.params)


def test_a_rank_of_mpmd_has_the_layers_that_it_runs_and_one_program_the_room_of_every_kind():
    case = CASES["encoder-decoder"]
    options: Any = {"schedule": "1f1b", "mesh": mesh(stage=2), "microbatches": 4}
    for layout in ((2, 3), (3, 2)):
        stored = jp.pipeline(case.model, layers_per_stage=layout, engine="mpmd", **options)
        first, last = stored.shard(case.params)["layers"].stages
        counts = [{k: jax.tree.leaves(w)[0].shape[0] for k, w in s.items()} for s in (first, last)]
        both = [{"encoder": 2}, {"decoder": 3}], [{"encoder": 2, "decoder": 1}, {"decoder": 2}]
        assert counts == both[layout == (3, 2)]
    one = jp.pipeline(case.model, layers_per_stage=(3, 2), **options).shard(case.params)
    stages = one["layers"].stages
    assert stages["encoder"]["up"].shape == (1, 2, 2, D, 2 * D)  # the last rank has two empty ones
    assert stages["decoder"]["mix"].shape == (1, 2, 2, D, D)


def refused(match: str, case: Case, params: Any = None, **options: Any) -> None:
    given: Any = {"schedule": "1f1b", "mesh": mesh(stage=2), "microbatches": 4} | options
    with pytest.raises(ValueError, match=match):
        jp.pipeline(case.model, **given).shard(case.params if params is None else params)


def test_bad_input_is_refused_before_anything_compiles():
    case, with_mtp = CASES["encoder-decoder"], CASES["mtp"]
    encoder = case.params["layers"]["encoder"]

    def layers(tree: Any) -> Any:
        return case.params | {"layers": tree}

    refused(r"\['layers'\]` is \['encoder'\] and .* the kinds", case, layers({"encoder": encoder}))
    refused(r"\['layers'\]` is list and .*", case, layers(encoder))
    empty = case.params["layers"] | {"encoder": []}
    refused(r"`params\['layers'\]\['encoder'\]` is empty", case, layers(empty))
    other = case.params["layers"] | {"encoder": [encoder[0], encoder[1] | {"up": jnp.ones(3)}]}
    refused(r"`params\['layers'\]\['encoder'\]\[1\]\['up'\]` is float32\[3\]", case, layers(other))
    refused("has 1 m, and .* has 0 layers of a last kind", case, layers_per_stage="Et*2|t*2mL")
    refused("has 1 m, and .* has 2 layers of a last kind", with_mtp, layers_per_stage="Et*3|t*2mL")
    layer = r"\['layers'\]\['encoder'\]\[1\]"
    refused(
        f"`frozen` is False for .*{layer}", case, frozen=lambda path, _: "['encoder'][1]" in path
    )
    refused("t follows m", with_mtp, layers_per_stage="Et*3m|tmL")
    refused("5 layers in 2 stages", with_mtp, layers_per_stage="Et|t*2mmL")
    with pytest.raises(ValueError, match=r"`layer\['encoder'\]` takes"):
        jp.Model(lambda w, b: b, {"encoder": lambda w, x: x}, lambda w, x, b: x)
    with pytest.raises(ValueError, match="`layer` is empty"):
        jp.Model(lambda w, b: b, {}, lambda w, x, b: x)
