"""Two processes of a script as JaxPP's example is: each prints a loss that one of them has.

Arguments: HOW:SLOW PROCESS NUM_PROCESSES PORT. The stage of process SLOW takes longer than JAX
waits for processes that have not ended, and neither process waits for its results. If HOW is
"child", the work is done in a child process of `multiprocessing`, as JaxPP's example does it.
"""

import multiprocessing
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxpipe.mpmd.jaxpp as jaxpp


def main(slow: int, process: int, num_processes: int, port: int) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes, process, shutdown_timeout_seconds=1
    )
    devices = np.array(sorted(jax.devices(), key=lambda device: device.process_index))
    mesh = Mesh(devices.reshape(num_processes, -1), ("stages", "data"))
    mpmd_mesh = jaxpp.MpmdMesh(mesh, "stages")

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


if __name__ == "__main__":
    how, slow = sys.argv[1].split(":")
    arguments = int(slow), *map(int, sys.argv[2:])
    if how == "child":
        child = multiprocessing.get_context("fork").Process(target=main, args=arguments)
        child.start()
        child.join()
        sys.exit(child.exitcode != 0)
    main(*arguments)
