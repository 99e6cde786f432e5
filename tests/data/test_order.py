import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.data.batches import row_order, source_turns

sources = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)
"""Rows and weights of sources."""


@settings(max_examples=50)
@given(sources)
def test_over_a_period_each_source_has_exactly_its_share(found: list[tuple[int, int]]):
    weights = [weight for _, weight in found]
    turns = source_turns([float(weight) for weight in weights])
    counts = np.bincount(turns[:, 0])
    np.testing.assert_array_equal(counts * sum(weights), len(turns) * np.asarray(weights))
    # And is nowhere a whole turn for each other source away from it.
    for n in range(1, len(turns) + 1):
        share = np.bincount(turns[:n, 0], minlength=len(weights)) / n
        assert np.all(np.abs(share - counts / len(turns)) * n < len(weights))


def test_weights_are_taken_as_they_are_written():
    np.testing.assert_array_equal(np.bincount(source_turns([0.7, 0.3])[:, 0]), [7, 3])
    np.testing.assert_array_equal(np.bincount(source_turns([0.125, 1e-2, 3.0])[:, 0]), [25, 2, 600])
    np.testing.assert_array_equal(source_turns([5.0, 5.0])[:, 0], [0, 1])
    with pytest.raises(ValueError, match=r"are 0.333333, 1, which repeat after 1333333 rows\. Ro"):
        source_turns([0.333333, 1.0])


@pytest.mark.parametrize("seed", [None, 0, 2**32 - 1])
def test_every_source_has_its_epochs_whatever_the_others_have(seed: int | None):
    sizes = [40, 1, 17]
    at = row_order(sizes, weights=[3.0, 1.0, 2.0], shuffle_seed=seed)
    seen: list[list[int]] = [[] for _ in sizes]
    for n in range(300):
        source, row = at(n)
        seen[source].append(row)
    assert list(map(len, seen)) == [150, 50, 100]
    for size, rows in zip(sizes, seen, strict=True):
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))
        if seed is None:
            assert rows == [n % size for n in range(len(rows))]


def test_sources_of_the_same_size_have_different_orders():
    at = row_order([50, 50], weights=[1.0, 1.0], shuffle_seed=0)
    found = [at(n) for n in range(400)]
    orders = [[row for source, row in found if source == k] for k in (0, 1)]
    epochs = [tuple(order[start : start + 50]) for order in orders for start in range(0, 200, 50)]
    assert len(set(epochs)) == 8
