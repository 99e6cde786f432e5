"""The batches that a run's config asks for."""

from collections.abc import Sequence

from ..data import (
    AllRows,
    Batch,
    Batches,
    Corpus,
    Rows,
    load_tokenizer,
    read_documents,
    split_off,
    synthetic_batches,
    text_batches,
    tokenize,
)
from ._config import Config
from ._setup import Setup

EVALUATION = 2**32
"""Of synthetic batches the seed, beyond those that a config may have."""


def make_batches(setup: Setup) -> Batches:
    """The batches of a run, by step."""
    config = setup.config
    if config.dataset_type == "synthetic":
        return synthetic_batches(
            vocab_size=config.vocab_size,
            batch_size=setup.batch_size,
            length=config.max_target_length,
            seed=config.data_shuffle_seed,
        )
    corpus = _corpus(config, "data_files")
    if config.eval_split_fraction:
        corpus, _ = _split(config, corpus)
    return text_batches(
        corpus,
        batch_size=setup.batch_size,
        length=config.max_target_length,
        packing=config.packing,
        shuffle_seed=config.data_shuffle_seed if config.enable_data_shuffling else None,
    )


def make_eval_batches(setup: Setup) -> Sequence[Batch] | None:
    """What a run is evaluated on: the same batches every time, shaped as those of training.

    Every row is there once, in the order of the files. The last batch is filled up with rows whose
    `target_weights` are 0.

    Returns:
        Batches that are made when they are asked for, or None if the config names no such data.
    """
    config = setup.config
    if config.dataset_type == "synthetic" and not config.eval_interval:
        return None
    if config.dataset_type == "synthetic":
        batch_at = synthetic_batches(
            vocab_size=config.vocab_size,
            batch_size=setup.batch_size,
            length=config.max_target_length,
            seed=EVALUATION + config.data_shuffle_seed,
        )
        return [batch_at(step) for step in range(config.eval_steps)]
    if config.eval_split_fraction:
        _, corpus = _split(config, _corpus(config, "data_files"))
    elif config.eval_files:
        corpus = _corpus(config, "eval_files")
    else:
        return None
    rows = Rows(corpus, config.max_target_length, config.packing)
    return AllRows((rows,), setup.batch_size)


def _split(config: Config, corpus: Corpus) -> tuple[Corpus, Corpus]:
    return split_off(corpus, fraction=config.eval_split_fraction, seed=config.eval_split_seed)


def _corpus(config: Config, key: str) -> Corpus:
    """What the files of a key hold."""
    tokenizer = load_tokenizer(config.tokenizer_path, vocab_size=config.vocab_size)
    files = getattr(config, key)
    return tokenize(read_documents(files, separator=config.text_separator, key=key), tokenizer)
