"""Wrong topologies are refused in words, with and without libtpu."""

import importlib.util

import pytest

from jaxpipe.plan import tpu_topology


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs libtpu.*pip install "jaxpipe\[aot\]"'):
        tpu_topology("v5p:2x2x1")


def test_there_is_at_least_one_slice():
    with pytest.raises(ValueError, match=r"`num_slices` is 0\. Give at least 1\."):
        tpu_topology("v5p:2x2x1", 0)
