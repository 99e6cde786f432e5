"""Prompts as rows of tokens, and the tokens that follow them as text.

b rows, P tokens of the longest prompt, N new ones, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int32, Integer, PyTree

from ..._input import short_repr
from ...data.sources import Tokenizer
from ..checkpoint._layer_reordering import jit_on_mesh
from ._decoding_plan import DecodingPlan
from ._generate import choice, generate


@dataclass(frozen=True)
class Sample:
    """A prompt and what follows it.

    Attributes:
        text: The prompt and the new tokens, decoded together.
        token_ids: The new tokens, without the one that ends a document.
        has_ended: Whether the document has ended; else there were as many tokens as were asked for.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    has_ended: bool


@dataclass(frozen=True)
class SamplingOptions:
    """How many tokens are generated, and how they are chosen.

    Attributes:
        max_tokens: N, the most tokens that follow a prompt.
        temperature: The divisor of logits before a token is drawn; 0 takes the likeliest.
        top_p: The share of the probability of which the likeliest tokens are drawn.
        seed: The seed of all draws.
        bos: The id of a token in front of every prompt; None for none.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    bos: int | None = None

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"`max_tokens` is {self.max_tokens}. Give at least 1.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"`temperature` is {self.temperature:g}. Give 0, for the likeliest token, or more."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p:g}. Give a share above 0 and up to 1.")
        if self.top_p < 1 and not self.temperature:
            raise ValueError(
                f"`top_p` is {self.top_p:g} and `temperature` 0, which takes the likeliest token. "
                "Give a temperature too, such as 1."
            )


def sampler(
    plan: DecodingPlan, tokenizer: Tokenizer, prompts: Sequence[str], options: SamplingOptions
) -> Callable[[PyTree], list[Sample]]:
    """Returns the samples of prompts as a function of weights, which compiles at its first call."""
    vocab_size = plan.weights.sizes.vocab_size
    if not prompts:
        raise ValueError("`prompts` is empty. Give at least one.")
    if options.bos is not None and not 0 <= options.bos < vocab_size:
        raise ValueError(f"`bos` is {options.bos} and `vocab_size` {vocab_size}. Give an id below.")
    front = np.asarray([] if options.bos is None else [options.bos], np.int32)
    rows = [_encoded(tokenizer, prompt, front) for prompt in prompts]
    tokens, segment_ids = _padded(rows)
    is_token = np.zeros(vocab_size, bool)  # other ids only fill the model's vocabulary
    is_token[tokenizer.ids] = True

    def run(weights: PyTree, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
        return generate(
            plan.decoder,
            weights,
            tokens,
            segment_ids,
            jax.random.key(options.seed),  # inside of the program every process of a run has it
            max_tokens=options.max_tokens,
            choose=choice(options.temperature, options.top_p),
            is_token=is_token,
            end=tokenizer.eod,
        )

    program = jit_on_mesh(plan.mesh, run, NamedSharding(plan.mesh, PartitionSpec()))

    def samples(weights: PyTree) -> list[Sample]:
        generated = np.asarray(program(weights, tokens, segment_ids))
        return [
            _sample(tokenizer, prompt, row[len(front) :], new)
            for prompt, row, new in zip(prompts, rows, generated, strict=True)
        ]

    return samples


def _encoded(
    tokenizer: Tokenizer, prompt: str, front: Int32[np.ndarray, " f"]
) -> Int32[np.ndarray, " n"]:
    ids = np.concatenate([front, tokenizer.encode(prompt)])
    if not len(ids):
        raise ValueError(
            f"The prompt {short_repr(prompt)} has no token, and a model predicts what follows one. "
            "Give some text."
        )
    return ids


def _padded(
    rows: Sequence[np.ndarray],
) -> tuple[Int32[np.ndarray, "b P"], Int32[np.ndarray, "b P"]]:
    """Returns tokens at the end of rows of one length, and where they are."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    segment_ids = np.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, -len(row) :], segment_ids[i, -len(row) :] = row, 1
    return tokens, segment_ids


def _sample(
    tokenizer: Tokenizer,
    prompt: str,
    prompt_ids: Int32[np.ndarray, " n"],
    generated: Integer[np.ndarray, " N"],
) -> Sample:
    ends = np.flatnonzero(generated == tokenizer.eod)
    new = tuple(generated[: ends[0] if len(ends) else None].tolist())
    # Together, since some tokenizers decode the first token of a text in another way.
    text = tokenizer.decode([*prompt_ids.tolist(), *new])
    return Sample(prompt, text, new, bool(len(ends)))


def printable(text: str) -> str:
    """Returns a text without what a terminal would take for a command."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
