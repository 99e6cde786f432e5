"""Modules whose layers are a stack, return auxiliary losses or sow them: the plain program."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpipe as jp
from jaxpipe.equinox import model as equinox_model
from jaxpipe.linen import model as linen_model
from jaxpipe.nnx import model as nnx_model

D, V, L, B, T = 8, 12, 4, 8, 4


def batch() -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(1), (B, T + 1), 0, V)}


def cross_entropy(logits: Any, batch: Any) -> Any:
    targets = jax.nn.one_hot(batch["tokens"][:, 1:], V)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * targets, axis=-1))


def with_aux(output: Any, batch: Any) -> Any:
    """The loss of a module that returns (logits, what its layers returned, added up)."""
    logits, total = output
    return cross_entropy(logits, batch) + 0.1 * total / L, {"balance": total}


def call(module: Any, batch: Any) -> Any:
    return module(batch["tokens"][:, :-1])


def size(h: Any) -> Any:
    return jnp.mean(h * h)


class LinenBlock(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        h = nn.Dense(D)(jnp.tanh(nn.Dense(V)(x * mask)))
        h = nn.Dropout(self.rate, deterministic=not self.rate)(h)
        self.sow("losses", "size", size(h))
        return x + h, {"size": size(h)}


class LinenScan(nn.Module):
    rate: float = 0.0
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(V, D, name="embed")
        x, mask = embed(tokens), (tokens > 2).astype(jnp.float32)[..., None]
        stack = nn.scan(
            nn.remat(LinenBlock) if self.remat else LinenBlock,
            variable_axes={"params": 0, "losses": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=L,
        )
        x, aux = stack(self.rate, name="blocks")(x, mask)
        return embed.attend(nn.LayerNorm()(x)), jnp.sum(aux["size"])


class LinenList(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed, total = nn.Embed(V, D, name="embed"), 0.0
        x, mask = embed(tokens), (tokens > 2).astype(jnp.float32)[..., None]
        for i in range(L):
            x, aux = LinenBlock(name=f"block_{i}")(x, mask)
            total = total + aux["size"]
        return embed.attend(nn.LayerNorm()(x)), total


def linen_case(module: Any, sown: Any, layers: str, **options: Any) -> Any:
    tokens = batch()["tokens"][:, :-1]
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    model, variables = linen_model(
        module,
        module.init(keys, tokens),
        layers=layers,
        loss=with_aux,
        call=call,
        sown=sown,
        **options,
    )

    def plain(variables: Any, batch: Any) -> Any:
        output, found = module.apply(variables, batch, method=call, mutable=["losses"])
        loss, metrics = with_aux(output, batch)
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(found))
        factor = sown["losses"]
        if factor is None:
            return loss, metrics
        return loss + factor * total, metrics | {"losses": total}

    return model, variables, plain


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(D, V, rngs=rngs), nnx.Linear(V, D, rngs=rngs)

    def __call__(self, x: Any, shift: Any) -> Any:
        h = self.down(jnp.tanh(self.up(x + shift)))
        return x + h, (size(h), jnp.sum(h, axis=(0, 1)))


class WithDropout(Block):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: Any, shift: Any) -> Any:
        return self.dropout(super().__call__(x, shift)[0]), ()


class Scanned(nnx.Module):
    """A shift that parameters influence travels with x."""

    def __init__(self, rngs: nnx.Rngs, kind: Any = Block):
        self.embed, self.shift = nnx.Embed(V, D, rngs=rngs), nnx.Param(0.1 * jnp.ones(D))

        @nnx.split_rngs(splits=L)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs: Any) -> Any:
            return kind(rngs)

        self.blocks = create(rngs)

    def __call__(self, tokens: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0))
        def run(x: Any, shift: Any, block: Any) -> Any:
            x, aux = block(x, shift)
            return x, aux

        x, aux = run(self.embed(tokens), self.shift[...], self.blocks)
        return self.embed.attend(x), jnp.sum(aux[0]) if aux else jnp.zeros(())


class Listed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, kind: Any = Block):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([kind(rngs) for _ in range(L)])

    def __call__(self, tokens: Any) -> Any:
        x, total, shift = self.embed(tokens), 0.0, jnp.ones(D)
        for block in self.blocks:
            x, (found, _) = block(x, shift)
            total = total + found
        return self.embed.attend(x), total


def nnx_case(kind: Any, **options: Any) -> Any:
    gpt = kind(nnx.Rngs(0))
    model, params = nnx_model(gpt, loss=with_aux, call=call, **options)
    graph, _, rest = nnx.split(gpt, nnx.Param, ...)

    def plain(params: Any, batch: Any) -> Any:
        return with_aux(call(nnx.merge(graph, params, rest), batch), batch)

    return model, params, plain


class EquinoxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any):
        self.up = eqx.nn.Linear(D, V, key=key)
        self.down = eqx.nn.Linear(V, D, key=jax.random.fold_in(key, 1))

    def __call__(self, x: Any, mask: Any) -> Any:
        h = jax.vmap(lambda row: self.down(jax.nn.silu(self.up(row))))(x * mask)
        return x + jax.nn.relu(h), size(h)


class EquinoxScan(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: EquinoxBlock
    head: eqx.nn.Linear

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), L + 2)
        self.embed = eqx.nn.Embedding(V, D, key=keys[0])
        self.blocks = eqx.filter_vmap(EquinoxBlock)(keys[2:])
        self.head = eqx.nn.Linear(D, V, key=keys[1])

    def __call__(self, tokens: Any) -> Any:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, mask = jax.vmap(self.embed)(tokens), (tokens > 2).astype(jnp.float32)[:, None]
        run = lambda x, block: eqx.combine(block, static)(x, mask)  # noqa: E731
        x, sizes = jax.lax.scan(run, x, arrays)
        return jax.vmap(self.head)(x), jnp.sum(sizes)


def equinox_case() -> Any:
    gpt = EquinoxScan()

    def loss(output: Any, batch: Any) -> Any:
        return with_aux((output[0], jnp.mean(output[1])), batch)

    def call_row(module: Any, row: Any) -> Any:
        return module(row["tokens"][:-1])

    model, params = equinox_model(gpt, loss=loss, call=call_row, batch=batch())

    def plain(params: Any, batch: Any) -> Any:
        module = eqx.combine(params, gpt)
        return loss(jax.vmap(lambda row: call_row(module, row))(batch), batch)

    return model, params, plain


CASES = {
    "linen scan": lambda: linen_case(LinenScan(), {"losses": 0.05}, "blocks", batch=batch()),
    "linen scan, remat": lambda: linen_case(
        LinenScan(remat=True), {"losses": 0.05}, "blocks", batch=batch()
    ),
    "linen list": lambda: linen_case(LinenList(), {"losses": 0.05}, "block", batch=batch()),
    "linen, dropped": lambda: linen_case(LinenList(), {"losses": None}, "block"),
    "nnx scan": lambda: nnx_case(Scanned, batch=batch()),
    "nnx list": lambda: nnx_case(Listed),
    "equinox scan": equinox_case,
}
ENGINES = {
    "circular": ("circular", "auto"),
    "zb": ("zero_bubble_h1", "auto"),
    "mpmd": ("1f1b", "mpmd"),
}
QUICK = [("linen scan", "circular"), ("linen list", "mpmd"), ("nnx scan", "zb")]


def close(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def run(model: Any, params: Any, schedule: Any, engine: str = "auto", key: Any = None) -> Any:
    stages = 1 if schedule is None else 2
    mesh = jp.make_mesh({"stage": stages}, devices=jax.devices()[:stages])
    pipe = jp.pipeline(model, schedule=schedule, mesh=mesh, microbatches=4, engine=engine)
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    value, grads = step(pipe.shard(params), batch())
    return jax.tree.map(float, value), pipe.unshard(grads)


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        pytest.param(case, engine, marks=() if (case, engine) in QUICK else pytest.mark.slow)
        for case in CASES
        for engine in ENGINES
    ],
)
def test_a_module_is_the_plain_program(case: str, engine: str):
    model, params, plain = CASES[case]()
    wanted = jax.value_and_grad(plain, has_aux=True)(params, batch())
    close(run(model, params, *ENGINES[engine]), wanted)


def test_a_model_with_a_scan_is_for_several_meshes_and_plans():
    """Its call is traced for each mesh, and with a key, which plans pass, also if none is read."""
    model, params, plain = equinox_case()
    (value, _), _ = jax.value_and_grad(plain, has_aux=True)(params, batch())

    def loss(stages: int) -> float:
        mesh = jp.make_mesh({"stage": stages}, devices=jax.devices()[:stages])
        pipe = jp.pipeline(model, schedule="circular", mesh=mesh, microbatches=4)
        return float(pipe.jit(pipe.value)(pipe.shard(params), batch())[0])

    assert [loss(2), loss(4)] == pytest.approx([float(value)] * 2, rel=1e-5)
    best = jp.plan(model, "v5p-8", 64, params=params, example=batch(), num_plans=1).best
    assert best.time.seconds > 0


def scan_with_dropout(library: str) -> Any:
    if library == "nnx":
        return nnx_model(Scanned(nnx.Rngs(0), WithDropout), loss=with_aux, call=call)
    return linen_case(LinenScan(0.25), {"losses": None}, "blocks", rngs=("dropout",))[:2]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_dropout_in_a_scan_is_the_same_in_every_engine(library: str, engine: str):
    model, params = scan_with_dropout(library)
    wanted = run(model, params, None, key=jax.random.key(3))
    other = run(model, params, None, key=jax.random.key(4))
    assert abs(wanted[0][0] - other[0][0]) > 1e-4
    close(run(model, params, *ENGINES[engine], jax.random.key(3)), wanted)


def refused(match: str, make: Any) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_what_layers_return_or_sow_is_not_dropped_silently():
    def squared(output: Any, batch: Any) -> Any:
        return cross_entropy(output[0], batch) + output[1] ** 2

    def mixed(output: Any, batch: Any) -> Any:
        loss = cross_entropy(output[0], batch) + output[1]
        return loss, {"both": loss}

    def shifted(output: Any, batch: Any) -> Any:
        return cross_entropy(output[0], batch), {"shifted": 1 + output[1]}

    def weighted(output: Any, batch: Any) -> Any:
        return jp.Weighted(cross_entropy(output[0], batch) + output[1], jnp.ones(()))

    gpt = Listed(nnx.Rngs(0))
    for match, loss in (
        ("computes 'loss' from what layers return", squared),
        ("metric 'both'", mixed),
        ("metric 'shifted' of `loss` is 1.0", shifted),
        ("a `Weighted`, and its total depends", weighted),
    ):
        refused(match, lambda loss=loss: nnx_model(gpt, loss=loss, call=call, batch=batch()))
    refused("the values losses/size besides", lambda: linen_sown({}))
    refused("'losses', in which .* is", lambda: linen_sown({"losses": 1.0}, Vector))
    refused(
        "read by scan, slice",
        lambda: nnx_model(Twice(nnx.Rngs(0)), loss=with_aux, call=call, batch=batch()),
    )


class Vector(LinenBlock):
    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        self.sow("losses", "size", x)
        return nn.Dense(D)(x), {"size": jnp.zeros(())}


class Twice(Scanned):
    def __call__(self, tokens: Any) -> Any:
        logits, total = super().__call__(tokens)
        return logits @ self.blocks.up.kernel[0].T @ self.blocks.up.kernel[1], total


def linen_sown(sown: Any, block: Any = LinenBlock) -> Any:
    class Module(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            embed = nn.Embed(V, D, name="embed")
            x, mask = embed(tokens), jnp.ones(())
            for i in range(L):
                x, _ = block(name=f"block_{i}")(x, mask)
            return embed.attend(x), jnp.zeros(())

    module, tokens = Module(), batch()["tokens"][:, :-1]
    params = {"params": module.init(jax.random.key(0), tokens)["params"]}
    return linen_model(module, params, loss=with_aux, call=call, batch=batch(), sown=sown)
