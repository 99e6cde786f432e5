"""Eight emulated CPU devices, strict dtypes, and the package under jaxtyping and beartype.

With `JAX_PLATFORMS=cuda` the devices are the GPUs that are there: `make test-gpu`.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

from quick import ENVIRONMENT

ON_GPU = os.environ.get("JAX_PLATFORMS") == "cuda"
flags = f"{os.environ.get('XLA_FLAGS', '')} {ENVIRONMENT['XLA_FLAGS']}".strip()
if not ON_GPU:
    os.environ |= ENVIRONMENT | {"XLA_FLAGS": flags}

from jaxpipe.cli import emulate_devices

if not ON_GPU:
    emulate_devices(8)

import jax
import pytest
from hypothesis import settings

import checked_types

SLOW_ROWS = Path(__file__).with_name("slow_rows.txt").read_text().splitlines()
WHOLE_SUITE = 12_000
"""Tests of which there are more if all are collected."""

settings.register_profile("patient", deadline=None)  # the first example compiles or imports
settings.load_profile("patient")
jax.config.update("jax_numpy_dtype_promotion", "strict")
checked_types.install_hook()


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """What JAX has traced and compiled for a module is of no use to the next: garbage collection
    would go through it again and again."""
    yield
    jax.clear_caches()


@pytest.fixture
def float64() -> Iterator[None]:
    """Numbers that are made without a dtype are in float64."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rows of slow_rows.txt are in `make test-slow`: dear ones, most of which others cover."""
    by_id = {item.nodeid: item for item in items}
    missing = [name for name in SLOW_ROWS if name not in by_id]
    if missing and len(items) > WHOLE_SUITE:
        raise pytest.UsageError(f"slow_rows.txt has rows that no test has: {missing}")
    for name in by_id.keys() & {*SLOW_ROWS}:
        by_id[name].add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leaves modules and tests to no garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
