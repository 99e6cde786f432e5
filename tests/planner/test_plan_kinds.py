"""Plans of models whose layers differ, against XLA's counts, hand arithmetic and plain programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp

D, F, V, T, H = 256, 1024, 512, 64, 4
EXAMPLE = {"tokens": jax.ShapeDtypeStruct((4, T), jnp.int32)}
ATTENTION, MIXER = 4 * D * D, 2 * D * F
ORDER = ("mixer", "mixer", "mixer", "attention") * 4


def attention(w, x, batch):
    del batch
    q, k, v = (y.reshape(*y.shape[:2], H, D // H) for y in jnp.split(x @ w["qkv"], 3, axis=-1))
    shares = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", q, k), axis=-1)
    return x + jnp.einsum("bhts,bshc->bthc", shares, v).reshape(x.shape) @ w["out"]


def mixer(w, x, batch):
    del batch
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss(w, x, batch):
    logp = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logp, batch["tokens"][..., None], -1))


MODEL = jp.Model(
    lambda w, batch: w[batch["tokens"]],
    {"mixer": mixer, "attention": attention},
    loss,
    order=ORDER,
)


def make(fill: Callable[..., Any]) -> dict[str, Any]:
    """Returns parameters, of which `fill` makes each by its shape."""
    layers = {
        "mixer": lambda: {"up": fill(D, F), "down": fill(F, D)},
        "attention": lambda: {"qkv": fill(D, 3 * D), "out": fill(D, D)},
    }
    return {"embed": fill(V, D), "layers": [layers[kind]() for kind in ORDER], "head": fill(D, V)}


SHAPES = make(lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32))


def test_the_work_of_each_kind_is_what_xla_counts():
    given: dict[str, Any] = {"params": SHAPES, "example": EXAMPLE, "max_stages": 1}
    work = jp.plan(MODEL, "v5p-8", 64, **given).request.work
    assert tuple(layer.name for layer in work.kinds()) == ORDER
    assert work.parameters == 12 * MIXER + 4 * ATTENTION + 2 * V * D
    x, row = jnp.zeros((1, T, D)), {"tokens": jnp.zeros((1, T), jnp.int32)}
    for layer in work.layers[:2]:
        function, kind = {"mixer": mixer, "attention": attention}[layer.name], layer.name
        weights = SHAPES["layers"][ORDER.index(kind)]
        xla = jax.jit(function).lower(weights, x, row).cost_analysis() or {}
        counted = T * sum(2 * p.k * p.n * p.copies for p in layer.products)
        assert counted == pytest.approx(xla["flops"], rel=0.03)  # which counts tanh and softmax too


def test_layers_are_placed_by_what_they_cost():
    # Two stages of a heavy layer and many light ones: four light ones cost what a heavy one does.
    order = ("mixer",) * 2 + ("attention",) * 6
    model = jp.Model(MODEL.embed, MODEL.layer, loss, order=order)
    layers = [SHAPES["layers"][ORDER.index(kind)] for kind in order]
    given = {"params": SHAPES | {"layers": layers}, "example": EXAMPLE, "num_plans": 50}
    plans = jp.plan(model, "v5p-8", 64, mesh={"stage": 2, "data": 2}, **given)
    flops = {"mixer": 2 * T * MIXER, "attention": 2 * T * ATTENTION + 4 * T * T * D}
    costs = [flops[kind] for kind in order]
    best = min(range(1, 8), key=lambda cut: max(sum(costs[:cut]), sum(costs[cut:])))
    for plan in plans.plans:
        if len(plan.candidate.counts) == 2:
            assert plan.settings["layers_per_stage"] == (best, 8 - best)


@pytest.mark.parametrize("engine", ["mpmd", "scheduled"])
def test_a_rank_of_mpmd_stores_its_layers_and_one_program_those_of_every_kind(engine: str):
    # An encoder and a decoder: half of the ranks have layers of one kind.
    order = ("mixer",) * 8 + ("attention",) * 8
    model = jp.Model(
        MODEL.embed, MODEL.layer, loss, order=order, layer_costs={"mixer": 1, "attention": 1}
    )
    layers = [SHAPES["layers"][ORDER.index(kind)] for kind in order]
    given: dict[str, Any] = {"params": SHAPES | {"layers": layers}, "example": EXAMPLE}
    plans = jp.plan(model, "v5p-8", 64, mesh={"stage": 4}, chunks=1, num_plans=50, **given).plans
    plan = next(
        p for p in plans if p.candidate.engine.name == engine and p.settings["schedule"] == "1f1b"
    )
    layers = 4 * max(MIXER, ATTENTION) if engine == "mpmd" else 4 * MIXER + 4 * ATTENTION
    per_rank = layers + 2 * V * D  # embedding and head count on every rank, also with mpmd
    assert plan.memory.weights == 4 * per_rank
    assert plan.memory.optimizer == 8 * per_rank


def test_what_fits_no_layout_says_how_much_is_missing():
    given: dict[str, Any] = {"params": SHAPES, "example": EXAMPLE, "memory_gb": 0.01}
    with pytest.raises(ValueError, match=r"No layout fits: the leanest .* needs .* MB too much"):
        jp.plan(MODEL, "v5p-8", 64, mesh={"stage": 4}, **given)


def test_the_first_plan_computes_what_the_plain_program_does():
    rng = np.random.default_rng(0)
    params = make(lambda *dims: jnp.asarray(rng.normal(size=dims) / dims[0] ** 0.5, jnp.float32))
    batch = {"tokens": jnp.asarray(rng.integers(0, V, (8, T)))}
    given: dict[str, Any] = {"params": params, "example": batch}
    given |= {"mesh": {"stage": 4, "data": 2}, "schedule": "1f1b", "microbatches": 4, "chunks": 1}
    pipe = jp.plan(MODEL, "here", 8, **given).pipeline()

    def plain(params):
        x = params["embed"][batch["tokens"]]
        for kind, w in zip(ORDER, params["layers"], strict=True):
            x = {"mixer": mixer, "attention": attention}[kind](w, x, batch)
        return loss(params["head"], x, batch)

    value, grads = jax.jit(jax.value_and_grad(plain))(params)
    stored = pipe.shard(params)
    (piped, _), piped_grads = pipe.jit(pipe.value_and_grad)(stored, batch)
    np.testing.assert_allclose(piped, value, rtol=1e-5)
    for ours, true in zip(
        jax.tree.leaves(pipe.unshard(piped_grads)), jax.tree.leaves(grads), strict=True
    ):
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-5 * float(jnp.abs(true).max()))
