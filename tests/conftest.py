"""Eight emulated CPU devices, strict dtypes, and the package under jaxtyping and beartype."""

import gc
import os
from collections.abc import Iterator

from quick import ENVIRONMENT

flags = f"{os.environ.get('XLA_FLAGS', '')} {ENVIRONMENT['XLA_FLAGS']}".strip()
os.environ |= ENVIRONMENT | {"XLA_FLAGS": flags}

from jaxpipe.cli import emulate_devices

emulate_devices(8)

import jax
import pytest
from hypothesis import settings

import checked_types

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


def pytest_collection_finish() -> None:
    """Leaves modules and tests to no garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
