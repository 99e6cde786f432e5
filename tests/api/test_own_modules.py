"""Modules of Flax and Equinox in the front door: losses and gradients of the plain program."""

import dataclasses
import itertools
import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe.equinox import model as equinox_model
from jaxpipe.linen import model as linen_model_of
from jaxpipe.nnx import model as nnx_model

D, V, L, B, T = 8, 12, 4, 8, 4


def batch() -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(1), (B, T + 1), 0, V)}


def loss(logits: Any, batch: Any) -> Any:
    targets = jax.nn.one_hot(batch["tokens"][:, 1:], V)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * targets, axis=-1))


def call(module: Any, batch: Any) -> Any:
    return module(batch["tokens"][:, :-1])


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float):
        self.up, self.down = nnx.Linear(D, V, rngs=rngs), nnx.Linear(V, D, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x: Any, mask: Any, shift: Any) -> Any:
        h = self.down(jnp.tanh(self.up(x * mask + shift)))
        return x + (h if self.dropout is None else self.dropout(h))


class GPT(nnx.Module):
    """A mask follows from the batch, a shift from parameters, and the embedding is tied."""

    def __init__(self, rngs: nnx.Rngs, tied: bool = True, rate: float = 0.0, kind: Any = Block):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.shift = nnx.Param(0.1 * jnp.ones(D))
        self.blocks = nnx.List([kind(rngs, rate) for _ in range(L)])
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.head = None if tied else nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x, mask = self.embed(tokens), (tokens > 2).astype(jnp.float32)[..., None]
        shift = self.shift[...] + jnp.zeros_like(x)
        for block in self.blocks:
            x = block(x, mask, shift=shift)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


def mesh(stages: int) -> Any:
    return jp.make_mesh({"stage": stages}, devices=jax.devices()[:stages])


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
    pipe = jp.pipeline(model, schedule=schedule, mesh=mesh(stages), microbatches=4, engine=engine)
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    (value, _), grads = step(pipe.shard(params), batch())
    return float(value), pipe.unshard(grads)


ENGINES = [("circular", "auto"), ("zero_bubble_h1", "auto"), ("1f1b", "mpmd")]


ONLY_MPMD = [*(pytest.param(*row, marks=pytest.mark.slow) for row in ENGINES[:2]), ENGINES[2]]


@pytest.mark.parametrize(
    ("schedule", "engine", "tied"),
    [
        ("1f1b", "mpmd", True),
        pytest.param("circular", "auto", True, marks=pytest.mark.slow),
        pytest.param("1f1b", "mpmd", False, marks=pytest.mark.slow),
        pytest.param("circular", "auto", False, marks=pytest.mark.slow),
        pytest.param("zero_bubble_h1", "auto", True, marks=pytest.mark.slow),
        pytest.param("zero_bubble_h1", "auto", False, marks=pytest.mark.slow),
    ],
)
def test_an_nnx_module_is_the_plain_program(schedule: str, engine: str, tied: bool):
    gpt = GPT(nnx.Rngs(0), tied)
    example = None if tied and engine == "mpmd" else batch()
    model, params = nnx_model(gpt, layers="blocks", loss=loss, call=call, batch=example)
    graph, state = nnx.split(gpt)
    wanted = jax.value_and_grad(lambda p: loss(call(nnx.merge(graph, p), batch()), batch()))(state)
    assert model.tied is tied
    close(run(model, params, schedule, engine), wanted)


class LinenBlock(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: Any, mask: Any, deterministic: bool = False) -> Any:
        h = nn.Dense(D)(jnp.tanh(nn.Dense(V)(x * mask)))
        return x + nn.Dropout(self.rate, deterministic=deterministic)(h)


class LinenGPT(nn.Module):
    rate: float = 0.0
    block: Any = LinenBlock

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(V, D, name="embed")
        x, mask = embed(tokens), (tokens > 2).astype(jnp.float32)[..., None]
        for i in range(L):
            x = self.block(self.rate, name=f"block_{i}")(x, mask, deterministic=not self.rate)
        return embed.attend(nn.LayerNorm()(x))


def linen_model(rate: float = 0.0, block: Any = LinenBlock, **options: Any) -> Any:
    module, tokens = LinenGPT(rate, block), batch()["tokens"][:, :-1]
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, tokens)
    rngs = ("dropout",) if rate else ()
    options = {"layers": "block", "rngs": rngs} | options
    return module, linen_model_of(module, variables, loss=loss, call=call, **options)


@pytest.mark.parametrize(("schedule", "engine"), ONLY_MPMD)
def test_a_linen_module_is_the_plain_program(schedule: str, engine: str):
    module, (model, variables) = linen_model(batch=batch() if engine == "auto" else None)

    def plain(variables: Any) -> Any:
        return loss(module.apply(variables, batch(), method=call), batch())

    close(run(model, variables, schedule, engine), jax.value_and_grad(plain)(variables))


class EquinoxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any, rate: float):
        self.up = eqx.nn.Linear(D, V, key=key)
        self.down = eqx.nn.Linear(V, D, key=jax.random.fold_in(key, 1))
        self.dropout = eqx.nn.Dropout(rate, inference=not rate)

    def __call__(self, x: Any, mask: Any, key: Any = None) -> Any:
        h = jax.vmap(lambda row: self.down(jnp.tanh(self.up(row))))(x * mask)
        return x + self.dropout(h, key=key)


class EquinoxGPT(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[EquinoxBlock]
    head: eqx.nn.Linear

    def __init__(self, rate: float = 0.0):
        keys = jax.random.split(jax.random.key(0), L + 2)
        self.embed = eqx.nn.Embedding(V, D, key=keys[0])
        self.blocks = [EquinoxBlock(key, rate) for key in keys[2:]]
        self.head = eqx.nn.Linear(D, V, key=keys[1])

    def __call__(self, tokens: Any, key: Any = None) -> Any:
        x, mask = jax.vmap(self.embed)(tokens), (tokens > 2).astype(jnp.float32)[:, None]
        for block in self.blocks:
            key, own = (None, None) if key is None else jax.random.split(key)
            x = block(x, mask, key=own)
        return jax.vmap(self.head)(x)


@pytest.mark.parametrize(("schedule", "engine"), ONLY_MPMD)
def test_an_equinox_module_is_the_plain_program(schedule: str, engine: str):
    gpt = EquinoxGPT()
    model, params = equinox_model(gpt, loss=loss, call=call_row, batch=batch())

    def plain(params: Any) -> Any:
        module = eqx.combine(params, gpt)
        return loss(jax.vmap(lambda row: call_row(module, row))(batch()), batch())

    assert not model.tied
    close(run(model, params, schedule, engine), jax.value_and_grad(plain)(params))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8"])
def test_tokens_are_looked_up_at_once_where_equinox_does_one_by_one(dtype: str):
    """A gather by the indices of both dims has a loop over tokens for its gradient on TPUs."""
    gpt = EquinoxGPT()
    model, params = equinox_model(gpt, loss=loss, call=call_row, batch=batch())
    groups = model.to_groups(params)
    tokens = np.array([[0, V - 1, 2, 1], [-1, V + 3, -V - 3, 0]]).astype(dtype)

    def gathered(f: Any, *arguments: Any) -> list[int]:
        dims = re.findall(r"start_index_map=\(([^)]*)\)", str(jax.make_jaxpr(f)(*arguments)))
        return [len(found.replace(",", " ").split()) for found in dims]

    given = groups["embed"], {"tokens": jnp.asarray(tokens)}, None
    assert gathered(model.embed, *given) == [1]
    assert gathered(jax.vmap(gpt.embed), tokens[0]) == [2]
    expected = jax.vmap(jax.vmap(gpt.embed))(jnp.asarray(tokens)[:, :-1])
    found = [x for x in jax.tree.leaves(model.embed(*given)) if x.shape == expected.shape]
    np.testing.assert_array_equal(found[0], expected)


def test_a_module_that_asks_for_its_embedding_is_the_plain_program():
    class Scaled(EquinoxGPT):
        def __init__(self) -> None:
            super().__init__()

        def __call__(self, tokens: Any, key: Any = None) -> Any:
            is_own = type(self.embed) is eqx.nn.Embedding
            x = jax.vmap(self.embed)(tokens) * self.embed.num_embeddings / (V if is_own else 1)
            for block in self.blocks:
                x = block(x, jnp.ones_like(x))
            return jax.vmap(self.head)(x)

    grown = eqx.nn.Embedding(2 * V, D, key=jax.random.key(5)).weight
    gpt = eqx.tree_at(lambda module: module.embed.weight, Scaled(), grown)
    model, params = equinox_model(gpt, loss=loss, call=call_row, batch=batch())

    def plain(params: Any) -> Any:
        module = eqx.combine(params, gpt)
        return loss(jax.vmap(lambda row: call_row(module, row))(batch()), batch())

    close(run(model, params, "1f1b", "auto"), jax.value_and_grad(plain)(params))


def test_an_equinox_module_may_have_shapes_for_parameters():
    shapes = eqx.filter_eval_shape(EquinoxGPT)
    said = []
    for gpt in (shapes, EquinoxGPT()):
        model, params = equinox_model(gpt, loss=loss, call=call_row, batch=batch())
        pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(2), microbatches=4)
        said.append(pipe.memory(params, batch()))
        assert jax.tree.structure(params) == jax.tree.structure(
            eqx.filter(EquinoxGPT(), eqx.is_inexact_array)
        )
    assert said[0] == said[1]


def test_specs_and_what_is_frozen_may_be_in_a_module_like_that_of_the_parameters():
    model, params = equinox_model(EquinoxGPT(), loss=loss, call=call_row, batch=batch())
    assert callable(params)
    options: dict[str, Any] = {"schedule": "1f1b", "mesh": mesh(2), "microbatches": 4}
    by_function = {
        "param_specs": lambda path, leaf: P(None, "tensor") if leaf.ndim == 2 else None,
        "frozen": lambda path, leaf: leaf.ndim == 1,
    }
    by_tree = {
        "param_specs": jax.tree.map(
            lambda leaf: P(None, "tensor") if leaf.ndim == 2 else P(), params
        ),
        "frozen": jax.tree.map(lambda leaf: leaf.ndim == 1, params),
    }
    for name in by_tree:
        stored = [
            jp.pipeline(model, **options, **{name: how[name]}).shard(params)
            for how in (by_function, by_tree)
        ]
        assert len({len(jax.tree.leaves(tree)) for tree in stored}) == 1
        shardings = [[x.sharding.spec for x in jax.tree.leaves(tree)] for tree in stored]
        assert len(shardings[0]) > 4 and shardings[0] == shardings[1], name


def call_row(module: Any, row: Any) -> Any:
    return module(row["tokens"][:-1])


def call_row_with_key(module: Any, row: Any, key: Any) -> Any:
    return module(row["tokens"][:-1], key=key)


DROPOUT = {
    "nnx": lambda: nnx_model(GPT(nnx.Rngs(0), rate=0.25), loss=loss, call=call, batch=batch()),
    "linen": lambda: linen_model(0.25)[1],
    "equinox": lambda: equinox_model(EquinoxGPT(0.25), loss=loss, call=call_row_with_key),
}


QUICK_DROPOUT = [("linen", 2), ("equinox", 1)]  # docs/own-model.md has one of NNX


@pytest.mark.parametrize(
    ("library", "row"),
    [
        pytest.param(*one, marks=() if one in QUICK_DROPOUT else pytest.mark.slow)
        for one in itertools.product(DROPOUT, range(3))
    ],
)
def test_dropout_differs_by_key_and_is_the_same_in_every_engine(library: str, row: int):
    model, params = DROPOUT[library]()
    key = jax.random.key(3)
    wanted = run(model, params, None, key=key)
    assert model.layer.takes_key  # pyright: ignore[reportFunctionMemberAccess]
    assert abs(wanted[0] - run(model, params, None, key=jax.random.key(4))[0]) > 1e-4
    close(run(model, params, *ENGINES[row], key), wanted)


def plain_programs() -> dict[str, Any]:
    """Returns the model of each library, its parameters, and the call of the whole module."""
    gpt, equinox_gpt = GPT(nnx.Rngs(0)), EquinoxGPT()
    graph, _ = nnx.split(gpt)
    module, of_linen = linen_model()

    def equinox_call(params: Any, batch: Any) -> Any:
        whole = eqx.combine(params, equinox_gpt)
        return jax.vmap(lambda row: call_row(whole, row))(batch)

    return {
        "nnx": (
            nnx_model(gpt, loss=loss, call=call, batch=batch()),
            lambda params, batch: call(nnx.merge(graph, params), batch),
        ),
        "linen": (of_linen, lambda params, batch: module.apply(params, batch, method=call)),
        "equinox": (equinox_model(equinox_gpt, loss=loss, call=call_row), equinox_call),
    }


@pytest.mark.parametrize(
    "library",
    ["nnx", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linen", "equinox"))],
)
def test_check_judges_by_the_functions_of_a_module_and_by_its_own_call(library: str):
    (model, params), whole = plain_programs()[library]
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(2), microbatches=4)

    def plain(params: Any, batch: Any) -> Any:
        return loss(whole(params, batch), batch)

    found = pipe.check(pipe.shard(params), batch())
    assert "reference: the module's own call" in str(found) and found.largest <= 1e-5
    wrong = jp.pipeline(
        dataclasses.replace(model, plain=lambda *given: 2 * plain(*given)),
        schedule="1f1b",
        mesh=mesh(2),
        microbatches=4,
    )
    with pytest.raises(AssertionError, match="The module's own call is another program than the f"):
        wrong.check(params, batch())
    assert pipe.check(params, batch(), plain=plain).largest <= 1e-5
    with pytest.raises(AssertionError, match="`plain` is another program"):
        pipe.check(params, batch(), plain=lambda *given: 2 * plain(*given))
    model, params = DROPOUT[library]()
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(2), microbatches=4, engine="mpmd")
    assert pipe.check(params, batch(), jax.random.key(3)).largest <= 1e-5


class WithNorm(Block):
    def __init__(self, rngs: nnx.Rngs, rate: float):
        super().__init__(rngs, rate)
        self.norm = nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, x: Any, mask: Any, shift: Any) -> Any:
        return super().__call__(self.norm(x), mask, shift)


class Sowing(Block):
    def __call__(self, x: Any, mask: Any, shift: Any) -> Any:
        self.sow(nnx.Intermediate, "x", x)
        return super().__call__(x, mask, shift)


class Numbered(Block):
    count = 0

    def __init__(self, rngs: nnx.Rngs, rate: float):
        super().__init__(rngs, rate)
        self.index = Numbered.count = Numbered.count + 1

    def __call__(self, x: Any, mask: Any, shift: Any) -> Any:
        return super().__call__(x, mask, shift) * self.index


class Between(GPT):
    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = 2 * block(x, x, x)
        return self.embed.attend(x)


class Masks(GPT):
    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, jnp.ones_like(x) * i, x)
        return self.embed.attend(x)


class Skips(GPT):
    def __call__(self, tokens: Any) -> Any:
        return self.embed.attend(self.blocks[1](self.embed(tokens), 1.0, 0.0))


class Hidden(GPT):
    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        scaled = lambda: self.shift[...]  # noqa: E731
        for block in self.blocks:
            x = block(x, scaled, 0.0)
        return self.embed.attend(x)


class Calling(Block):
    def __call__(self, x: Any, mask: Any, shift: Any) -> Any:
        return x * mask()


class Table(Block):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.table = nnx.data(jnp.ones(3))


def test_nnx_modules_that_cannot_be_cut_are_refused_by_name():
    def refused(match: str, module: Any, **options: Any) -> None:
        given: dict[str, Any] = {"batch": batch()} | options
        with pytest.raises(ValueError, match=match):
            nnx_model(module, loss=loss, call=call, **given)

    rngs = nnx.Rngs(0)
    refused(r"changes its variables \['norm.mean', 'norm.var'\]", GPT(rngs, kind=WithNorm))
    with pytest.warns(DeprecationWarning, match="sow"):
        refused(r"\['x'\]", GPT(rngs, kind=Sowing))
    refused(r"blocks\[0\] to blocks\[3\], and its call runs blocks\[1\]", Skips(rngs))
    refused("`blocks.0.table` of the module is an array and no", GPT(rngs, kind=Table))
    refused("read the parameters shift", Hidden(rngs, kind=Calling))
    refused(r"has the lists \['blocks'\]", GPT(rngs), layers="layers")
    model, _ = nnx_model(GPT(rngs), loss=loss, call=call)
    with pytest.raises(ValueError, match="`params` is GPT, and not the tree of parameters"):
        model.to_groups(GPT(rngs))


def test_nnx_modules_that_cannot_be_run_are_refused_by_name():
    def refused(match: str, module: Any, **options: Any) -> None:
        model, params = nnx_model(module, loss=loss, call=call, **options)
        pipe = jp.pipeline(model, schedule=None, mesh=mesh(1), microbatches=2)
        with pytest.raises(ValueError, match=match):
            pipe.value(pipe.shard(params), batch())

    rngs = nnx.Rngs(0)
    numbered = GPT(rngs, kind=Numbered)
    refused(r"`blocks\[1\]` .*'Numbered\(index=2\)' .*Give `batch=`", numbered)
    refused(r"first argument of `blocks\[1\]` is not what .*Give `batch=`", Between(rngs))
    refused(r"\[0\] of `blocks\[1\]` is not that of .* or give `batch=`", Masks(rngs))


@pytest.mark.parametrize("kind", [Between, Masks])
def test_what_runs_between_nnx_layers_is_run_by_them(kind: Any):
    model, params = nnx_model(kind(nnx.Rngs(0)), loss=loss, call=call, batch=batch())
    for engine in ("scheduled", "mpmd"):
        pipe = jp.pipeline(model, schedule="1f1b", engine=engine, mesh=mesh(2), microbatches=2)
        assert pipe.check(params, batch()).largest <= 1e-5


class NormBlock(LinenBlock):
    @nn.compact
    def __call__(self, x: Any, mask: Any, deterministic: bool = False) -> Any:
        return nn.BatchNorm(use_running_average=False)(x)


def test_linen_and_equinox_modules_that_cannot_be_cut_are_refused_by_name():
    with pytest.raises(ValueError, match=r'variable "mean" in "/block_0/BatchNorm_0"'):
        linen_model(block=NormBlock, batch=batch())
    with pytest.raises(ValueError, match=r"`layers` is 'layer'.*block_N,.*embed"):
        linen_model(layers="layer")
    with pytest.raises(ValueError, match="dropout"):
        linen_model(0.25, rngs=(), batch=batch())
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "rows", mode="ema")
    with pytest.raises(ValueError, match="has the state"):
        equinox_model((norm,), layers=lambda module: module, loss=loss)
