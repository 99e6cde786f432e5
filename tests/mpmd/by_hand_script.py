"""Two processes of a program by hand: each has a stage, and prints the gradient of its weights.

Arguments: CASE PROCESS NUM_PROCESSES PORT.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd.jaxpp.experimental import mpmd


def forward(w, x):
    return jnp.tanh(x @ w)


def main(case: str, process: int, num_processes: int, port: int) -> None:
    del case
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process)
    devices = np.array(sorted(jax.devices(), key=lambda device: device.process_index))
    mesh = mpmd.MpmdMesh(Mesh(devices.reshape(2, -1), ("stage", "fsdp")), "stage")
    first, second = (NamedSharding(m, P("fsdp")) for m in mesh.unstack)

    def backward(w, x, dy):
        return jax.vjp(forward, w, x)[1](dy)

    @mpmd.mpmd(mesh, in_shardings=((first, second), first))
    def step(weights, x):
        h = mpmd.task(forward, out_shardings=first)(weights[0], x)
        h = mpmd.transfer(h, out_shardings=second).done()
        y = mpmd.task(forward, out_shardings=second)(weights[1], h)
        run = mpmd.task(backward, name="backward", out_shardings=second)
        dw, dh = run(weights[1], h, y)
        dh = mpmd.transfer(dh, out_shardings=first).done()
        run = mpmd.task(lambda *a: backward(*a)[0], name="backward", out_shardings=first)
        return mpmd.stack(run(weights[0], x, dh), dw)

    def place(x, sharding):
        cut = lambda index: np.asarray(x)[index]  # noqa: E731
        return jax.make_array_from_callback(x.shape, sharding, cut, dtype=x.dtype)

    weights = jnp.eye(4) / 2, jnp.eye(4) + 0.25
    x = jnp.arange(16.0).reshape(4, 4) / 8
    arguments = tuple(map(place, weights, (first, second))), place(x, first)
    lowered = step.lower(*arguments)
    loss = lambda weights: jnp.sum(forward(weights[1], forward(weights[0], x)) ** 2) / 2  # noqa: E731
    for _ in range(2):
        gradients = lowered(*arguments)
        assert gradients.shape == (2, 4, 4) and not gradients.is_fully_addressable
        for shard in gradients.addressable_shards:
            wanted = np.stack(jax.device_get(jax.grad(loss)(weights)))[shard.index]
            np.testing.assert_allclose(shard.data, wanted, rtol=1e-5)
    print(f"used {jax.tree.leaves(lowered.used_inputs)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
