"""Groups of several emulated CPU devices run without `NPROC`, which the import sets in time."""

import os
import subprocess
import sys

import pytest

from jaxpipe import _threads
from quick import ENVIRONMENT

SCRIPT = """
import os, sys, jax
if sys.argv[1] == "config":
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
for _ in range(20):
    value, _ = compiled([2.0, 3.0], jax.numpy.arange(32.0).reshape(4, 8))
print(os.environ["NPROC"], float(value))
"""


@pytest.mark.parametrize("how", ["flag", "config"])
def test_groups_of_four_devices_run_without_nproc(how: str):
    flags = ENVIRONMENT["XLA_FLAGS"]
    if how == "flag":
        flags += " --xla_force_host_platform_device_count=8"
    environment = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment.pop("NPROC", None)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    # (2 * 3)^2 times the sum of squares of a row without its mean, four times
    assert run.stdout.split() == ["64", str(4 * 36 * 42.0)]


def test_a_setting_of_the_caller_and_devices_that_are_known_change_nothing(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=100")
    monkeypatch.delenv("NPROC", raising=False)
    _threads.set_num_threads()  # JAX has used its devices in this process
    assert "NPROC" not in os.environ
    monkeypatch.setattr("jaxpipe._compat.devices_are_known", lambda: False)
    _threads.set_num_threads()
    assert os.environ["NPROC"] == "400"
    monkeypatch.setenv("NPROC", "7")
    _threads.set_num_threads()
    assert os.environ["NPROC"] == "7"
