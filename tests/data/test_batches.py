import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.data import corpus_batches, synthetic_batches
from jaxpipe.data.batches import (
    Batch,
    Batches,
    Corpus,
    CorpusRows,
    SinglePassBatches,
    corpus_from_tokens,
    global_batch_size,
    split_held_out,
)

DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "target_weights": np.float32,
    "positions": np.int32,
    "segment_ids": np.int32,
}

corpora = st.lists(st.integers(1, 20), min_size=1, max_size=12)
"""Lengths of documents."""


def numbered(lengths: list[int]) -> Corpus:
    """A corpus whose every token is another one: 1, 2, 3, ..."""
    return corpus_from_tokens(np.arange(1, sum(lengths) + 1, dtype=np.int32), np.cumsum(lengths))


def batches(
    lengths: list[int], *, rows: int = 1, length: int, packing: bool = True, seed: int | None = None
) -> Batches:
    return corpus_batches(
        [numbered(lengths)], batch_size=rows, length=length, packing=packing, shuffle_seed=seed
    )


def epoch(lengths: list[int], length: int) -> Batch:
    """All rows of a packed corpus, in its own order."""
    return batches(lengths, rows=-(-sum(lengths) // length), length=length)(0)


def obvious_rows(lengths: list[int], length: int) -> list[list[tuple[int, int, int, int, int]]]:
    """(token, target, weight, position, segment) of every cell of every packed row, by loops."""
    cells, token = [], 0
    for document, count in enumerate(lengths):
        for i in range(count):
            token += 1
            is_last = i == count - 1
            cells.append((token, 0 if is_last else token + 1, int(not is_last), document))
    rows = []
    for start in range(0, len(cells), length):
        row, previous, position, segment = [], None, 0, 0
        for token, target, weight, document in cells[start : start + length]:
            is_new = document != previous
            position, segment = (0, segment + 1) if is_new else (position + 1, segment)
            row.append((token, target, weight, position, segment))
            previous = document
        rows.append(row + [(0, 0, 0, 0, 0)] * (length - len(row)))
    return rows


@given(corpora, st.integers(1, 24))
def test_packed_rows_are_those_of_the_obvious_loops(lengths: list[int], length: int):
    batch = epoch(lengths, length)
    names = ("tokens", "targets", "target_weights", "positions", "segment_ids")
    np.testing.assert_array_equal(
        np.stack([batch[name] for name in names], axis=-1), obvious_rows(lengths, length)
    )


@given(corpora, st.integers(1, 24))
def test_packing_keeps_every_token_exactly_once_and_in_order(lengths: list[int], length: int):
    batch = epoch(lengths, length)
    used = batch["tokens"][batch["segment_ids"] > 0]
    np.testing.assert_array_equal(used, np.arange(1, sum(lengths) + 1))


@given(corpora, st.integers(1, 24))
def test_a_target_is_the_next_token_of_the_same_document(lengths: list[int], length: int):
    batch = epoch(lengths, length)
    weighted = batch["target_weights"] == 1
    np.testing.assert_array_equal(batch["targets"][weighted], batch["tokens"][weighted] + 1)
    # Tokens are numbered from 1, so the number of a document's last token is where it ends.
    without = batch["tokens"][~weighted & (batch["segment_ids"] > 0)]
    np.testing.assert_array_equal(without, np.cumsum(lengths))


@given(corpora, st.integers(1, 24))
def test_positions_restart_with_every_segment_of_a_row(lengths: list[int], length: int):
    batch = epoch(lengths, length)
    for segments, positions in zip(batch["segment_ids"], batch["positions"], strict=True):
        for segment in range(1, segments.max() + 1):
            here = positions[segments == segment]
            np.testing.assert_array_equal(here, np.arange(len(here)))


@given(corpora, st.integers(1, 24))
def test_without_packing_a_row_is_the_start_of_a_document(lengths: list[int], length: int):
    batch = batches(lengths, rows=len(lengths), length=length, packing=False)(0)
    starts = np.cumsum([0, *lengths[:-1]]) + 1
    for row, (start, count) in enumerate(zip(starts, lengths, strict=True)):
        used = min(count, length)
        expected = np.arange(start, start + used)
        np.testing.assert_array_equal(batch["tokens"][row], np.pad(expected, (0, length - used)))
        assert batch["segment_ids"][row].sum() == used
        assert batch["target_weights"][row].sum() == min(count - 1, length)


@settings(max_examples=20)
@given(corpora, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_every_epoch_has_every_row_once(lengths: list[int], length: int, seed: int):
    num_rows = -(-sum(lengths) // length)
    batch_at = batches(lengths, length=length, seed=seed)
    for first in (0, num_rows):
        seen = [batch_at(step)["tokens"][0, 0] for step in range(first, first + num_rows)]
        assert sorted(seen) == list(range(1, sum(lengths) + 1, length))


def test_epochs_and_seeds_have_different_orders():
    def order(seed: int | None, number: int) -> tuple[int, ...]:
        batch_at = batches([64], length=1, rows=64, seed=seed)
        return tuple(batch_at(number)["tokens"][:, 0].tolist())

    orders = [order(seed, number) for seed in (7, 1000) for number in range(3)]
    assert len(set(orders)) == len(orders)
    assert order(None, 0) == order(None, 1) == tuple(range(1, 65))


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_has_the_same_batch_however_it_is_reached(packing: bool):
    def fresh() -> Batches:
        return batches([5, 9, 30, 2], rows=3, length=8, packing=packing, seed=1)

    uninterrupted = fresh()
    run = [uninterrupted(step) for step in range(12)]
    resumed = fresh()
    for step in (11, 3, 7):
        for name, values in resumed(step).items():
            np.testing.assert_array_equal(values, run[step][name])


def test_a_batch_larger_than_the_corpus_repeats_it():
    batch = batches([4], rows=5, length=4)(0)
    np.testing.assert_array_equal(batch["tokens"], np.tile([1, 2, 3, 4], (5, 1)))


@pytest.mark.parametrize("source", ["packed", "padded", "synthetic"])
def test_all_sources_give_the_same_arrays(source: str):
    if source == "synthetic":
        batch_at = synthetic_batches(vocab_size=11, batch_size=3, length=8, seed=0)
    else:
        batch_at = batches([5, 9], rows=3, length=8, packing=source == "packed")
    batch = batch_at(4)
    assert {name: values.dtype for name, values in batch.items()} == DTYPES
    assert {values.shape for values in batch.values()} == {(3, 8)}


def test_synthetic_tokens_depend_on_seed_and_step_alone():
    def tokens(seed: int, step: int) -> np.ndarray:
        batch_at = synthetic_batches(vocab_size=1000, batch_size=2, length=8, seed=seed)
        return batch_at(step)["tokens"]

    np.testing.assert_array_equal(tokens(3, 5), tokens(3, 5))
    assert not np.array_equal(tokens(3, 5), tokens(3, 6))
    assert not np.array_equal(tokens(3, 5), tokens(4, 5))


def test_synthetic_targets_are_the_next_tokens():
    batch = synthetic_batches(vocab_size=1000, batch_size=2, length=8, seed=0)(0)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["positions"][1], np.arange(8))


def test_the_global_batch_is_a_whole_number_of_rows():
    assert global_batch_size(0.25, 8) == 2
    with pytest.raises(ValueError, match=r"= 0\.3 on 8 devices makes 2\.4 rows"):
        global_batch_size(0.3, 8)


@settings(max_examples=20)
@given(corpora, st.integers(1, 24), st.booleans())
def test_targets_are_counted_without_their_tokens(lengths: list[int], length: int, packing: bool):
    rows = CorpusRows(numbered(lengths), length, packing)
    for i in range(len(rows)):
        assert rows.num_targets(i) == rows[i]["target_weights"].sum()
    batch_at = batches(lengths, rows=3, length=length, packing=packing, seed=5)
    assert batch_at.num_targets(2) == batch_at(2)["target_weights"].sum()


@pytest.mark.parametrize("source", ["text", "synthetic"])
def test_some_rows_of_a_batch_are_those_of_the_whole_one(source: str):
    if source == "synthetic":
        batch_at = synthetic_batches(vocab_size=11, batch_size=6, length=8, seed=0)
    else:
        batch_at = batches([5, 9, 30, 2], rows=6, length=8, seed=1)
    for name, values in batch_at.rows(3, [4, 1]).items():
        np.testing.assert_array_equal(values, batch_at(3)[name][[4, 1]])


@settings(max_examples=20)
@given(corpora, st.integers(1, 24), st.integers(1, 5), st.booleans())
def test_all_rows_come_once_and_the_last_batch_is_filled_with_padding(
    lengths: list[int], length: int, batch_size: int, packing: bool
):
    rows = CorpusRows(numbered(lengths), length, packing)
    found = SinglePassBatches((rows, rows), batch_size)
    assert len(found) == len(list(found)) == -(-2 * len(rows) // batch_size)
    expected = 2 * [rows[i] for i in range(len(rows))]
    for name, dtype in DTYPES.items():
        flat = np.concatenate([batch[name] for batch in found])
        assert flat.dtype == dtype
        assert flat.shape == (len(found) * batch_size, length)
        np.testing.assert_array_equal(flat[: len(expected)], [row[name] for row in expected])
        assert not flat[len(expected) :].any()
    last = len(found) - 1
    assert found.num_targets(last) == found[last]["target_weights"].sum()
    some = found.rows(last, [batch_size - 1, 0])
    np.testing.assert_array_equal(some["tokens"], found[last]["tokens"][[-1, 0]])
    with pytest.raises(IndexError, match=f"and no batch {len(found)}"):
        found[len(found)]


def split(lengths: list[int], fraction: float, seed: int = 0) -> list[set[int]]:
    """The tokens that stay, and those that are held out."""
    sides = split_held_out(numbered(lengths), fraction=fraction, seed=seed)
    found = []
    for side in sides:
        assert len(side) == side.ends[-1] > 0
        rows = CorpusRows(side, 7, True)
        kept = [rows[i]["tokens"][rows[i]["segment_ids"] > 0] for i in range(len(rows))]
        found.append(np.concatenate(kept))
    assert len(set(found[0]) | set(found[1])) == len(found[0]) + len(found[1])
    return [set(side.tolist()) for side in found]


def test_documents_that_are_held_out_are_whole_and_training_never_sees_them():
    lengths = [1 + i % 5 for i in range(200)]
    train, held_out = split(lengths, 0.25)
    assert train | held_out == set(range(1, sum(lengths) + 1))
    first = 1
    sizes = 0
    for count in lengths:
        document = set(range(first, first + count))
        assert document <= train or document <= held_out
        sizes += document <= held_out
        first += count
    assert 30 <= sizes <= 70
    # Rows of documents that no longer lie side by side are those of a corpus without the others.
    kept, _ = split_held_out(numbered(lengths), fraction=0.25, seed=0)
    copied = corpus_from_tokens(kept.ids(np.arange(len(kept))), kept.ends)
    rows, others = CorpusRows(kept, 8, True), CorpusRows(copied, 8, True)
    assert len(rows) == len(others)
    for i in range(len(rows)):
        for name, values in rows[i].items():
            np.testing.assert_array_equal(values, others[i][name])


def test_which_documents_are_held_out_depends_on_their_numbers_and_the_seed_alone():
    ones = [1] * 100
    _, held_out = split(ones, 0.2)
    assert split(ones, 0.2)[1] == held_out != split(ones, 0.2, seed=1)[1]
    longer = split([1] * 130, 0.2)[1]
    assert {token for token in longer if token <= 100} == held_out


def test_a_split_that_leaves_one_side_empty_is_refused():
    with pytest.raises(ValueError, match=r"`eval_split_fraction` is 1e-06, which holds out 0 of 3"):
        split_held_out(numbered([1, 2, 3]), fraction=1e-6, seed=0)
    with pytest.raises(ValueError, match="holds out 3 of 3 documents, and both sides need one"):
        split_held_out(numbered([1, 2, 3]), fraction=0.999999, seed=0)
