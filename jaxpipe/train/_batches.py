"""The batches that a run's config asks for."""

from collections.abc import Sequence

from ._data import Batch, BatchAt, synthetic_batches, text_batches
from ._documents import read_documents, tokenize
from ._setup import Setup
from ._tokens import load_tokenizer

EVALUATION = 2**32
"""Of synthetic batches the seed, beyond those that a config may have."""


def make_eval_batches(setup: Setup) -> Sequence[Batch] | None:
    """What the run evaluates on, if the config says so."""
    config = setup.config
    if config.dataset_type != "synthetic":
        return None
    batch_at = synthetic_batches(
        vocab_size=config.vocab_size,
        batch_size=setup.batch_size,
        length=config.max_target_length,
        seed=EVALUATION + config.data_shuffle_seed,
    )
    return [batch_at(step) for step in range(config.eval_steps)]


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
