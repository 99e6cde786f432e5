"""Tests that need a GPU: `make test-gpu`. Elsewhere they are skipped."""

from pathlib import Path

import jax
import pytest

NEEDED = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: make test-gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(NEEDED)
