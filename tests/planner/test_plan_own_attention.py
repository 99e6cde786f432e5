"""Attention of a user's own model in plans: the kernel of the devices that are asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe.kernels import trace_for
from jaxpipe.planner._devices import absent_devices, parse_devices
from jaxpipe.sharding import make_mesh

H, K, C, T, V, L = 8, 2, 128, 1024, 256, 4
D = H * C


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def projected(w, x):
    heads = {"q": H, "k": K, "v": K}
    return [(x @ w[name]).reshape(*x.shape[:2], count, C) for name, count in heads.items()]


def model_with(attend: Any) -> tuple[jp.Model, dict[str, Any]]:
    def layer(w, x, batch):
        del batch
        return x + attend(*projected(w, x)).reshape(x.shape) @ w["out"]

    one = {"q": shape(D, H * C), "k": shape(D, K * C), "v": shape(D, K * C), "out": shape(D, D)}
    model = jp.Model(
        embed=lambda w, batch: w[batch["tokens"]],
        layer=layer,
        loss=lambda w, x, batch: jnp.mean((x @ w).astype(jnp.float32)),
    )
    params = {"embed": shape(V, D), "layers": [one] * L, "head": shape(D, V)}
    return model, {"params": params, "example": {"tokens": shape(1, T, dtype=jnp.int32)}}


def planned(devices: str, attend: Any = jp.attention) -> Any:
    model, given = model_with(attend)
    return jp.plan(model, devices, 8, num_plans=1, **given).request


def rows_of_residuals(platform: str) -> int:
    """Returns the bytes for each token that the kernel itself stores, by JAX's derivative of it."""
    device = jax.sharding.AbstractDevice(platform, None, platform)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)

    def size(rows: int) -> int:
        q, kv = shape(rows, T, H, C), shape(rows, T, K, C)
        with jax.sharding.use_abstract_mesh(mesh):
            closed: Any = jax.make_jaxpr(lambda *a: jax.vjp(jp.attention, *a)[1])(q, kv, kv)
        return sum(v.size * v.dtype.itemsize for v in closed.out_avals)

    return (size(2) - size(1)) // T


def test_a_token_stores_what_the_kernel_of_the_devices_stores():
    """Beside it a layer stores what products read: x, and the result in the shape of x."""
    (stored,) = planned("v5p-8").model.saved("none")
    assert 2 * stored.channels == 2 * (2 * D) + rows_of_residuals("tpu")
    of_gpus = planned("h100:8").model.saved("none")
    assert of_gpus == (stored,)  # cuDNN's backward reads the same arrays


def test_no_scores_are_counted_where_the_devices_have_a_kernel():
    layer = planned("v5p-8").work.layers[0]
    assert [(p.k, p.n) for p in layer.products] == [(D, D), (D, K * C), (D, K * C), (D, D)]
    assert (layer.attention.heads, layer.attention.positions(T)) == (H, T / 2)
    assert (layer.attention.kv_channels, layer.attention.backward_products) == (2 * K * C, 7)
    assert planned("h100:8").work.layers[0].attention.backward_products == 5


def test_scores_are_counted_where_the_devices_have_none():
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention casts scores
        layer = planned("here").work.layers[0]
    assert layer.attention is None
    assert (C, H * T) in [(p.k, p.n) for p in layer.products]


def sees_a_window(q, k, v):
    return jp.attention(q, k, v, window=256, causal=False)


def of_each_row(q, k, v):
    return jax.vmap(lambda *row: jp.attention(*(x[None] for x in row))[0])(q, k, v)


@pytest.mark.parametrize(
    ("attend", "positions"), [(sees_a_window, 512 - 512**2 / (2 * T)), (of_each_row, T / 2)]
)
def test_what_a_query_sees_is_counted(attend: Any, positions: float):
    attention = planned("v5p-8", attend).work.layers[0].attention
    assert attention.heads == H
    assert attention.positions(T) == positions


def test_a_layer_may_have_attention_twice():
    def twice(q, k, v):
        return jp.attention(jp.attention(q, k, v), k, v, window=256)

    attention = planned("v5p-8", twice).work.layers[0].attention
    assert attention.heads == 2 * H
    inside = 256 - 256**2 / (2 * T)
    assert attention.positions(T) == (inside + T / 2) / 2


def test_attention_in_a_shard_map_of_the_layer_has_a_derivative():
    mesh = make_mesh({"expert": 4}, devices=absent_devices(parse_devices("v5p-8")))
    on_rows = jax.shard_map(
        jp.attention, mesh=mesh, in_specs=(P("expert"),) * 3, out_specs=P("expert")
    )
    q, kv = shape(4, T, H, C), shape(4, T, K, C)
    with trace_for("tpu"):
        grads = jax.eval_shape(jax.grad(lambda *a: on_rows(*a).sum(), (0, 1, 2)), q, kv, kv)
    assert [x.shape for x in grads] == [q.shape, kv.shape, kv.shape]
