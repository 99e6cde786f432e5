"""Frozen parameters in every engine: exact, and nothing of their shape is computed or stored."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe._compat import scan_sizes

D, F, V, L, B, T, RANK = 8, 24, 12, 5, 8, 4, 2


def init() -> dict[str, Any]:
    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-1] ** 0.5

    def layer(key: jax.Array) -> dict[str, Any]:
        up, down, a, b = jax.random.split(key, 4)
        lora = {"a": normal(a, D, RANK), "b": normal(b, RANK, F)}
        return {"base": {"up": normal(up, D, F), "down": normal(down, F, D)}, "lora": lora}

    keys = jax.random.split(jax.random.key(0), L + 2)
    head = {"scale": jnp.ones(D), "out": normal(keys[1], D, V)}
    return {"embed": normal(keys[0], V, D), "layers": [layer(k) for k in keys[2:]], "head": head}


def batch() -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(1), (B, T + 1), 0, V)}


def embed(w: Any, batch: Any) -> Any:
    return w[batch["tokens"][:, :-1]]


def layer(w: Any, x: Any, batch: Any) -> Any:
    base, lora = w["base"], w["lora"]
    return x + jnp.tanh(x @ base["up"] + (x @ lora["a"]) @ lora["b"]) @ base["down"]


def dropout_layer(w: Any, x: Any, batch: Any, key: Any) -> Any:
    return layer(w, x * jax.random.bernoulli(key, 0.75, x.shape).astype(x.dtype), batch)


def loss(w: Any, x: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax((x * w["head"]["scale"]) @ w["head"]["out"] + x @ w["embed"].T)
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(batch["tokens"][:, 1:], V), axis=-1))


MODEL = jp.Model(embed, layer, loss, tied=True)


def plain(params: Any, batch: Any) -> Any:
    """The program that a user would write without a pipeline."""
    x = embed(params["embed"], batch)
    for w in params["layers"]:
        x = layer(w, x, batch)
    return loss({"head": params["head"], "embed": params["embed"]}, x, batch)


def base(path: str, leaf: Any) -> bool:
    return "lora" not in path and "scale" not in path


ALL_BUT_HEAD = {"embed": True, "layers": [True] * L, "head": False}


def pipeline(
    model: Any = MODEL, schedule: Any = "1f1b", frozen: Any = base, options: Any = (), **sizes: int
) -> Any:
    count = int(np.prod(list(sizes.values())))
    mesh = jp.make_mesh(sizes, devices=jax.devices()[:count])
    return jp.pipeline(
        model, schedule=schedule, mesh=mesh, microbatches=4, frozen=frozen, **dict(options)
    )


def leaves(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


def close(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        error = np.abs(got[name] - value).max() / np.abs(value).max()
        assert error <= 1e-5, f"{name}: {error:.1e}"


ROWS = {
    "unpipelined": (base, None, {"stage": 2}, {}),
    "circular, fsdp": (base, "circular", {"stage": 2, "fsdp": 2}, {"layers_per_stage": (3, 2)}),
    "zbv, uneven, fsdp": (base, "zbv", {"stage": 2, "fsdp": 2}, {}),
    "mpmd": (base, "interleaved_1f1b", {"stage": 2}, {"engine": "mpmd"}),
    "dualpipe, uneven, fsdp": (base, "dualpipe", {"stage": 2, "fsdp": 2}, {}),
    "mpmd, dualpipe": (base, "dualpipe", {"stage": 2}, {"engine": "mpmd"}),
    "circular, only the head": (ALL_BUT_HEAD, "circular", {"stage": 2}, {}),
    "zero bubble, only the head": (ALL_BUT_HEAD, "zero_bubble_h1", {"stage": 2}, {}),
    "mpmd, only the head": (ALL_BUT_HEAD, "1f1b", {"stage": 2}, {"engine": "mpmd"}),
}
SLOW = [name for name in ROWS if "dualpipe" in name]


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=pytest.mark.slow if r in SLOW else ()) for r in ROWS]
)
def test_loss_and_gradients_are_those_of_the_plain_program(row: str):
    frozen, schedule, sizes, options = ROWS[row]
    pipe = pipeline(schedule=schedule, frozen=frozen, options=options, **sizes)
    params = pipe.shard(init())
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch))
    (value, _), grads = step(params, batch())
    wanted, wanted_grads = jax.value_and_grad(plain)(init(), batch())
    trained = ("lora", "scale") if frozen is base else ("head",)
    wanted_grads = leaves(wanted_grads)
    wanted_grads = {k: v for k, v in wanted_grads.items() if any(name in k for name in trained)}
    close({"loss": np.asarray(float(value))}, {"loss": np.asarray(wanted)})
    close(leaves(pipe.unshard(grads)), wanted_grads)
    assert jax.tree.structure(pipe.tree_map(lambda w, g: w - g, params, grads)) == (
        jax.tree.structure(params)
    )


def test_twenty_steps_of_lora_are_those_of_the_plain_program():
    pipe, tx = pipeline(schedule="zero_bubble_h1", stage=2), optax.adamw(1e-2)
    trainable, frozen = pipe.partition(pipe.shard(init()))
    stored_tx = pipe.optimizer(tx)
    opt_state = stored_tx.init(trainable)

    @pipe.jit
    def train_step(trainable: Any, opt_state: Any, frozen: Any, batch: Any) -> Any:
        (value, _), grads = pipe.value_and_grad(pipe.combine(trainable, frozen), batch)
        updates, opt_state = stored_tx.update(grads, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state, value

    labels = jax.tree_util.tree_map_with_path(
        lambda path, leaf: "frozen" if base(jax.tree_util.keystr(path), leaf) else "trained", init()
    )
    plain_tx = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": tx}, labels)
    params, plain_state = init(), plain_tx.init(init())

    @jax.jit
    def plain_step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(plain)(params, batch)
        updates, opt_state = plain_tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    with jax.numpy_dtype_promotion("standard"):  # optax wants it
        for _ in range(20):
            trainable, opt_state, value = train_step(trainable, opt_state, frozen, batch())
            params, plain_state, wanted = plain_step(params, plain_state, batch())
            assert abs(value - wanted) <= 1e-6 * abs(wanted)
    back = pipe.unshard(pipe.combine(trainable, frozen))
    assert jax.tree.structure(back) == jax.tree.structure(params)
    close(leaves(back), leaves(params))
    bare = pipe.unshard(trainable)
    assert bare["layers"][0]["base"] == {"up": None, "down": None} and bare["embed"] is None


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


COMPUTED = (
    "dot_general",
    "add",
    "add_any",
    "mul",
    "psum",
    "reduce_scatter",
    "dynamic_update_slice",
)
FROZEN_SHAPES = ((D, F), (F, D), (V, D), (D, V))


def of_frozen_shape(pipe: Any) -> tuple[int, int]:
    """Counts (results of computations, arrays that a loop carries) of the shape of base weights."""
    params = pipe.shard(init())
    closed = jax.make_jaxpr(pipe.value_and_grad)(params, batch())
    computed = carried = 0
    for eqn in equations(closed.jaxpr):
        if eqn.primitive.name in COMPUTED:
            computed += sum(v.aval.shape[-2:] in FROZEN_SHAPES for v in eqn.outvars)
        if eqn.primitive.name == "scan":
            carry = eqn.outvars[: scan_sizes(eqn.params)[1]]
            carried += sum(v.aval.shape[-2:] in FROZEN_SHAPES for v in carry)
    return computed, carried


@pytest.mark.parametrize("schedule", ["circular", "1f1b", "zero_bubble_h1"])
def test_nothing_of_the_shape_of_a_frozen_weight_is_computed_or_carried(schedule: str):
    assert min(of_frozen_shape(pipeline(schedule=schedule, frozen=None, stage=1))) > 0
    assert of_frozen_shape(pipeline(schedule=schedule, stage=1)) == (0, 0)


@pytest.mark.parametrize("schedule", ["circular", "1f1b", "zero_bubble_h1"])
def test_so_it_is_in_uneven_stages_but_for_what_their_loops_stack(
    schedule: str, monkeypatch: pytest.MonkeyPatch
):
    """A condition of an uneven stage returns the weights that it reads, for its backward."""
    monkeypatch.setattr("jaxpipe.ir.graph._graph.empty_stack", lambda aval, length: None)
    assert min(of_frozen_shape(pipeline(schedule=schedule, frozen=None, stage=2))) > 0
    assert of_frozen_shape(pipeline(schedule=schedule, stage=2)) == (0, 0)


def test_each_layer_gathers_its_own_frozen_weights():
    pipe = pipeline(schedule="circular", stage=2, fsdp=2)
    closed = jax.make_jaxpr(pipe.value_and_grad)(pipe.shard(init()), batch())
    gathered = {
        eqn.outvars[0].aval.shape
        for eqn in equations(closed.jaxpr)
        if eqn.primitive.name.startswith("all_gather")
    }
    assert {(D, F), (F, D)} <= gathered
    assert all(shape[-2:] not in FROZEN_SHAPES[:2] for shape in gathered if len(shape) > 2)


def test_a_compiled_program_has_no_memory_for_gradients_of_frozen_weights():
    def written(schedule: str, frozen: Any) -> int:
        pipe = pipeline(schedule=schedule, frozen=frozen, stage=2)
        params = pipe.shard(wide)
        compiled = pipe.jit(pipe.value_and_grad).lower(params, batch()).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    scale = 64
    wide = jax.tree.map(lambda x: jnp.tile(x, scale) if x.shape[-1] == F else x, init())
    for one in wide["layers"]:
        one["base"]["down"] = jnp.tile(one["base"]["down"], (scale, 1))
    base_bytes = 4 * 2 * D * F * scale * -(-L // 2)  # of the layers of a stage
    for schedule in ("1f1b", "zero_bubble_h1"):
        assert written(schedule, base) <= written(schedule, None) - base_bytes


def test_embedding_and_loss_read_frozen_weights_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    pipe = jp.pipeline(MODEL, schedule="1f1b", mesh=mesh, microbatches=4, frozen=base)
    value, _ = pipe.jit(pipe.value)(pipe.shard(init()), batch())
    close({"loss": np.asarray(value)}, {"loss": np.asarray(plain(init(), batch()))})


def test_dropout_and_frozen_weights_go_together():
    model = jp.Model(embed, dropout_layer, loss, tied=True)

    def run(**options: Any) -> dict[str, Any]:
        pipe = pipeline(model, **options)
        step = pipe.jit(lambda *arguments: pipe.value_and_grad(*arguments, jax.random.key(3))[1])
        return leaves(pipe.unshard(step(pipe.shard(init()), batch())))

    close(run(schedule="zbv", stage=2), run(schedule=None, stage=1))


def test_leaves_that_a_model_computes_are_frozen_with_their_sources():
    def to_groups(params: Any) -> dict[str, Any]:
        layers = jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])
        return {"embed": params["embed"].T, "layers": layers, "head": params["head"]}

    def transposed(w: Any, batch: Any) -> Any:
        return embed(w.T, batch)

    model = jp.Model(
        transposed, layer, lambda w, x, b: loss(w | {"embed": w["embed"].T}, x, b), True, to_groups
    )
    stored = pipeline(model, stage=1, schedule=None).shard(init())
    trainable, frozen = pipeline(model, stage=1, schedule=None).partition(stored)
    assert trainable["embed"] is None and trainable["layers"].stages["base"]["up"] is None
    assert [x.shape[-1] for x in jax.tree.leaves(frozen["head"])] == [V]
    with pytest.raises(ValueError, match=r"selects some of \['layers'\]\[0\].*one array"):
        pipeline(model, frozen=lambda path, _: "[0]['base']" in path, stage=1).shard(init())


def test_bad_rules_are_refused_before_anything_compiles():
    def refused(match: str, frozen: Any) -> None:
        with pytest.raises(ValueError, match=match):
            pipeline(frozen=frozen, stage=1, schedule=None).shard(init())

    with pytest.raises(ValueError, match="all layers share"):
        pipeline(stage=1, schedule=None).shard(init() | {"shared": jnp.ones(D)})

    refused(r"selects every leaf of `params`, such as \['embed'\]", lambda path, leaf: True)
    refused("selects no leaf", lambda path, leaf: "bass" in path)
    refused(r"\['layers'\]\[0\]\['base'\].* and False for .*\[1\]", lambda path, _: "[0]" in path)
    refused("no tree prefix", {"embed": True, "layers": False})
    refused(r"Give a function", {"embed": True, "layers": [0.5] * L, "head": False})


@pytest.mark.parametrize("gather", ["tick", "layer"])
@pytest.mark.parametrize("frozen", [None, base], ids=["trained", "frozen"])
def test_a_rule_of_dtypes_is_asked_for_the_same_paths_of_frozen_parameters(frozen, gather):
    names = {f"['layers']{jax.tree_util.keystr(path)}" for path, _ in LEAVES_OF_LAYER}
    names |= {"['embed']", "['head']['scale']", "['head']['out']"}

    def rule(path: str) -> Any:
        assert path in names
        return jnp.bfloat16 if "'up'" in path else None

    def with_up(w: Any, dtype: Any) -> Any:
        up = w["base"]["up"].astype(dtype).astype(jnp.float32)
        return w | {"base": w["base"] | {"up": up}}

    def widening(w: Any, x: Any, batch: Any) -> Any:
        return layer(with_up(w, jnp.float32), x, batch)

    params = init()
    wanted = plain(
        params | {"layers": [with_up(w, jnp.bfloat16) for w in params["layers"]]}, batch()
    )
    options = {"gather": gather, "compute_dtype": rule}
    model = jp.Model(embed, widening, loss, tied=True)
    pipe = pipeline(model, frozen=frozen, options=options, stage=2, fsdp=2)
    assert abs(float(wanted) - float(plain(params, batch()))) > 1e-4
    found, _ = pipe.jit(lambda params, batch: pipe.value(params, batch))(
        pipe.shard(params), batch()
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


LEAVES_OF_LAYER = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init)["layers"][0])
