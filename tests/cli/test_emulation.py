"""Devices are emulated also after JAX has started, if nothing is lost."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LATE = """
import jax, jax.numpy as jnp
assert len(jax.devices()) == 1
assert float(jax.jit(jnp.sum)(jnp.ones(3))) == 3
import jaxpipe as jp
kept = jnp.ones(3)
try:
    jp.emulate_devices(4)
except ValueError as error:
    assert "JAX sees 1 CPU devices: it has arrays" in str(error)
else:
    raise AssertionError
del kept
jp.emulate_devices(4)
assert len(jax.devices()) == 4
mesh = jp.make_mesh({"stage": 4})
model = jp.Model(
    embed=lambda w, batch: batch * w,
    layer=lambda w, x, batch: jnp.tanh(x * w),
    loss=lambda w, x, batch: (x * w).mean(),
)
params = {"embed": jnp.ones(()), "layers": jnp.ones((4, 3)), "head": jnp.ones(3)}
pipe = jp.pipeline(model, schedule="circular", mesh=mesh, microbatches=4)
assert pipe.check(params, jnp.ones((4, 3))).largest <= 1e-5
"""

GIVEN = """
import jaxpipe as jp
try:
    jp.emulate_devices(4)
except ValueError as error:
    assert "JAX sees 2 CPU devices" in str(error)
else:
    raise AssertionError
"""


def run(program: str, flags: str) -> None:
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_devices_are_emulated_after_jax_has_started_if_no_array_is_left():
    run(LATE, "")


def test_flags_that_ask_for_another_number_win():
    run(GIVEN, "--xla_force_host_platform_device_count=2")
