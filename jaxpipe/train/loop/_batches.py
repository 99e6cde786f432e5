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
class DataPlan:
    """The data of a run, and how its rows are made.

    Attributes:
        sources: The sources that the run trains on; () for synthetic data.
        eval_sources: Sources that it is evaluated on; () for none of their own.
        is_mixture: Whether keys of the config list several sources.
        tokenizer_path: The tokenizer; "" for bytes.
        vocab_size: The largest id of a token is below it.
    """

    sources: tuple[Source, ...]
    eval_sources: tuple[Source, ...]
    is_mixture: bool
    tokenizer_path: str
    vocab_size: int
    packing: bool
    is_shuffled: bool
    seed: int
    eval_split_fraction: float
    eval_split_seed: int
    is_evaluated: bool
    num_eval_batches: int


def data_plan(config: Config) -> DataPlan:
    """Reads from a config which data a run has."""

    def of_files(files: tuple[str, ...]) -> tuple[Source, ...]:
        read = {name: getattr(config, name) for name in FIELD_READERS}
        return (Source.model_validate({"type": config.dataset_type, "files": files, **read}),)

    sources, eval_sources = (), ()
    if config.dataset_type != "synthetic":
        sources = config.data_sources or of_files(config.data_files)
        if config.eval_files or config.eval_data_sources:
            eval_sources = config.eval_data_sources or of_files(config.eval_files)
    return DataPlan(
        sources,
        eval_sources,
        is_mixture=config.dataset_type == "mixture",
        tokenizer_path=config.tokenizer_path,
        vocab_size=config.vocab_size,
        packing=config.packing,
        is_shuffled=config.enable_data_shuffling,
        seed=config.data_shuffle_seed,
        eval_split_fraction=config.eval_split_fraction,
        eval_split_seed=config.eval_split_seed,
        is_evaluated=config.eval_interval > 0,
        num_eval_batches=config.eval_steps,
    )


@dataclass(frozen=True)
class RunData:
    """The batches of training, by step, and those of evaluation: the same ones every time.

    There are none of evaluation if the config names no data for it. Every row is there once, in the
    order of the files, and the last batch is filled up with rows whose `target_weights` are 0.
    """

    training: Batches
    evaluation: FiniteBatches | None
    check_files: Callable[
        [], None
    ]  # raises LostFileError if files have changed since they were read


def make_data(plan: DataPlan, batch: BatchPlan) -> RunData:
    """Opens the data of a run."""
    if not plan.sources:
        held_out = FirstBatches(_synthetic(plan, batch, EVALUATION_STREAM), plan.num_eval_batches)
        held_out = held_out if plan.is_evaluated else None
        return RunData(_synthetic(plan, batch, 0), held_out, lambda: None)
    corpora = _corpora(plan, plan.sources, "data_files", "data_sources")
    held_out = []
    if plan.eval_split_fraction:
        corpora, held_out = zip(*_split(plan, corpora), strict=True)
    elif plan.is_evaluated and plan.eval_sources:
        held_out = _corpora(plan, plan.eval_sources, "eval_files", "eval_data_sources")
    batches = corpus_batches(
        corpora,
        weights=[source.weight for source in plan.sources],
        batch_size=batch.num_rows,
        length=batch.length,
        packing=plan.packing,
        shuffle_seed=plan.seed if plan.is_shuffled else None,
    )
    decided_by = batches.decided_by | tokenizer_checksum(plan.tokenizer_path, plan.sources)
    rows = tuple(CorpusRows(corpus, batch.length, plan.packing) for corpus in held_out)
    return RunData(
        dataclasses.replace(batches, decided_by=decided_by),
        SinglePassBatches(rows, batch.num_rows) if rows and plan.is_evaluated else None,
        partial(check_files, (*corpora, *held_out)),
    )


def _synthetic(plan: DataPlan, batch: BatchPlan, stream: int) -> Batches:
    return synthetic_batches(
        vocab_size=plan.vocab_size,
        batch_size=batch.num_rows,
        length=batch.length,
        seed=plan.seed,
        stream=stream,
    )


def tokenizer_checksum(path: str, sources: Sequence[Source]) -> dict[str, int | str]:
    """Returns the checksum of the tokenizer as an entry of `decided_by`, if one is used."""
    if all(source.type == "tokens" for source in sources):
        return {}
    return {"tokenizer": crc32(Path(path).read_bytes()) if path else "bytes"}


def write_corpus(plan: DataPlan, file: Path) -> TokenFileSummary:
    """Writes the documents of a source as a file of tokens, for `dataset_type=tokens`."""
    kind = "mixture" if plan.is_mixture else plan.sources[0].type if plan.sources else "synthetic"
    if kind in ("synthetic", "tokens", "mixture"):
        raise ValueError(
            f"`dataset_type` is {kind!r}, and a file of tokens is written of one "
            "source of text. Give text, jsonl, parquet or arrow."
        )
    if plan.eval_split_fraction or plan.eval_sources:
        key = "eval_split_fraction" if plan.eval_split_fraction else "eval_files"
        raise ValueError(
            f"`{key}` says what a run is evaluated on, and a file of tokens has all documents of "
            "`data_files`. Leave it out here, and give it to the run that reads the file."
        )
    tokenizer = load_tokenizer(plan.tokenizer_path, vocab_size=plan.vocab_size)
    return write_tokens(file, read_documents(plan.sources[0]), tokenizer)


def _split(plan: DataPlan, corpora: Sequence[Corpus]) -> list[tuple[Corpus, Corpus]]:
    return [
        split_held_out(
            corpus,
            fraction=plan.eval_split_fraction,
            seed=(plan.eval_split_seed, k),
            **_remedy(source, len(corpus.ends)),
        )
        for k, (corpus, source) in enumerate(zip(corpora, plan.sources, strict=True))
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
    plan: DataPlan, sources: Sequence[Source], of_one: str, of_mixture: str
) -> list[Corpus]:
    """Reads the corpora of sources that one of these config keys lists."""
    keys = [of_one]
    if plan.is_mixture:
        keys = [f"{of_mixture}[{k}].files" for k in range(len(sources))]
    tokenizer = None
    if any(source.type != "tokens" for source in sources):
        tokenizer = load_tokenizer(plan.tokenizer_path, vocab_size=plan.vocab_size)
    eods = {source.token_eod for source in sources if source.token_eod is not None}
    eods |= {tokenizer.eod} if tokenizer else set()
    if len(eods) > 1:
        raise ValueError(
            f"Documents of `{of_mixture}` end with the ids {', '.join(map(str, sorted(eods)))}: "
            "`token_eod` of tokens, and what the tokenizer has. A model reads one: make them equal."
        )
    return [
        read_corpus(source, tokenizer, vocab_size=plan.vocab_size, key=key)
        for source, key in zip(sources, keys, strict=True)
    ]
