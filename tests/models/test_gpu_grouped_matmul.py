"""The grouped matrix product for GPUs, in Pallas's interpreter, against a loop over groups."""

import importlib.util
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from harness import contract
from harness.contract import Row, assert_close, check_row, parameters, plain, reference, slow
from jaxpipe.models.layers import pallas_gpu_grouped_matmul, ragged_dot, routed_experts
from jaxpipe.sharding import DEFAULT_RULES, make_mesh
from jaxpipe.xla import topology_devices

KERNEL = pallas_gpu_grouped_matmul(interpret=True)
# Neither tiles of 128 rows nor steps of 16 nor blocks of 64 fit; 37 rows have no group.
SHAPES, SIZES = ((300, 40), (4, 40, 136)), (140, 0, 33, 90)


def arguments(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    rows, weights = (
        jax.random.normal(k, shape, dtype) for k, shape in zip(keys, SHAPES, strict=True)
    )
    return rows, weights


def loop(rows, weights):
    cuts = np.cumsum([0, *SIZES])
    parts = [rows[cuts[g] : cuts[g + 1]] @ weights[g] for g in range(len(SIZES))]
    rest = jnp.zeros((rows.shape[0] - cuts[-1], weights.shape[2]), rows.dtype)
    return jnp.concatenate([*parts, rest])


def run(f: Any, rows, weights) -> Any:
    """Products and gradients, whose cotangents are no constants."""

    def loss(rows, weights):
        out = f(rows, weights)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(rows, weights)


def kernel(rows, weights, sizes=SIZES):
    return KERNEL(rows, weights, jnp.array(sizes, jnp.int32))


def test_products_and_gradients_are_those_of_a_loop_where_no_block_fits():
    (_, out), (of_rows, of_weights) = run(kernel, *arguments())
    (_, true), (true_of_rows, true_of_weights) = run(loop, *arguments())
    assert_close(out, true, "products")
    assert_close(of_rows, true_of_rows, "gradient of rows")
    assert_close(of_weights, true_of_weights, "gradient of weights")
    assert not np.any(of_weights[1]), "a group without rows"


def test_rows_without_a_group_are_never_read():
    rows, weights = arguments()
    poisoned = rows.at[sum(SIZES) :].set(jnp.nan)
    for leaf, true in zip(
        jax.tree.leaves(run(kernel, poisoned, weights)),
        jax.tree.leaves(run(kernel, rows, weights)),
        strict=True,
    ):
        np.testing.assert_array_equal(leaf, true)


def test_bfloat16_is_added_in_float32_and_rounded_once():
    half, cotangent = arguments(jnp.bfloat16), jax.random.normal(jax.random.key(1), (300, 136))
    cotangent = cotangent.astype(jnp.bfloat16)

    def both(f, *arrays):
        out, pull_back = jax.vjp(f, *arrays)
        return out, *pull_back(cotangent.astype(out.dtype))

    result = jax.jit(partial(both, kernel))(*half)
    true = jax.jit(partial(both, loop))(*(x.astype(jnp.float32) for x in half))
    for leaf, expected in zip(result, true, strict=True):
        assert leaf.dtype == jnp.bfloat16
        size = np.abs(expected)
        error = np.abs(np.asarray(leaf, np.float32) - expected)
        assert np.all(error <= 2**-8 * size + 1e-5 * size.max())


def with_kernel(rules: Any, **options: Any) -> Any:
    return routed_experts(rules, KERNEL, **options)


# Pallas's interpreter cannot run loops of a kernel on ranks of one program: those rows are twins
# on one device. Ranks with programs of their own can, also with a mesh for each.
ROWS = slow(
    [
        Row("circular", "deepseek", 2, 1, 4, axes=None, packed=True),
        Row("circular", "deepseek", 2, 2, 4, axes=None, remat="none"),
        Row("scheduled", "deepseek", 2, 1, 4, axes=None, schedule="zero_bubble_h1"),
        Row("scheduled", "deepseek", 2, 2, 4, axes=None, schedule="interleaved_1f1b"),
        Row("mpmd", "deepseek", 2, 1, 4, axes=(("expert", 2),), schedule="zero_bubble_h1"),
        Row("mpmd", "deepseek", 2, 1, 4, axes=(("fsdp", 2),), schedule="1f1b"),
    ]
)


@pytest.mark.parametrize("row", parameters(ROWS))
def test_engines_compute_what_xlas_product_computes_without_a_pipeline(row, monkeypatch):
    reference(plain(row))  # with `ragged_dot`; it is kept
    monkeypatch.setattr(contract, "routed_experts", with_kernel)
    check_row(row)


# jax 0.12 says that it will remove Pallas's Triton one day.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs jaxpipe[aot-gpu]"
)
def test_it_compiles_for_gpus_that_are_not_there_and_holds_no_product_for_every_expert():
    m, E, D, F = 1024, 16, 128, 192
    devices = topology_devices("h100:8")
    mesh = make_mesh({"stage": 2, "fsdp": 2, "expert": 2}, devices=devices)
    where = jax.sharding.NamedSharding(mesh, P())
    shapes = ((4, m // 4, D), {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)})
    x, w = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple) and isinstance(leaf[0], int),
    )
    chosen = jax.ShapeDtypeStruct((4, m // 4, 2), jnp.int32, sharding=where)

    def temporary_bytes(grouped_matmul: Any) -> int:
        experts = routed_experts(DEFAULT_RULES, grouped_matmul)

        def loss(w, x, chosen):
            w, x = jax.lax.pcast((w, x), "stage", to="varying")
            out = experts(w, x, chosen, jnp.ones(chosen.shape, x.dtype))
            return jax.lax.psum(jnp.sum(out.astype(jnp.float32)), "stage")

        in_pipeline = jax.shard_map(loss, axis_names={"stage"}, in_specs=P(), out_specs=P())
        with jax.set_mesh(mesh):
            step = jax.jit(jax.grad(in_pipeline, argnums=(0, 1))).lower(w, x, chosen).compile()
        calls = (step.as_text() or "").count('custom_call_target="__gpu$xla.gpu.triton"')
        assert (calls > 0) == (grouped_matmul is not ragged_dot)
        analysis = step.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(pallas_gpu_grouped_matmul()) < temporary_bytes(ragged_dot) / 2
