"""The batches that a run's config asks for."""

from ..data import (
    BatchAt,
    load_tokenizer,
    read_documents,
    synthetic_batches,
    text_batches,
    tokenize,
)
from ._setup import Setup


def make_batches(setup: Setup) -> BatchAt:
    """The batches of a run, by step."""
    config = setup.config
    if config.dataset_type == "synthetic":
        return synthetic_batches(
            vocab_size=config.vocab_size,
            batch_size=setup.batch_size,
            length=config.max_target_length,
            seed=config.data_shuffle_seed,
        )
    tokenizer = load_tokenizer(config.tokenizer_path, vocab_size=config.vocab_size)
    documents = read_documents(config.text_files, separator=config.text_separator)
    return text_batches(
        tokenize(documents, tokenizer),
        batch_size=setup.batch_size,
        length=config.max_target_length,
        packing=config.packing,
        shuffle_seed=config.data_shuffle_seed if config.enable_data_shuffling else None,
    )
