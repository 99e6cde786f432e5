"""Groups of several emulated CPU devices need no more threads than XLA has on one core.

XLA:CPU has a thread for every device, and starts one program of several devices after the other, so
programs of two groups cannot take each other's threads:
https://github.com/openxla/xla/blob/main/xla/pjrt/cpu/cpu_client.h
"""

import os
import subprocess
import sys

from quick import ENVIRONMENT

SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jaxpipe.mpmd.jaxpp as jaxpp
mesh = jaxpp.MpmdMesh(jax.make_mesh((2, 4), ("stage", "data")), "stage")

def loss(weights, x):
    for w in weights:
        x = jax.lax.with_sharding_constraint(x * w, jax.sharding.PartitionSpec("data"))
        x = jaxpp.mark_stage_end(x - x.mean(0))
    return (x**2).sum()

def step(weights, xs):
    grad = lambda x: jax.value_and_grad(loss)(weights, x)
    return jaxpp.treduce(grad, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

compiled = jaxpp.mpmd_jit_with_loop(step, mesh)
for _ in range(100):
    value, _ = compiled([2.0, 3.0], jax.numpy.arange(32.0).reshape(4, 8))
print(float(value))
"""


def test_groups_of_four_devices_run_with_one_thread():
    environment = {**os.environ, **ENVIRONMENT, "JAX_PLATFORMS": "cpu", "NPROC": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    # (2 * 3)^2 times the sum of squares of a row without its mean, four times
    assert float(run.stdout) == 4 * 36 * 42.0
