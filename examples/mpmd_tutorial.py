"""JaxPP's tutorial of pipelined training, with no other change of its code than the import.

In cells, as editors show them; mpmd_tutorial.ipynb is the same as a notebook. The first cell is
ours: four devices of a CPU, and a temporary folder for what the others write. Two sizes of the
model are smaller than in the document, so that it takes a minute on a laptop.
"""

# %%
import os
import tempfile

flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = flags + " --xla_force_host_platform_device_count=4"
os.chdir(tempfile.mkdtemp())

# %%
import os

os.environ["JAX_COMPILATION_CACHE_DIR"] = "jax_compilation_cache"

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import jaxpipe.mpmd.jaxpp as jaxpp

pipeline_yield = jaxpp.pipeline_enter_stage

# %%
mesh = jax.sharding.Mesh(np.array(jax.devices())[:4], ("fsdp",))
mesh

# %% [markdown]
# ### Model Definition

# %%
import flax.linen as nn

# Define model parameters
NUM_MB = 4
BATCH_SIZE = 8
SEQ_LEN = 16  # in the document 2 * 1024
D_MODEL = 64  # in the document 1024
MLP_DIM = 4 * D_MODEL
NUM_LAYERS = 8


class Block(nn.Module):
    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x):
        attn_output = nn.MultiHeadDotProductAttention(
            num_heads=8, qkv_features=D_MODEL // 8
        )(x)
        x = x + attn_output
        x = nn.LayerNorm()(x)

        # Feed-forward network
        mlp_output = nn.Dense(features=MLP_DIM)(x)
        mlp_output = nn.gelu(mlp_output)
        mlp_output = nn.Dense(features=x.shape[-1])(mlp_output)
        x = x + mlp_output
        x = nn.LayerNorm()(x)

        return x


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(NUM_LAYERS):
            x = Block(name=f"block_{i}")(x)
        return x


# Initialize the model's parameters
dummy_input = jnp.ones((BATCH_SIZE, SEQ_LEN, D_MODEL))
transformer = Transformer()


def init_state(model):
    key = jax.random.PRNGKey(0)
    params = model.init(key, dummy_input)["params"]

    print("Model initialized successfully!")

    optimizer = optax.adamw(learning_rate=0.001)
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optimizer
    )
    return state


state = init_state(transformer)

# %% [markdown]
# ### JAX training step with gradient accumulation

# %%
def loss_fn(state, params, x, targets):
    x, targets = jax.lax.with_sharding_constraint(
        (x, targets), jax.sharding.PartitionSpec("fsdp")
    )
    predictions = state.apply_fn({"params": params}, x)
    return jnp.mean((predictions - targets) ** 2)


def train_step(state, xs, targets):
    """Trains the model for one step."""

    grad_fn = jax.value_and_grad(partial(loss_fn, state))

    def scan_fn(carry, in_):
        x, targets = in_
        loss, grads = grad_fn(state.params, x, targets)
        return jax.tree.map(jnp.add, carry, (loss, grads)), ()

    (loss_acc, grads_acc), _ = jax.lax.scan(
        scan_fn,
        jax.tree.map(jnp.zeros_like, (0, state.params)),
        (
            xs.reshape(NUM_MB, -1, *xs.shape[1:]),
            targets.reshape(NUM_MB, -1, *targets.shape[1:]),
        ),
    )

    state = state.apply_gradients(grads=grads_acc)
    return state, loss_acc


def train_with_progress(train_step, inputs, num_steps=6):
    updated_state, x, targets = inputs
    training_loss = None
    # Warmup
    updated_state, training_loss = train_step(updated_state, x, targets)
    updated_state, training_loss = train_step(updated_state, x, targets)
    jax.block_until_ready(updated_state)

    start_time = time.perf_counter()
    for i in range(2, num_steps - 1):
        updated_state, training_loss = train_step(updated_state, x, targets)

        if i % 2 == 1:
            print(f"Training loss after step {i+1}: {training_loss}")

    jax.block_until_ready(updated_state)
    end_time = time.perf_counter()

    jax.profiler.start_trace("./tutorial-trace")
    updated_state, training_loss = train_step(updated_state, x, targets)
    jax.block_until_ready(updated_state)
    jax.profiler.stop_trace()

    print(f"Final training loss: {training_loss}")
    print(f"Training took: {end_time - start_time:.2f} seconds")
    return updated_state

# %% [markdown]
# ### Sharding specification

# %%
NUM_MB = 4
print("Num microbatches: ", NUM_MB)

xs = dummy_input
inputs = (state, xs, dummy_input)


# Data parallel + ZeRO 3 sharding on data.
def fsdp_in_shardings(state):
    return (
        jax.tree.map(
            lambda _: jax.NamedSharding(mesh, P("fsdp"))
            if len(getattr(_, "shape", [])) > 0
            else jax.NamedSharding(mesh, P()),
            state,
        ),
        jax.NamedSharding(mesh, P("fsdp")),
        jax.NamedSharding(mesh, P("fsdp")),
    )


in_shardings = fsdp_in_shardings(state)

# %%
# Simple SPMD training with micro-batching.
with mesh:
    jitted_train_step = jax.jit(train_step, in_shardings=in_shardings)
    compiled = jitted_train_step.lower(*inputs).compile()
sharded_inputs = jax.device_put(inputs, in_shardings)

_ = train_with_progress(compiled, sharded_inputs)

# %% [markdown]
# ### Pipelined Transformer

# %%
class AnnotatedTransformer(nn.Module):
    num_stages: int

    @nn.compact
    def __call__(self, x):
        for i in range(NUM_LAYERS):
            x = Block(name=f"block_{i}")(x)
            if (i + 1) % (NUM_LAYERS // self.num_stages) == 0:
                x = pipeline_yield(x)  # NEW: added pipeline_yield
        return x

# %%
# Define the training step.
def train_step(state, xs, targets, schedule):
    """Trains the model for one step."""

    grad_fn = jax.value_and_grad(partial(loss_fn, state))

    def scan_fn(in_):
        x, targets = in_
        return grad_fn(state.params, x, targets)

    loss_acc, grads_acc = jaxpp.treduce(  # NEW: replaced scan with treduce
        scan_fn,
        (
            xs.reshape(NUM_MB, -1, *xs.shape[1:]),
            targets.reshape(NUM_MB, -1, *targets.shape[1:]),
        ),
        schedule=schedule,  # NEW: added schedule
        operation=jaxpp.Add,  # State update operation
    )

    state = state.apply_gradients(grads=grads_acc)
    return state, loss_acc

# %% [markdown]
# ### MPMD Mesh

# %%
NUM_STAGES = 4
mesh = jax.sharding.Mesh(
    np.array(jax.devices())[:NUM_STAGES].reshape(NUM_STAGES, -1), ("stage", "fsdp")
)
mpmd_mesh = jaxpp.MpmdMesh(mesh, "stage")
mpmd_mesh

# %%
mpmd_mesh.unstack

# %%
ann_transformer = AnnotatedTransformer(num_stages=NUM_STAGES)
ann_state = init_state(ann_transformer)
in_shardings = fsdp_in_shardings(ann_state)
inputs = (ann_state, *inputs[1:])

mpmd_in_specs = jax.tree.map(lambda _: _.spec, in_shardings)
pp_train_step = jaxpp.mpmd_jit_with_loop(
    partial(
        train_step,
        schedule=jaxpp.Interleaved1F1B(num_stages=NUM_STAGES, mpmd_dim=NUM_STAGES),
    ),
    in_specs=mpmd_in_specs,
    out_specs=(mpmd_in_specs[0], jax.sharding.PartitionSpec()),
    mpmd_mesh=mpmd_mesh,
).compile(*inputs)

with mesh:
    updated_state = train_with_progress(pp_train_step, inputs)

# %%
print("layer_0", updated_state.params["block_0"]["Dense_0"]["kernel"])
print("layer_1", updated_state.params["block_1"]["Dense_0"]["kernel"])
print("layer_2", updated_state.params["block_2"]["Dense_0"]["kernel"])
print("layer_3", updated_state.params["block_3"]["Dense_0"]["kernel"])
print("layer_4", updated_state.params["block_4"]["Dense_0"]["kernel"])
print("layer_5", updated_state.params["block_5"]["Dense_0"]["kernel"])
print("layer_6", updated_state.params["block_6"]["Dense_0"]["kernel"])
print("layer_7", updated_state.params["block_7"]["Dense_0"]["kernel"])

# %% [markdown]
# ### Schedule specification

# %%
MPMD_RANK = 2
[
    str(e)
    for e in jaxpp.Interleaved1F1B(
        num_stages=NUM_STAGES, mpmd_dim=NUM_STAGES
    ).tasks(NUM_MB)[MPMD_RANK]
]

# %% [markdown]
# ### Tasks can be fused

# %%
MPMD_RANK = 3
[
    str(e)
    for e in jaxpp.Interleaved1F1B(
        num_stages=NUM_STAGES, mpmd_dim=NUM_STAGES
    ).tasks(NUM_MB)[MPMD_RANK]
]

# %%
jaxpr_lines = str(pp_train_step.closed_jaxpr).splitlines()

# %%
for idx, l in enumerate(jaxpr_lines):
    if "task_name=fwd_0" in l:
        break
print("\n".join(jaxpr_lines[idx - 10 : idx + 50]))

# %%
[
    str(e)
    for e in jaxpp.Interleaved1F1B(
        num_stages=NUM_LAYERS, mpmd_dim=NUM_STAGES
    ).tasks(NUM_MB)[0]
]

# %%
[
    str(e)
    for e in jaxpp.Interleaved1F1B(
        num_stages=NUM_LAYERS, mpmd_dim=NUM_STAGES
    ).tasks(NUM_MB)[3]
]

# %%
ann_transformer.num_stages = NUM_LAYERS
pp_train_step_interleaved = jaxpp.mpmd_jit_with_loop(
    partial(
        train_step,
        schedule=jaxpp.Interleaved1F1B(num_stages=NUM_LAYERS, mpmd_dim=NUM_STAGES),
    ),
    in_specs=mpmd_in_specs,
    out_specs=(mpmd_in_specs[0], jax.sharding.PartitionSpec()),
    mpmd_mesh=mpmd_mesh,
).compile(*inputs)

# %%
with mesh:
    updated_state_interleaved = train_with_progress(pp_train_step_interleaved, inputs)

# %%
print(updated_state_interleaved.step)
print(updated_state_interleaved.params["block_0"]["Dense_0"]["kernel"])
print(updated_state_interleaved.params["block_1"]["Dense_0"]["kernel"])
print(updated_state_interleaved.params["block_2"]["Dense_0"]["kernel"])
print(updated_state_interleaved.params["block_3"]["Dense_0"]["kernel"])
print(updated_state_interleaved.params["block_4"]["Dense_0"]["kernel"])
print(updated_state_interleaved.params["block_5"]["Dense_0"]["kernel"])
print(updated_state_interleaved.params["block_6"]["Dense_0"]["kernel"])
print(updated_state_interleaved.params["block_7"]["Dense_0"]["kernel"])

# %%
updated_state_interleaved.step._partially_addressable_arrays

# %%
[a.sharding.mesh.devices for a in updated_state_interleaved.step._partially_addressable_arrays.values()]
