"""Flash attention for GPUs against the attention of `jax.nn`: its arguments, masks and shards.

A CPU runs cuDNN's in XLA's implementation of the same call, and Pallas's in the interpreter.
"""

import importlib.util
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from harness.contract import assert_close
from jaxpipe.kernels import (
    Scores,
    cudnn_attention,
    dot_product_attention,
    pallas_gpu_attention,
)
from jaxpipe.sharding import DEFAULT_RULES, make_mesh
from jaxpipe.xla import topology_devices

LENGTH, ROWS = 128, 4
KERNELS = {
    "cudnn": partial(cudnn_attention, packed=True, implementation="xla"),
    "pallas": partial(pallas_gpu_attention, interpret=True),
}


def heads(seed: int, count: int, width: int = 16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (ROWS, LENGTH, count, width))


QKV = heads(0, 4), heads(1, 2), heads(2, 2)
ENDS = jnp.array([[100], [64], [30], [97]], jnp.int32)
TWO_DOCUMENTS = jnp.where(jnp.arange(LENGTH) < ENDS, 1, 2).astype(jnp.int32)
PADDED = jnp.where(jnp.arange(LENGTH) < ENDS, 1, 0).astype(jnp.int32)


def compare(attention: Callable, qkv=QKV, segments=TWO_DOCUMENTS) -> None:
    """Compares outputs and gradients, those of padding left out."""
    real = (segments > 0)[:, :, None, None]

    def outputs_and_gradients(attention: Callable):
        def loss(q, k, v):
            out = jnp.where(real, attention(q, k, v, segments), 0)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)

    (_, out), gradients = outputs_and_gradients(attention)
    (_, true_out), true_gradients = outputs_and_gradients(dot_product_attention)
    assert_close(out, true_out, "output")
    for name, gradient, true in zip("qkv", gradients, true_gradients, strict=True):
        assert_close(gradient, true, f"gradient of {name}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_rows_on_one_device(kernel):
    compare(KERNELS[kernel](DEFAULT_RULES))


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_may_be_narrower_than_keys(kernel):
    compare(KERNELS[kernel](DEFAULT_RULES), (heads(0, 2), heads(1, 2), heads(2, 2, 12)))


def test_rows_of_one_document_need_no_mask():
    unpacked = cudnn_attention(DEFAULT_RULES, packed=False, implementation="xla")
    compare(unpacked, segments=PADDED)
    compare(unpacked, segments=jnp.ones_like(PADDED))


def test_what_is_not_packed_has_no_mask_in_the_program():
    def text(packed: bool) -> str:
        attention = cudnn_attention(DEFAULT_RULES, packed=packed, implementation="xla")
        return str(jax.make_jaxpr(attention)(*QKV, TWO_DOCUMENTS))

    same_document = f"bool[{ROWS},{LENGTH},{LENGTH}]"
    assert same_document in text(packed=True)
    assert same_document not in text(packed=False)


def in_a_pipeline(attention: Callable) -> Callable:
    """Half of the rows on each rank."""
    spec = P("stage")
    return jax.shard_map(attention, axis_names={"stage"}, in_specs=(spec,) * 4, out_specs=spec)


@pytest.mark.parametrize("kernel", KERNELS)
def test_shards_of_rows_and_heads(kernel):
    with jax.set_mesh(make_mesh({"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4])):
        compare(KERNELS[kernel](DEFAULT_RULES))


def test_shards_inside_a_pipeline():
    # Pallas's interpreter cannot run on ranks; its kernel is compiled for them below.
    mesh = make_mesh({"stage": 2, "fsdp": 2, "tensor": 2}, devices=jax.devices()[:8])
    with jax.set_mesh(mesh):
        compare(in_a_pipeline(KERNELS["cudnn"](DEFAULT_RULES)))


def test_errors_name_the_key():
    message = "`attention=pallas` needs whole sequences"
    with jax.set_mesh(make_mesh({"context": 8})), pytest.raises(ValueError, match=message):
        KERNELS["pallas"](DEFAULT_RULES)(*QKV, TWO_DOCUMENTS)
    x, segments = jnp.ones((1, 200, 2, 16)), jnp.ones((1, 200), jnp.int32)
    with pytest.raises(ValueError, match=r"have 200 tokens\. Pallas's attention works in blocks"):
        KERNELS["pallas"](DEFAULT_RULES)(x, x, x, segments)


gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None
    or importlib.util.find_spec("nvidia.cudnn") is None,
    reason="needs jaxpipe[aot-gpu]",
)


@gpu_compiler
def test_wide_heads_fit_into_the_memory_of_a_multiprocessor():
    (device,) = topology_devices("h100:1")
    where = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((1, 256, 2, 192), jnp.bfloat16, sharding=where)
    segments = jax.ShapeDtypeStruct((1, 256), jnp.int32, sharding=where)

    def loss(q, k, v, segments):
        return jnp.sum(pallas_gpu_attention(DEFAULT_RULES)(q, k, v, segments).astype(jnp.float32))

    assert jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, segments).compile()


@gpu_compiler
@pytest.mark.parametrize(
    ("attention", "calls"),
    [
        (cudnn_attention(DEFAULT_RULES, packed=False), ("fmhaSoftmax", "fmhaSoftmaxBackward")),
        (
            cudnn_attention(DEFAULT_RULES, packed=True),
            ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"),
        ),
        (pallas_gpu_attention(DEFAULT_RULES), ("xla.gpu.triton",)),
    ],
    ids=["cudnn", "cudnn, packed", "pallas"],
)
def test_forward_and_backward_compile_for_gpus_that_are_not_there(attention, calls):
    devices = topology_devices("h100:8")
    mesh = make_mesh({"stage": 2, "fsdp": 2, "tensor": 2}, devices=devices)
    where = jax.sharding.NamedSharding(mesh, P("stage"))

    def shaped(x, dtype):
        return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=where)

    def loss(q, k, v, segments):
        return jnp.sum(in_a_pipeline(attention)(q, k, v, segments).astype(jnp.float32))

    arguments = (*(shaped(x, jnp.bfloat16) for x in QKV), shaped(TWO_DOCUMENTS, jnp.int32))
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile()
    text = step.as_text() or ""
    assert all(f'{call}"' in text for call in calls)


@gpu_compiler
@pytest.mark.parametrize(
    "scores", [Scores(), Scores(window=300), Scores(causal=False, window=300)], ids=str
)
@pytest.mark.parametrize("size", [1, 4])
def test_slices_compile_for_gpus_that_are_not_there(scores: Scores, size: int):
    mesh = make_mesh({"fsdp": 8 // size, "context": size}, devices=topology_devices("h100:8"))
    attention = cudnn_attention(DEFAULT_RULES, scores, packed=True)

    def loss(q, k, v, segments):
        return jnp.sum(attention(q, k, v, segments).astype(jnp.float32))

    where = jax.sharding.NamedSharding(mesh, P("fsdp", "context"))
    x = jax.ShapeDtypeStruct((8, 2048, 4, 64), jnp.bfloat16, sharding=where)
    segments = jax.ShapeDtypeStruct((8, 2048), jnp.int32, sharding=where)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, segments).compile()
    text = step.as_text() or ""
    assert 'fmhaScaleBiasSoftmaxBackward"' in text
    assert ('"PADDING"' in text) == (scores == Scores() and size > 1)
