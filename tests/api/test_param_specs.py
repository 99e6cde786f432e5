"""Parameters that are sharded by the user's specs: the plain program, on shards as asked."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe.linen import model as linen_model
from jaxpipe.nnx import model as nnx_model

D, F, V, L, B, T, E = 8, 24, 12, 4, 8, 4, 2


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def init() -> dict[str, Any]:
    layers = [
        {
            "up": normal(10 + i, D, F),
            "down": normal(20 + i, F, D),
            "experts": normal(30 + i, E, D, D),
        }
        for i in range(L)
    ]
    return {"embed": normal(0, V, D), "layers": layers, "head": normal(1, D, V)}


def batch() -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(1), (B, T + 1), 0, V)}


def embed(w: Any, batch: Any) -> Any:
    return w[batch["tokens"][:, :-1]]


def layer(w: Any, x: Any, batch: Any) -> Any:
    x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return x + jnp.tanh(jnp.einsum("btd,edf->btef", x, w["experts"])).mean(axis=2)


def loss(w: Any, x: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(batch["tokens"][:, 1:], V), axis=-1))


MODEL = jp.Model(embed, layer, loss)


def plain(params: Any, batch: Any) -> Any:
    x = embed(params["embed"], batch)
    for w in params["layers"]:
        x = layer(w, x, batch)
    return loss(params["head"], x, batch)


LAYER = {"up": P(None, "tensor"), "down": P("tensor"), "experts": P("expert")}
TREE = {"embed": P(None, "tensor"), "layers": [LAYER] * L, "head": P(None, "tensor")}


def rule(path: str, leaf: Any) -> Any:
    """The layers of `TREE`, and the default for others."""
    return next((spec for name, spec in LAYER.items() if name in path), None)


def pipeline(schedule: Any, sizes: Any, specs: Any = None, **options: Any) -> Any:
    count = int(np.prod(list(sizes.values())))
    mesh = jp.make_mesh(sizes, devices=jax.devices()[:count])
    return jp.pipeline(
        MODEL, schedule=schedule, mesh=mesh, microbatches=4, param_specs=specs, **options
    )


def close(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def two_axes(path: str, leaf: Any) -> Any:
    """One dim over two axes: gathered with `fsdp`, or divided by both where it is read."""
    specs = {"up": P(None, ("fsdp", "tensor")), "down": P(("tensor", "expert"))}
    return next((spec for name, spec in specs.items() if name in path), None)


TP = {"stage": 2, "tensor": 2}
MPMD = {"engine": "mpmd"}
ROWS = {
    "unpipelined": (None, TP, TREE, {}),
    "circular": ("circular", TP, TREE, {"chunks": 2}),
    "zero bubble": ("zero_bubble_h1", TP, rule, {}),
    "zbv, expert and fsdp": ("zbv", {"stage": 2, "expert": 2, "fsdp": 2}, rule, {}),
    "1f1b, tensor and fsdp": ("1f1b", {"stage": 2, "tensor": 2, "fsdp": 2}, TREE, {}),
    "1f1b, tensor and data": ("1f1b", {"stage": 2, "tensor": 2, "data": 2}, TREE, {}),
    "mpmd": ("1f1b", TP, TREE, MPMD),
    "mpmd, expert and fsdp": ("interleaved_1f1b", {"stage": 2, "expert": 2, "fsdp": 2}, rule, MPMD),
}
ROWS |= {
    "1f1b, two axes": ("1f1b", {"stage": 2, "fsdp": 2, "tensor": 2}, two_axes, {}),
    "circular, two axes": ("circular", {"stage": 2, "tensor": 2, "expert": 2}, two_axes, {}),
}
QUICK = ("circular", "1f1b, two axes", "circular, two axes")


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=() if r in QUICK else pytest.mark.slow) for r in ROWS]
)
def test_loss_and_gradients_are_those_of_the_plain_program(row: str):
    schedule, sizes, specs, options = ROWS[row]
    pipe = pipeline(schedule, sizes, specs, **options)
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch))
    (value, _), grads = step(pipe.shard(init()), batch())
    wanted = jax.value_and_grad(plain)(init(), batch())
    close((float(value), pipe.unshard(grads)), wanted)


def stage_specs(tree: Any) -> Any:
    return {name: tuple(leaf.sharding.spec) for name, leaf in tree["layers"].stages.items()}


@pytest.mark.parametrize("schedule", ["zero_bubble_h1"])
def test_a_compiled_program_takes_and_returns_shards_and_computes_on_them(schedule: str):
    pipe = pipeline(schedule, TP, rule)
    params = pipe.shard(init())
    lead = None, "stage", None
    assert stage_specs(params) == {
        "up": (*lead, None, "tensor"),
        "down": (*lead, "tensor", None),
        "experts": (*lead, "expert", None, None),
    }
    made = pipe.init(init)
    assert jax.tree.structure(made) == jax.tree.structure(params)
    assert all(
        a.sharding == b.sharding
        for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(params), strict=True)
    )
    compiled = pipe.jit(pipe.value_and_grad).lower(params, batch()).compile()
    grads = compiled.output_shardings[1]["layers"].stages
    shapes = {
        name: grads[name].shard_shape(leaf.shape)[2:]
        for name, leaf in params["layers"].stages.items()
    }
    assert shapes == {"up": (2, D, F // 2), "down": (2, F // 2, D), "experts": (2, E, D, D)}
    text = compiled.as_text()
    dots = [line for line in text.splitlines() if " dot(" in line]
    assert dots
    assert not [line for line in dots if f",{F}]" in line or f"[{F}," in line]
    assert all(f"f32[{D},{F}]" not in line for line in text.splitlines() if "all-gather" in line)


def test_a_spec_that_cannot_be_is_refused_before_anything_is_stored():
    def refused(match: str, specs: Any, params: Any = None, sizes: Any = None) -> None:
        with pytest.raises(ValueError, match=match):
            pipeline("1f1b", sizes or TP, specs).shard(init() if params is None else params)

    def up(spec: Any) -> Any:
        return lambda path, leaf: spec if "up" in path else None

    refused("'model' is no axis for parameters: `mesh` has no such axis", up(P("model")))
    refused("'stage' is no axis for parameters: the pipeline", up(P("stage")))
    refused("'data' is no axis for parameters: it divides rows", up(P("data")))
    refused(r"\['up'\]` of shape \(8, 24\), which has fewer dims", up(P(None, None, "tensor")))
    refused("an axis twice", up(P("tensor", "tensor")))
    refused("Give a `PartitionSpec`", up("tensor"))
    refused("the name of an axis, or None, for each dim", up(P(None, 3)))
    refused(r"no spec for any leaf of `params`, such as \['embed'\]", lambda path, leaf: None)
    sizes = {"stage": 2, "tensor": 3}
    refused(
        "dim 0 of size 8 does not divide over 'tensor' of size 3",
        up(P("tensor")),
        None,
        sizes,
    )
    refused(
        "dim 1 of size 24 does not divide over 'tensor' and 'expert' of size 7",
        up(P(None, ("tensor", "expert"))),
        None,
        {"stage": 1, "tensor": 1, "expert": 7},
    )
    refused("no tree prefix of `params`", {"embed": P()})
    wrong_layers = {"embed": None, "layers": [P()], "head": None}
    refused(r"(?s)no tree prefix of `params`.*tree\['layers'\]", wrong_layers)
    refused(
        r"P.*'tensor'.* for `params\['layers'\]\[0\]\['up'\]` and None for `.*\[1\]\['up'\]`",
        lambda path, leaf: P("tensor") if "[0]['up']" in path else None,
    )
    stacked = init() | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *init()["layers"])}
    refused("give None for the first dim", up(P("tensor")), stacked)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernels = [
            nn.with_partitioning(nn.initializers.lecun_normal(), axes)
            for axes in ((None, "tensor"), ("tensor", None))
        ]
        h = jnp.tanh(nn.Dense(F, kernel_init=kernels[0])(x))
        return x + nn.Dense(D, kernel_init=kernels[1])(h)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> Any:
        x = nn.Embed(V, D, name="embed")(batch["tokens"][:, :-1])
        for i in range(L):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(V, name="head")(x)


class NNXBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        make = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(make, (None, "tensor"))
        down = nnx.with_partitioning(make, ("tensor", None))
        self.up = nnx.Linear(D, F, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(F, D, kernel_init=down, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(jnp.tanh(self.up(x)))


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(L)])
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        x = self.embed(batch["tokens"][:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(logits: Any, batch: Any) -> Any:
    targets = jax.nn.one_hot(batch["tokens"][:, 1:], V)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * targets, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_the_metadata_of_modules_are_specs(library: str):
    if library == "linen":
        boxed = Linen().init(jax.random.key(0), batch())
        specs, module = nn.get_partition_spec(boxed), Linen()
        model, params = linen_model(module, nn.unbox(boxed), loss=cross_entropy)
        plain = lambda params: cross_entropy(module.apply(params, batch()), batch())  # noqa: E731
    else:
        with nnx.use_eager_sharding(False):
            gpt = NNXModel(nnx.Rngs(0))
        model, params = nnx_model(gpt, loss=cross_entropy)
        specs, graph = nnx.get_partition_spec(params), nnx.graphdef(gpt)
        plain = lambda params: cross_entropy(  # noqa: E731
            nnx.merge(graph, params)(batch()), batch()
        )
    mesh = jp.make_mesh(TP, devices=jax.devices()[:4])
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=4, param_specs=specs)
    stored = pipe.shard(params)
    found = [leaf.sharding.spec for leaf in jax.tree.leaves(stored["layers"].stages)]
    assert sorted(spec.index("tensor") for spec in found if "tensor" in spec) == [3, 4]
    (value, _), grads = pipe.jit(pipe.value_and_grad)(stored, batch())
    close((float(value), pipe.unshard(grads)), jax.value_and_grad(plain)(params))


def shared_layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w["layer"]["up"]) @ w["shared"]["down"]


def of_kinds() -> tuple[Any, Any, Any]:
    """Layers of two kinds, one with a frozen matrix, which share the other matrix."""
    kinds = {"first": shared_layer, "second": shared_layer}
    model = jp.Model(embed, kinds, loss, shared=True)
    layers = {
        "first": [{"up": normal(10 + i, D, F)} for i in range(2)],
        "second": {"up": normal(20, 3, D, F)},
    }
    params = init() | {"layers": layers, "shared": {"down": normal(30, F, D)}}

    def plain(params: Any, batch: Any) -> Any:
        x = embed(params["embed"], batch)
        second = [{"up": params["layers"]["second"]["up"][i]} for i in range(3)]
        for w in [*params["layers"]["first"], *second]:
            x = shared_layer({"layer": w, "shared": params["shared"]}, x, batch)
        return loss(params["head"], x, batch)

    return model, params, plain


@pytest.mark.parametrize(
    ("schedule", "engine"),
    [
        pytest.param("circular", "auto", marks=pytest.mark.slow),
        pytest.param("zero_bubble_h1", "auto", marks=pytest.mark.slow),
        ("1f1b", "mpmd"),
    ],
)
def test_shared_and_frozen_parameters_and_those_of_kinds_have_specs_too(schedule: str, engine: str):
    def specs(path: str, leaf: Any) -> Any:
        if "up" in path:
            return P(*(None,) * (leaf.ndim - 1), "tensor")
        return P("tensor") if "down" in path else None

    model, params, plain = of_kinds()
    pipe = jp.pipeline(
        model,
        schedule=schedule,
        engine=engine,
        mesh=jp.make_mesh(TP, devices=jax.devices()[:4]),
        microbatches=4,
        param_specs=specs,
        frozen=lambda path, leaf: "second" in path,
    )
    stored = pipe.shard(params)
    for leaf in jax.tree.leaves((stored["layers"], stored["shared"])):
        assert "tensor" in leaf.sharding.spec
    (value, _), grads = pipe.jit(pipe.value_and_grad)(stored, batch())
    wanted, true = jax.value_and_grad(plain)(params, batch())
    true["layers"]["second"]["up"] = None
    close((float(value), pipe.unshard(grads)), (wanted, true))
    whole = dataclasses.replace(pipe, param_specs=None)
    less, more = (p.memory(params, batch()).ranks[1].weights for p in (pipe, whole))
    assert less < 0.7 * more


@pytest.mark.parametrize("schedule", ["1f1b", "circular", None])
def test_vectors_are_whole_over_fsdp_unless_they_are_large_or_have_a_spec(schedule):
    layers = [{"w": jnp.zeros((D, D)), "scale": jnp.zeros(D)} for _ in range(L)]
    head = {"bias": jnp.zeros(D), "scale": jnp.zeros(D), "large": jnp.zeros(2**21)}
    params = {"embed": jnp.zeros((V, D)), "layers": layers, "head": head}
    pipe = jp.pipeline(
        jp.Model(embed, lambda w, x, batch: x @ w["w"] * w["scale"], loss),
        schedule=schedule,
        mesh=jp.make_mesh({"stage": 2, "fsdp": 2}, devices=jax.devices()[:4]),
        microbatches=2,
        param_specs=lambda path, leaf: P("fsdp") if "bias" in path else None,
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(pipe.shard(params)):
        is_whole = leaf.sharding.shard_shape(leaf.shape)[-2:] == leaf.shape[-2:]
        assert is_whole == ("scale" in jax.tree_util.keystr(path)), path


def test_a_layer_that_splits_a_sharded_dim_is_refused_where_the_step_would_never_end():
    """XLA:CPU waits for all devices at a permute, in a branch that not all ranks take."""

    def gated(w: Any, x: Any, batch: Any) -> Any:
        gate, up = jnp.split(x @ w["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ w["down"]

    def specs(path: str, leaf: Any) -> P | None:
        sharded = {"['layers']['up']": P(None, None, "tensor")}
        return (sharded | {"['layers']['down']": P(None, "tensor")}).get(path)

    params = init()
    layers = {"up": normal(2, L, D, 2 * F), "down": normal(3, L, F, D)}
    params = {**params, "layers": layers}
    mesh = jp.make_mesh(TP, devices=jax.devices()[:4])
    pipe = jp.pipeline(
        jp.Model(embed, gated, loss), schedule="1f1b", mesh=mesh, microbatches=4, param_specs=specs
    )
    step, stored = pipe.jit(pipe.value_and_grad), pipe.shard(params)
    (value, _), _ = jax.eval_shape(step, stored, batch())  # nothing runs
    assert value.shape == ()
    with pytest.raises(ValueError, match=r"would never end: .*split` moves numbers"):
        step(stored, batch())


def test_what_is_compiled_for_another_shape_is_checked_as_the_first():
    def gated(w: Any, x: Any, batch: Any) -> Any:
        if x.shape[1] == 1:
            return x + (jax.nn.silu(x @ w["up"])) @ w["down"]
        gate, up = jnp.split(x @ w["up"], 2, axis=-1)
        return x + jnp.concatenate([jax.nn.silu(gate), up], axis=-1) @ w["down"]

    def specs(path: str, leaf: Any) -> P | None:
        sharded = {"['layers']['up']": P(None, None, "tensor")}
        return (sharded | {"['layers']['down']": P(None, "tensor")}).get(path)

    params = {**init(), "layers": {"up": normal(2, L, D, 2 * F), "down": normal(3, L, 2 * F, D)}}
    mesh = jp.make_mesh(TP, devices=jax.devices()[:4])
    pipe = jp.pipeline(
        jp.Model(embed, gated, loss), schedule="1f1b", mesh=mesh, microbatches=4, param_specs=specs
    )
    step, stored = pipe.jit(pipe.value_and_grad), pipe.shard(params)
    step(stored, {"tokens": batch()["tokens"][:, :2]})
    with pytest.raises(ValueError, match="would never end"):
        step(stored, batch())
