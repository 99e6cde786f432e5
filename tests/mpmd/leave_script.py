"""Two processes of a script as JaxPP's example is: each prints a loss that one of them has.

Arguments: SLOW PROCESS NUM_PROCESSES PORT. The stage of process SLOW takes longer than JAX waits
for processes that have not ended, and neither process waits for its results.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxpipe.mpmd.jaxpp as jaxpp

slow, process, num_processes, port = map(int, sys.argv[1:])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process, shutdown_timeout_seconds=1)
devices = np.array(sorted(jax.devices(), key=lambda device: device.process_index))
mpmd_mesh = jaxpp.MpmdMesh(Mesh(devices.reshape(num_processes, -1), ("stages", "data")), "stages")


def loss_of(weights, x):
    for stage, w in enumerate(weights):
        x = jnp.tanh(x @ w)
        if stage == slow:
            jax.debug.callback(lambda _: time.sleep(0.5), x)
        x = jaxpp.pipeline_enter_stage(x)
    return jnp.sum(x**2)


def train_step(weights, xs):
    schedule = jaxpp.Std1F1B(mpmd_mesh.mpmd_dim)
    losses, grads = jaxpp.treduce(
        lambda x: jax.value_and_grad(loss_of)(weights, x), xs, schedule=schedule
    )
    return losses, jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


weights, xs = [np.eye(4, dtype=np.float32)] * num_processes, np.ones((6, 2, 4), np.float32)
losses, weights = jaxpp.mpmd_jit_with_loop(train_step, mpmd_mesh)(weights, xs)
print(f"first step, losses {np.array(losses)}", flush=True)
