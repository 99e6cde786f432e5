"""What some tests of the trainer share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def cached(tmp_path_factory) -> Iterator[None]:
    """Runs of a module that are alike compile their programs once."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    names += ("jax_persistent_cache_min_entry_size_bytes",)
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("cache")), 0.0, -1), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
