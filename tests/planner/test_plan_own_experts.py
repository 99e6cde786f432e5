"""Plans of a user's own mixture of experts, whose layers divide experts by a `jax.shard_map`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpipe as jp

D, F, E, V, T, L, ROWS = 64, 128, 8, 32, 16, 4, 32


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def experts(w, x, first, num_own):
    """Runs the experts `first` and its neighbours, of E, on the tokens that chose them."""
    chosen = jnp.argmax(x @ w["router"], axis=-1).reshape(-1)
    group = chosen - first
    group = jnp.where((group >= 0) & (group < num_own), group, num_own)
    order = jnp.argsort(group)
    sizes = jnp.bincount(group, length=num_own + 1)[:-1].astype(jnp.int32)
    hidden = jax.nn.gelu(lax.ragged_dot(x.reshape(-1, D)[order], w["up"], sizes))
    out = lax.ragged_dot(hidden, w["down"], sizes)
    return jnp.zeros((chosen.size, D)).at[order].set(out).reshape(x.shape)


def make(mesh: Mesh | None) -> tuple[jp.Model, Any]:
    def on_own_rows(w, x):
        gathered = lax.all_gather(x, "expert", tiled=True)
        num_own = w["up"].shape[0]
        y = experts(w, gathered, lax.axis_index("expert") * num_own, num_own)
        return x + lax.psum_scatter(y, "expert", tiled=True)

    def layer(w, x, batch):
        del batch
        if mesh is None:
            return x + experts(w, x, 0, E)
        specs = {"router": P(), "up": P("expert"), "down": P("expert")}
        how = {"mesh": mesh, "in_specs": (specs, P("expert")), "out_specs": P("expert")}
        return jax.shard_map(on_own_rows, check_vma=False, **how)(w, x)

    def loss(w, x, batch):
        logp = jax.nn.log_softmax(x @ w)
        return -jnp.mean(jnp.take_along_axis(logp, batch["tokens"][..., None], -1))

    one = {"router": shape(D, E), "up": shape(E, D, F), "down": shape(E, F, D)}
    params = {"embed": shape(V, D), "layers": [one] * L, "head": shape(D, V)}
    return jp.Model(lambda w, batch: w[batch["tokens"]], layer, loss), params


def spec(path: str, leaf: Any) -> P | None:
    del path
    return P("expert") if leaf.ndim == 3 else None


EXAMPLE = {"tokens": shape(1, T, dtype=jnp.int32)}
planned = partial(jp.plan, make, "here", ROWS, example=EXAMPLE, param_specs=spec, microbatches=4)


def test_weights_and_products_are_divided_over_experts():
    plans = planned(mesh={"stage": 2, "expert": 4}, schedule="1f1b")
    divided, whole = L // 2 * 2 * E * D * F / 4, L // 2 * D * E + 2 * V * D
    assert plans.best.memory.weights == 4 * (divided + whole)
    layer = plans.request.work.layers[0]
    assert sorted((p.k, p.n) for p in layer.products) == sorted([(D, E), (D, F), (F, D)])
    # A token of a device is gathered for each device, and what experts return is scattered.
    assert layer.expert_boundary_bytes == 4 * D
    assert plans.request.tokens(plans.best.candidate) == ROWS / 4 / 4 * T
    assert "row_wise" not in plans.best.settings


def test_a_device_stores_what_it_gathers():
    """Rows of all devices that share experts, for each token of its own."""
    alone, shared = (
        planned(mesh={"stage": 8 // size, "expert": size}).request.model.saved("none")[0]
        for size in (2, 4)
    )
    # By hand: x in the order of experts and twice what is between the products.
    assert shared.channels - alone.channels >= 2 * (D + 2 * F)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", None])
def test_the_pipeline_of_such_a_plan_computes_what_the_plain_program_does(schedule: str | None):
    pipe = planned(mesh={"stage": 2, "expert": 4}, schedule=schedule).pipeline()
    keys = iter(jax.random.split(jax.random.key(0), 20))
    _, shapes = make(None)
    params = jax.tree.map(lambda x: 0.1 * jax.random.normal(next(keys), x.shape), shapes)
    batch = {"tokens": jax.random.randint(next(keys), (ROWS, T), 0, V)}
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), batch)

    def plain(params):
        x = params["embed"][batch["tokens"]]
        for w in params["layers"]:
            x = x + experts(w, x, 0, E)
        logp = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(logp, batch["tokens"][..., None], -1))

    wanted, wanted_grads = jax.value_and_grad(plain)(params)
    assert abs(float(value) - wanted) < 1e-5 * abs(wanted)
    pairs = zip(jax.tree.leaves(pipe.unshard(grads)), jax.tree.leaves(wanted_grads), strict=True)
    for grad, other in pairs:
        assert jnp.abs(grad - other).max() <= 1e-5 * jnp.abs(other).max()


def test_what_no_trace_says_is_refused_by_name():
    model, params = make(None)
    with pytest.raises(ValueError, match="`params` is given, and `model` is a function"):
        jp.plan(make, "here", ROWS, params=params, example=EXAMPLE)
    three: Any = lambda _: 3  # noqa: E731
    with pytest.raises(ValueError, match="called with a mesh, and returns a int"):
        jp.plan(three, "here", ROWS, example=EXAMPLE)
    given: dict[str, Any] = {"params": params, "example": EXAMPLE, "microbatches": 4}
    with pytest.raises(ValueError, match=r"4 shards of experts.*`make\(mesh\)"):
        jp.plan(model, "here", ROWS, mesh={"stage": 2, "expert": 4}, param_specs=spec, **given)
    with pytest.raises(ValueError, match=r"`param_specs` divides no weight of a layer over them"):
        jp.plan(model, "here", ROWS, mesh={"stage": 2, "tensor": 4}, **given)
