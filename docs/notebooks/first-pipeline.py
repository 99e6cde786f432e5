"""# Your first pipeline

A model in four stages on eight emulated devices: it runs on a laptop, or in a hosted notebook
without an accelerator. Install jaxpipe first: `pip install -e ".[train]"` in a clone.
"""

# %%
import jaxpipe as jp

jp.emulate_devices(8)  # before JAX does anything; leave it out where there are eight devices

import jax
import jax.numpy as jnp
import optax

# %% [markdown]
# ## The model
#
# Three functions of one microbatch. They know nothing of devices.

# %%
def embed(w, batch):
    return batch["x"] @ w


def layer(w, x, batch):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss(w, x, batch):
    return jnp.mean((x @ w - batch["y"]) ** 2)


model = jp.Model(embed, layer, loss)

# %% [markdown]
# Parameters are a dict of three parts; `layers` is a list with the parameters of each layer.

# %%
keys = iter(jax.random.split(jax.random.key(0), 18))


def normal(*shape):
    return jax.random.normal(next(keys), shape) / 8


params = {
    "embed": normal(4, 16),
    "layers": [{"up": normal(16, 32), "down": normal(32, 16)} for _ in range(8)],
    "head": normal(16),
}

# %% [markdown]
# ## The pipeline
#
# Four ranks along the axis `stage`, each of two devices. A pipeline shows its timeline: the colour
# is the operation, the number the microbatch, and empty space the bubble.

# %%
mesh = jp.make_mesh({"stage": 4, "fsdp": 2})
pipe = jp.pipeline(model, schedule="1f1b", mesh=mesh, microbatches=8)
pipe

# %% [markdown]
# ## Train
#
# The step is the one of a program without a pipeline, but for `pipe.jit`, `pipe.value_and_grad`
# and `pipe.optimizer`.

# %%
stored = pipe.shard(params)
tx = pipe.optimizer(optax.sgd(0.03))
opt_state = tx.init(stored)


@pipe.jit
def train_step(params, opt_state, batch):
    (value, _), grads = pipe.value_and_grad(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


x = jax.random.normal(jax.random.key(1), (64, 4))
batch = {"x": x, "y": jnp.tanh(x[:, 0])}
for step in range(30):
    stored, opt_state, value = train_step(stored, opt_state, batch)
    if step % 10 == 0:
        print(f"step {step:2}  loss {value:.2f}")

# %% [markdown]
# ## Is it the same?
#
# `check` compares the loss and every gradient with the program without a pipeline.

# %%
print(pipe.check(stored, batch).largest < 1e-5)

# %% [markdown]
# ## Another schedule
#
# A zero-bubble schedule splits the backward. The previous stage waits for the gradient of the
# input only (`I`), so that of the weights (`W`) fills the gaps. With `engine="mpmd"` every rank
# runs programs of its own, and continues as soon as its inputs have arrived.

# %%
zero_bubble = jp.pipeline(
    model, schedule="zero_bubble_h1", mesh=mesh, microbatches=8, engine="mpmd"
)
zero_bubble

# %% [markdown]
# Nothing else of the script changes. It computes the same gradients as the program without a
# pipeline.

# %%
print(zero_bubble.check(zero_bubble.shard(params), batch).largest < 1e-5)
