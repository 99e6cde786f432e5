"""A llama with splash attention through the circular pipeline, compiled by the TPU's compiler."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jaxpipe import models, sharding, spmd
from jaxpipe.autodiff import StagedModel
from jaxpipe.spmd import circular_engine
from jaxpipe.kernels import splash_attention
from jaxpipe.models.weights import stack_weights, weight_shapes

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
mesh = sharding.make_mesh({"stage": 2, "fsdp": 2}, devices=devices)
rules = sharding.DEFAULT_RULES
config = models.LlamaConfig(
    base_emb_dim=256, base_num_decoder_layers=4, base_num_query_heads=2, base_num_kv_heads=1,
    base_mlp_dim=256, head_dim=128, vocab_size=256,
)
model = StagedModel(*models.llama(
    config, attention=splash_attention(rules), dtype=jnp.bfloat16,
    constrain=sharding.Constrain(rules),
))
tree = models.llama_weights(config)
layer = stack_weights(tree.pop("layer"), (2, 2, 1), ("circular_repeats", "stage", "layers"))
tree["stages"] = layer

def struct(shape, sharding):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

shapes = weight_shapes(tree)
shardings = sharding.named_shardings(shapes, models.logical_axes(tree), mesh)
weights = jax.tree.map(struct, shapes, shardings)
rows = NamedSharding(mesh, sharding.partition_spec((None, "activation_batch"), rules))
names = ("tokens", "targets", "positions", "segment_ids", "target_weights")
batch_inputs = {
    name: jax.ShapeDtypeStruct(
        (4, 4, 256), jnp.float32 if name == "target_weights" else jnp.int32, sharding=rows
    )
    for name in names
}
with jax.set_mesh(mesh):
    step = jax.jit(lambda w, s: circular_engine.circular_value_and_grad(model, w, s, mesh=mesh))
    text = step.lower(weights, batch_inputs).compile().as_text()
kernels = ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv")
print("kernels:", *(kernel for kernel in kernels if kernel in text))
"""


@pytest.mark.slow
def test_splash_inside_a_pipeline_compiles_for_tpu_forward_and_backward():
    pytest.importorskip("libtpu", reason="the TPU compiler is in libtpu: pip install libtpu")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # With Shardy, XLA's TPU compiler of libtpu 0.0.42 aborts in spmd_partitioner.cc: "Check
        # failed: target.IsManualSubgroup() == sharding().IsManualSubgroup()".
        "JAX_USE_SHARDY_PARTITIONER": "false",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kernels: splash_mha_fwd splash_mha_dq splash_mha_dkv" in done.stdout
