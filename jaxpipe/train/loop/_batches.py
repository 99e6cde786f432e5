"""The batches that a run's config asks for."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from ...data import (
    Source,
    corpus_batches,
    load_tokenizer,
    read_documents,
    synthetic_batches,
    write_tokens,
)
from ...data.batches._batches import Batches, FiniteBatches, FirstBatches, SinglePassBatches
from ...data.batches._corpus import Corpus, read_corpus, split_held_out
from ...data.batches._rows import Rows
from ...data.sources._source_config import FIELD_READERS
from ...data.sources._write import TokenFileSummary
from ..config._config import Config
from ..plan._setup import Setup

EVALUATION_STREAM = 1
"""The stream of synthetic batches for evaluation; that of training is 0."""


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        training: Its batches, by step.
        evaluation: The same batches every time, shaped as those of training; None if there is
            no evaluation or the config names no data for it. Every row is there once, in the order
            of the files, and the last batch is filled up with rows whose `target_weights` are 0.
    """

    training: Batches
    evaluation: FiniteBatches | None


def make_data(setup: Setup) -> RunData:
    """Opens the data that the config of a run names.

    Args:
        setup: The run.

    Returns:
        The batches for training and evaluation.

    Raises:
        ValueError: If a file is missing or of another type, or the sources do not agree.
    """
    config = setup.config
    if config.dataset_type == "synthetic":
        held_out = FirstBatches(_synthetic(setup, EVALUATION_STREAM), config.eval_steps)
        return RunData(_synthetic(setup, 0), held_out if config.eval_interval else None)
    sources = _sources(config)
    corpora = _corpora(config, sources, "data_files", "data_sources")
    held_out = []
    if config.eval_split_fraction:
        corpora, held_out = zip(*_split(config, corpora), strict=True)
    elif config.eval_interval and (config.eval_files or config.eval_data_sources):
        held_out = _corpora(config, _eval_sources(config), "eval_files", "eval_data_sources")
    batches = corpus_batches(
        corpora,
        weights=[source.weight for source in sources],
        batch_size=setup.batch_size,
        length=config.max_target_length,
        packing=config.packing,
        shuffle_seed=config.data_shuffle_seed if config.enable_data_shuffling else None,
    )
    decided_by = batches.decided_by | tokenizer_checksum(config, sources)
    rows = tuple(Rows(corpus, config.max_target_length, config.packing) for corpus in held_out)
    return RunData(
        dataclasses.replace(batches, decided_by=decided_by),
        SinglePassBatches(rows, setup.batch_size) if rows and config.eval_interval else None,
    )


def make_batches(setup: Setup) -> Batches:
    """Returns the training batches of a run.

    Args:
        setup: The run.

    Returns:
        The batches, by step.
    """
    return make_data(setup).training


def _synthetic(setup: Setup, stream: int) -> Batches:
    config = setup.config
    return synthetic_batches(
        vocab_size=config.vocab_size,
        batch_size=setup.batch_size,
        length=config.max_target_length,
        seed=config.data_shuffle_seed,
        stream=stream,
    )


def tokenizer_checksum(config: Config, sources: Sequence[Source]) -> dict[str, int | str]:
    """Returns the checksum of the tokenizer as an entry of `decided_by`, if one is used."""
    if all(source.type == "tokens" for source in sources):
        return {}
    path = config.tokenizer_path
    return {"tokenizer": crc32(Path(path).read_bytes()) if path else "bytes"}


def write_corpus(config: Config, file: Path) -> TokenFileSummary:
    """Writes the documents of a config as a file of tokens, for `dataset_type=tokens`.

    Args:
        config: The config, which names the data and the tokenizer.
        file: The new file.

    Returns:
        The counts, and the settings with which the file is read.

    Raises:
        ValueError: If the config's data is no source of text, or the file cannot be written.
    """
    if config.dataset_type in ("synthetic", "tokens", "mixture"):
        raise ValueError(
            f"`dataset_type` is {config.dataset_type!r}, and a file of tokens is written of one "
            "source of text. Give text, jsonl, parquet or arrow."
        )
    tokenizer = load_tokenizer(config.tokenizer_path, vocab_size=config.vocab_size)
    return write_tokens(file, read_documents(_source(config, config.data_files)), tokenizer)


def _sources(config: Config) -> tuple[Source, ...]:
    return config.data_sources or (_source(config, config.data_files),)


def _eval_sources(config: Config) -> tuple[Source, ...]:
    return config.eval_data_sources or (_source(config, config.eval_files),)


def _source(config: Config, files: tuple[str, ...]) -> Source:
    """Returns a source of files that are read by the keys for a single source."""
    read = {name: getattr(config, name) for name in FIELD_READERS}
    return Source.model_validate({"type": config.dataset_type, "files": files, **read})


def _split(config: Config, corpora: Sequence[Corpus]) -> list[tuple[Corpus, Corpus]]:
    return [
        split_held_out(
            corpus, fraction=config.eval_split_fraction, seed=(config.eval_split_seed, k)
        )
        for k, corpus in enumerate(corpora)
    ]


def _corpora(
    config: Config, sources: Sequence[Source], of_one: str, of_mixture: str
) -> list[Corpus]:
    """Reads the corpora of sources that one of these config keys lists.

    Returns:
        One corpus for each source.

    Raises:
        ValueError: If sources of one model end documents with different ids.
    """
    keys = [of_one]
    if config.dataset_type == "mixture":
        keys = [f"{of_mixture}[{k}].files" for k in range(len(sources))]
    tokenizer = None
    if any(source.type != "tokens" for source in sources):
        tokenizer = load_tokenizer(config.tokenizer_path, vocab_size=config.vocab_size)
    eods = {source.token_eod for source in sources if source.token_eod is not None}
    eods |= {tokenizer.eod} if tokenizer else set()
    if len(eods) > 1:
        raise ValueError(
            f"Documents of `{of_mixture}` end with the ids {', '.join(map(str, sorted(eods)))}: "
            "`token_eod` of tokens, and what the tokenizer has. A model reads one: make them equal."
        )
    return [
        read_corpus(source, tokenizer, vocab_size=config.vocab_size, key=key)
        for source, key in zip(sources, keys, strict=True)
    ]
