"""The data that a run's config asks for, as batches."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from ...data.batches import (
    Batches,
    Corpus,
    CorpusRows,
    FiniteBatches,
    FirstBatches,
    SinglePassBatches,
    check_files,
    read_corpus,
    split_held_out,
)
from ...data.sources import FIELD_READERS, TokenFileSummary
from ..config._config import Config
from ..plan._devices import BatchPlan

EVALUATION_STREAM = 1
"""The stream of synthetic batches for evaluation; that of training is 0."""


@dataclass(frozen=True)
class RunData:
    """The batches of training, by step, and those of evaluation: the same ones every time.

    There are none of evaluation if the config names no data for it. Every row is there once, in the
    order of the files, and the last batch is filled up with rows whose `target_weights` are 0.
    """

    training: Batches
    evaluation: FiniteBatches | None
    # Raises LostFileError if files have changed since they were read.
    check_files: Callable[[], None]


def make_data(config: Config, batch: BatchPlan) -> RunData:
    """Opens the data of a run."""
    is_evaluated = config.eval_interval > 0
    if config.dataset_type == "synthetic":
        held_out = FirstBatches(_synthetic(config, batch, EVALUATION_STREAM), config.eval_steps)
        held_out = held_out if is_evaluated else None
        return RunData(_synthetic(config, batch, 0), held_out, lambda: None)
    sources = _sources(config, config.data_sources, config.data_files)
    eval_sources = _sources(config, config.eval_data_sources, config.eval_files)
    corpora = _corpora(config, sources, "data_files", "data_sources")
    held_out = []
    if config.eval_split_fraction:
        corpora, held_out = zip(*_split(config, sources, corpora), strict=True)
    elif is_evaluated and eval_sources:
        held_out = _corpora(config, eval_sources, "eval_files", "eval_data_sources")
    batches = corpus_batches(
        corpora,
        weights=[source.weight for source in sources],
        batch_size=batch.num_rows,
        length=batch.length,
        packing=config.packing,
        shuffle_seed=config.data_shuffle_seed if config.enable_data_shuffling else None,
    )
    decided_by = batches.decided_by | tokenizer_checksum(config.tokenizer_path, sources)
    rows = tuple(CorpusRows(corpus, batch.length, config.packing) for corpus in held_out)
    return RunData(
        dataclasses.replace(batches, decided_by=decided_by),
        SinglePassBatches(rows, batch.num_rows) if rows and is_evaluated else None,
        partial(check_files, (*corpora, *held_out)),
    )


def _sources(
    config: Config, listed: tuple[Source, ...], files: tuple[str, ...]
) -> tuple[Source, ...]:
    """Returns the sources that a config lists, or else the one that its files are."""
    if listed or not files:
        return listed
    fields = {name: getattr(config, name) for name in FIELD_READERS}
    return (Source.model_validate({"type": config.dataset_type, "files": files, **fields}),)


def _synthetic(config: Config, batch: BatchPlan, stream: int) -> Batches:
    return synthetic_batches(
        vocab_size=config.vocab_size,
        batch_size=batch.num_rows,
        length=batch.length,
        seed=config.data_shuffle_seed,
        stream=stream,
    )


def tokenizer_checksum(path: str, sources: Sequence[Source]) -> dict[str, int | str]:
    """Returns the checksum of the tokenizer as an entry of `decided_by`, if one is used."""
    if all(source.type == "tokens" for source in sources):
        return {}
    return {"tokenizer": crc32(Path(path).read_bytes()) if path else "bytes"}


def write_corpus(config: Config, file: Path) -> TokenFileSummary:
    """Writes the documents of a source as a file of tokens, for `dataset_type=tokens`."""
    if config.dataset_type in ("synthetic", "tokens", "mixture"):
        raise ValueError(
            f"`dataset_type` is {config.dataset_type!r}, and a file of tokens is written of one "
            "source of text. Give text, jsonl, parquet or arrow."
        )
    if config.eval_split_fraction or config.eval_files:
        key = "eval_split_fraction" if config.eval_split_fraction else "eval_files"
        raise ValueError(
            f"`{key}` says what a run is evaluated on, and a file of tokens has all documents of "
            "`data_files`. Leave it out here, and give it to the run that reads the file."
        )
    [source] = _sources(config, (), config.data_files)
    tokenizer = load_tokenizer(config.tokenizer_path, vocab_size=config.vocab_size)
    return write_tokens(file, read_documents(source), tokenizer)


def _split(
    config: Config, sources: Sequence[Source], corpora: Sequence[Corpus]
) -> list[tuple[Corpus, Corpus]]:
    return [
        split_held_out(
            corpus,
            fraction=config.eval_split_fraction,
            seed=(config.eval_split_seed, k),
            **_remedy(source, len(corpus.ends)),
        )
        for k, (corpus, source) in enumerate(zip(corpora, sources, strict=True))
    ]


def _remedy(source: Source, num_documents: int) -> dict[str, str]:
    """Returns the advice for a source that is one document, which no split divides."""
    if num_documents > 1:
        return {}
    if source.type != "text":
        return {"remedy": "Give more documents, or evaluation files of its own."}
    parts = "one a file" if not source.text_separator else "what stands between separators"
    return {
        "remedy": f"Documents are {parts}: `text_separator` is {source.text_separator!r}. Give "
        'another, as text_separator: "\\n\\n" in a file or text_separator=\'"\\n\\n"\' in a '
        "shell for one a paragraph, or `eval_files`."
    }


def _corpora(
    config: Config, sources: Sequence[Source], of_one: str, of_mixture: str
) -> list[Corpus]:
    """Reads the corpora of sources that one of these config keys lists."""
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
