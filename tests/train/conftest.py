"""What tests of the trainer share."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    """A folder of compiled programs, which begins empty: one for a process, as writes may tear."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", autouse=True)
def cached(compiled: Path) -> Iterator[None]:
    """Runs that are alike compile their programs once, also in different modules."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    names += ("jax_persistent_cache_min_entry_size_bytes",)
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(compiled), 0.0, -1), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
