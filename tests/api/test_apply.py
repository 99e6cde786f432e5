"""What leaves a pipeline for every row is what the user's own program returns for it."""

from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_modules import D, EquinoxBlock, LinenBlock, T, V, next_token_loss, random_tokens

import jaxpipe as jp
from jaxpipe import equinox as jp_equinox
from jaxpipe import linen as jp_linen
from jaxpipe import nnx as jp_nnx

B = 32


def mesh(**sizes: int) -> Any:
    return jp.make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def embed(w: Any, batch: Any) -> Any:
    return w[batch["x"]]


def layer(w: Any, x: Any, batch: Any) -> Any:
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), x @ w["q"] @ x.mT, -1e9)
    return x + jnp.tanh(jax.nn.softmax(scores) @ x @ w["v"])


def loss(w: Any, x: Any, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, batch["y"])
    rows = {"of_tokens": losses, "of_rows": losses.mean(1), "right": losses.mean(1) < 3}
    return losses.mean(), {"largest": losses.max(1).mean()} | rows


def output(w: Any, x: Any, batch: Any) -> Any:
    logits = x @ w
    return {"logits": logits, "tokens": jnp.argmax(logits, -1), "hidden": x.astype(jnp.bfloat16)}


def own_params() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / D**0.5

    layers = [{"q": normal(D, D), "v": normal(D, D)} for _ in range(8)]
    return {"embed": normal(V, D), "layers": layers, "head": normal(D, V)}


def own_batch() -> Any:
    x, y = jax.random.randint(jax.random.key(1), (2, B, T), 0, V)
    return {"x": x, "y": y}


@jax.jit
def plain(params: Any, batch: Any) -> Any:
    x = embed(params["embed"], batch)
    for w in params["layers"]:
        x = layer(w, x, batch)
    return output(params["head"], x, batch), loss(params["head"], x, batch)


def check_close(got: Any, wanted: Any) -> None:
    def check(x: Any, true: Any) -> None:
        x, true = np.asarray(x), np.asarray(true)
        assert (x.shape, x.dtype) == (true.shape, true.dtype)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            np.testing.assert_array_equal(x, true)
            return
        tolerance = 1e-2 if x.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            x.astype(np.float32), true.astype(np.float32), atol=tolerance * np.abs(true).max()
        )

    jax.tree.map(check, dict(got), wanted)


ROWS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "no pipeline": ({"stage": 1, "fsdp": 4}, {"schedule": None}),
    "circular": ({"stage": 8}, {"schedule": "circular"}),
    "circular, fsdp": ({"stage": 2, "fsdp": 2}, {"schedule": "circular", "accumulate": 2}),
    "1f1b, data": ({"stage": 2, "data": 2}, {"schedule": "1f1b", "gather": "layer"}),
    "1f1b, no share for every rank": ({"stage": 8}, {"schedule": "1f1b", "microbatches": 4}),
    "zbv": ({"stage": 4}, {"schedule": "zbv", "accumulate": 2, "microbatches": 4}),
    "dualpipe": ({"stage": 2}, {"schedule": "dualpipe", "microbatches": 4}),
    "mpmd": ({"stage": 8}, {"schedule": "1f1b", "engine": "mpmd"}),
    "mpmd, dualpipe": ({"stage": 2}, {"schedule": "dualpipe", "engine": "mpmd", "accumulate": 2}),
    "mpmd, fsdp": ({"stage": 2, "fsdp": 2}, {"schedule": "interleaved_1f1b", "engine": "mpmd"}),
}


SLOW = "circular, fsdp", "zbv", "mpmd, fsdp"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ROWS]
)
def test_outputs_and_metrics_of_rows_are_those_of_the_plain_program(name: str):
    sizes, options = ROWS[name]
    model = jp.Model(embed, layer, loss, output=output)
    given: Any = {"microbatches": 8} | options
    pipe = jp.pipeline(model, mesh=mesh(**sizes), **given)
    params, batch = pipe.shard(own_params()), own_batch()
    outputs, (value, metrics) = plain(own_params(), batch)
    check_close(pipe.jit(pipe.apply)(params, batch), outputs)
    for run in (pipe.value, lambda *given: pipe.value_and_grad(*given)[0]):
        got_value, got = pipe.jit(run)(params, batch)
        check_close({"loss": got_value} | got, {"loss": value} | metrics)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("unpipelined", marks=pytest.mark.slow),
        "circular",
        "scheduled",
        pytest.param("mpmd", marks=pytest.mark.slow),
    ],
)
def test_functions_that_mix_rows_see_those_of_a_microbatch(engine: str):
    def centred(w: Any, x: Any, batch: Any) -> Any:
        return x - x.mean(0)

    def of_ranks(w: Any, x: Any, batch: Any) -> Any:
        order = jnp.argsort(x[:, 0, 0])
        return x.mean(), {"order": order, "sum": x[:, 0, 0] - x[:, 0, 0].mean()}

    model = jp.Model(embed, layer, of_ranks, output=centred)
    schedule = {"unpipelined": None, "circular": "circular"}.get(engine, "1f1b")
    stages = 1 if schedule is None else 2
    given: Any = {"schedule": schedule, "engine": engine, "microbatches": 4}
    one = jp.pipeline(model, mesh=mesh(stage=stages), **given)
    two = jp.pipeline(model, mesh=mesh(stage=stages, data=2), **given)
    batch, params = own_batch(), own_params()
    wanted = one.jit(one.apply)(one.shard(params), batch)
    check_close({"": two.jit(two.apply)(two.shard(params), batch)}, {"": wanted})
    wanted = one.jit(one.value)(one.shard(params), batch)[1]
    check_close(two.jit(two.value)(two.shard(params), batch)[1], wanted)
    assert not two.rows(params, batch).functions[-1].is_row_wise


def test_all_ranks_return_metrics_of_rows_that_they_compute_together():
    def of_all_ranks(w: Any, x: Any, batch: Any, axis: str) -> Any:
        return loss(w, x, batch)

    for schedule in ("circular", "1f1b"):
        model = jp.Model(embed, layer, loss, vocab_parallel_loss=of_all_ranks)
        pipe = jp.pipeline(
            model, schedule=schedule, mesh=mesh(stage=4), microbatches=8, vocab_parallel=True
        )
        _, (_, metrics) = plain(own_params(), own_batch())
        got = pipe.jit(pipe.value_and_grad)(pipe.shard(own_params()), own_batch())[0][1]
        check_close(got, metrics)
        assert pipe.jit(pipe.apply)(pipe.shard(own_params()), own_batch()).shape == (B, T, D)


def test_a_share_of_outputs_is_enough_memory_for_a_rank():
    wide = own_params() | {"head": jnp.ones((D, 4096))}
    model = jp.Model(embed, layer, lambda w, x, batch: x.mean(), output=lambda w, x, batch: x @ w)
    for schedule in ("circular", "1f1b"):
        pipe = jp.pipeline(model, schedule=schedule, mesh=mesh(stage=4), microbatches=8)
        compiled = jax.jit(pipe.apply).lower(pipe.shard(wide), own_batch()).compile()
        size: Any = compiled.memory_analysis()
        whole = B * T * 4096 * 4
        assert size.output_size_in_bytes <= whole / 4 * 1.01
        assert size.temp_size_in_bytes < whole / 4


@pytest.mark.parametrize("engine", ["scheduled", "mpmd"])
def test_slices_are_joined_to_sequences(engine: str):
    def with_past(w: Any, x: Any, batch: Any, past: Any) -> Any:
        keys, past = past.append(x @ w["q"])
        mask = past.causal_mask(x.shape[1])[:, : keys.shape[1]]
        scores = jnp.where(mask, x @ keys.mT, -1e9)
        return x + jnp.tanh(jax.nn.softmax(scores) @ keys @ w["v"]), past

    def of_tokens(w: Any, x: Any, batch: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, batch["y"])
        return losses.mean(), {"of_tokens": losses}

    model = jp.Model(embed, with_past, of_tokens, output=lambda w, x, batch: x @ w)
    options: Any = {"mesh": mesh(stage=2), "microbatches": 4, "engine": engine}
    whole = jp.pipeline(model, schedule="1f1b", **options)
    pipe = jp.pipeline(model, schedule="seq1f1b", slices=3, **options)
    params, batch = own_params(), own_batch()
    for run in ("apply", "value"):
        results = [p.jit(getattr(p, run))(p.shard(params), batch) for p in (pipe, whole)]
        check_close(*({"": x} if run == "apply" else x[1] for x in results))
    pooled = jp.Model(embed, with_past, of_tokens, output=lambda w, x, batch: x.mean(1))
    pipe = jp.pipeline(pooled, schedule="seq1f1b", slices=3, **options)
    with pytest.raises(ValueError, match=r"output has other than tokens in dim 1"):
        pipe.jit(pipe.apply)(pipe.shard(params), batch)


def test_outputs_are_sharded_as_asked():
    model = jp.Model(embed, layer, loss, output=output)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2, data=2), microbatches=4)
    params, batch = pipe.shard(own_params()), own_batch()
    outputs, _ = plain(own_params(), batch)
    specs = {"logits": P(None, None, "data"), "tokens": P(("data", "stage")), "hidden": P()}
    for spec in (None, P(("data", "stage")), specs):
        got = jax.jit(partial(pipe.apply, spec=spec))(params, batch)
        check_close(got, outputs)
        wanted = spec if isinstance(spec, dict) else {"logits": spec or P("data")}
        for name, of_name in wanted.items():
            assert got[name].sharding.spec == of_name, name
    explicit = jax.make_mesh(
        (2, 2), ("stage", "data"), (AxisType.Auto, AxisType.Explicit), devices=jax.devices()[:4]
    )
    for schedule in ("1f1b", "circular"):
        pipe = jp.pipeline(model, schedule=schedule, mesh=explicit, microbatches=4)
        check_close(jax.jit(pipe.apply)(pipe.shard(own_params()), batch), outputs)
    ranks = jax.make_mesh((3,), ("stage",), (AxisType.Explicit,), devices=jax.devices()[:3])
    pipe = jp.pipeline(model, schedule="1f1b", mesh=ranks, microbatches=4)  # 6 entries of ranks
    for apply in (pipe.apply, jax.jit(pipe.apply)):
        check_close(apply(pipe.shard(own_params()), batch), outputs)


REFUSED: dict[str, tuple[Any, str]] = {
    "a mean": (
        lambda w, x, batch: x.mean(),
        r"The output has shape \(\), of a microbatch of 8 row",
    ),
    "a leaf": (lambda w, x, batch: [x, x[:3]], r"The output\[1\] has shape \(3, 6, 8\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rows_is_refused(name: str):
    of_user, message = REFUSED[name]
    model = jp.Model(embed, layer, loss, output=of_user)
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2), microbatches=4)
    with pytest.raises(ValueError, match=message):
        pipe.apply(pipe.shard(own_params()), own_batch())


def test_other_refusals():
    def with_table(w: Any, x: Any, batch: Any) -> Any:
        return x.mean(), {"table": jnp.ones(3)}

    params, batch = own_params(), own_batch()
    options: Any = {"schedule": "1f1b", "mesh": mesh(stage=2), "microbatches": 4}
    pipe = jp.pipeline(jp.Model(embed, layer, with_table), **options)
    with pytest.raises(ValueError, match=r"the metric 'table', of a microbatch of 8 rows"):
        pipe.value(pipe.shard(params), batch)
    pipe = jp.pipeline(jp.Model(embed, layer, loss), engine="mpmd", **options)
    with pytest.raises(ValueError, match=r"`apply` is called outside of `pipe.jit`"):
        pipe.apply(pipe.shard(params), batch)
    for axis in ("stage", "model"):
        with pytest.raises(ValueError, match=rf"`spec` names '{axis}'. Give axes of \['data'"):
            pipe.jit(partial(pipe.apply, spec=P(axis)))(pipe.shard(params), batch)


def test_check_compares_metrics_of_rows():
    pipe = jp.pipeline(
        jp.Model(embed, layer, loss), schedule="1f1b", mesh=mesh(stage=2), microbatches=4
    )
    assert "metrics['of_tokens']" in pipe.check(own_params(), own_batch()).errors

    def relative(w: Any, x: Any, batch: Any) -> Any:
        value, metrics = loss(w, x, batch)
        return value, {"relative": metrics["of_rows"] - metrics["of_rows"].mean()}

    pipe = jp.pipeline(
        jp.Model(embed, layer, relative), schedule="1f1b", mesh=mesh(stage=2), microbatches=4
    )
    with pytest.raises(AssertionError, match=r"a row becomes another entry of the metric 'relat"):
        pipe.check(own_params(), own_batch())


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = nnx.relu(self.up(x))
        return x + self.down(h), jnp.mean(h)


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(8)])
        self.value_head = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x, balance = self.table(tokens), 0.0
        for block in self.blocks:
            x, of_block = block(x)
            balance += of_block
        return {"logits": self.table.attend(x), "value": self.value_head(x)}, balance


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(V, D)(tokens)
        for i in range(8):
            x = LinenBlock(name=f"block_{i}")(x)
        return nn.Dense(V)(x)


class EquinoxModel(eqx.Module):
    table: Any
    blocks: list[Any]
    head: Any

    def __init__(self, key: Any):
        keys = jax.random.split(key, 10)
        self.table = eqx.nn.Embedding(V, D, key=keys[0])
        self.blocks = [EquinoxBlock(k) for k in keys[1:9]]
        self.head = eqx.nn.Linear(D, V, key=keys[9])

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.table)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def nnx_rows() -> Any:
    module = NnxModel(nnx.Rngs(0))

    def of_both(returned: Any, batch: Any) -> Any:
        return next_token_loss(returned[0]["logits"], batch) + 0.1 * returned[1]

    model, params = jp_nnx.model(
        module, loss=of_both, batch=tokens(), output=lambda returned, batch: returned[0]
    )

    def called(params: Any, batch: Any) -> Any:
        trained = nnx.clone(module)
        nnx.update(trained, params)
        return trained(batch)[0]

    return model, params, called


def linen_rows() -> Any:
    module = LinenModel()
    variables = module.init(jax.random.key(0), tokens())
    model, params = jp_linen.model(module, variables, loss=next_token_loss, batch=tokens())
    return model, params, module.apply


def equinox_rows() -> Any:
    module = EquinoxModel(jax.random.key(0))
    model, params = jp_equinox.model(module, loss=next_token_loss)

    def called(params: Any, batch: Any) -> Any:
        return jax.vmap(eqx.combine(params, module))(batch)

    return model, params, called


def tokens() -> Any:
    return random_tokens(B)


LIBRARIES = {nnx_rows: 2, linen_rows: 4, equinox_rows: 8}
"""By library the ranks of the row that is not slow."""


@pytest.mark.parametrize(
    ("library", "ranks"),
    [
        pytest.param(library, ranks, marks=() if ranks == quick else pytest.mark.slow)
        for library, quick in LIBRARIES.items()
        for ranks in (2, 4, 8)
    ],
)
def test_logits_are_those_of_the_module(library: Any, ranks: int):
    model, params, called = library()
    schedule, engine = {
        2: ("interleaved_1f1b", "mpmd"),
        4: ("circular", "auto"),
        8: ("zero_bubble_h1", "auto"),
    }[ranks]
    pipe = jp.pipeline(
        model, schedule=schedule, engine=engine, mesh=mesh(stage=ranks), microbatches=8
    )
    stored = pipe.shard(params)
    check_close({"": pipe.jit(pipe.apply)(stored, tokens())}, {"": called(params, tokens())})
    # After a step the user's own module computes them too, by one call of the library.
    step = pipe.jit(lambda p, batch: pipe.tree_map(lambda w, g: w - 0.1 * g, p, grads(p, batch)))

    def grads(p: Any, batch: Any) -> Any:
        return pipe.value_and_grad(p, batch)[1]

    trained = step(stored, tokens())
    outputs = pipe.jit(pipe.apply)(trained, tokens())
    check_close({"": outputs}, {"": called(pipe.unshard(trained), tokens())})


def test_an_output_that_needs_more_than_x_is_refused():
    module = NnxModel(nnx.Rngs(0))
    model, params = jp_nnx.model(
        module, loss=lambda returned, batch: next_token_loss(returned[0]["logits"], batch)
    )
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh(stage=2), microbatches=4)
    with pytest.raises(ValueError, match=r"depends on what layers return besides x, .* Give `outp"):
        pipe.apply(pipe.shard(params), tokens())


def test_an_output_that_is_a_random_key_is_refused():
    model = jp.Model(
        embed=lambda w, batch: {"h": batch["x"] @ w, "key": jax.vmap(jax.random.key)(batch["id"])},
        layer=lambda w, x, batch: x | {"h": x["h"] + jnp.tanh(x["h"] @ w)},
        loss=lambda w, x, batch: jnp.mean((x["h"] @ w) ** 2),
    )
    params = {"embed": jnp.eye(4), "layers": [jnp.eye(4)] * 2, "head": jnp.ones(4)}
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=2)
    with pytest.raises(ValueError, match=r"output\['key'\] is a random key"):
        pipe.apply(pipe.shard(params), {"x": jnp.ones((4, 4)), "id": jnp.arange(4)})


def test_the_output_alone_may_take_a_key():
    def drawn(w: Any, x: Any, batch: Any, key: Any) -> Any:
        return x + jax.random.normal(key, x.shape)

    params = {"embed": jnp.ones(4), "layers": [jnp.ones(4)] * 2, "head": {}}
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    model = jp.Model(
        lambda w, batch: batch["x"] * w,
        lambda w, x, batch: x * w,
        lambda w, x, batch: jnp.mean(x),
        output=drawn,
    )
    pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=2)
    key, batch = jax.random.key(0), {"x": jnp.ones((4, 4))}
    outputs = pipe.jit(pipe.apply)(pipe.shard(params), batch, key)
    for m in range(2):  # keys as docs/explanation/exactness.md has them
        own = key
        for index in (0, m, 1):
            own = jax.random.fold_in(own, index)
        piece = outputs[2 * m : 2 * (m + 1)]
        np.testing.assert_allclose(piece, 1 + jax.random.normal(own, (2, 4)), rtol=1e-5)
