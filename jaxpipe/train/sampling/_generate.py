"""Generates tokens: the prompts in one pass, and then one token of every row in a loop.

Layers keep what they carry along a sequence, such as keys and values, in arrays that have room for
all tokens: a prompt is the first slice of a sequence, and each new token one of its own. Rows are
prompts of different lengths, so that shorter ones have padding in front, of a document of its own.
The next token of every row is chosen from its logits.

b rows, P tokens of the longest prompt, N new ones, V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Key, PRNGKeyArray, PyTree

from ...autodiff.staged_model import Past, run_sliced_layers

Choose = Callable[[Float[Array, "b V"], Key[Array, " b"]], Int[Array, " b"]]
"""`(logits, keys) -> tokens`. A logit of minus infinity is of a token that is never chosen."""

Carried = dict[str, PyTree]
"""What layers carry: `embed` of those before the pipeline, `stages` of all others, [L, b, ...]."""


@dataclass(frozen=True)
class Decoder:
    """The functions of a model that decoding runs.

    Attributes:
        embed: `(weights, batch_inputs) -> x`; if it has layers, also `(weights, batch_inputs, past)
            -> (x, past)`.
        layer: `(weights, x, batch_inputs, key, past) -> (y, (aux, past))`.
        logits: `(boundary, x [b, t, D]) -> [b, t, V]`.
        tied: Whether the logits are computed with the embedding's table.
        layer_kinds: [L] the kind of every layer, which `layer` is given with its key; None if
            layers are of one kind.
    """

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    logits: Callable[[PyTree, Array], Array]
    tied: bool
    layer_kinds: Int[np.ndarray, " L"] | None = None


def prefill(
    decoder: Decoder,
    weights: PyTree,
    tokens: Int[Array, "b P"],
    segment_ids: Int[Array, "b P"],
    *,
    length: int,
) -> tuple[Float[Array, "b V"], Carried]:
    """Runs prompts, with padding in front, and returns the logits behind them and what is carried.

    Weights are as checkpoints have them, with no layers after the stages; there is room for
    `length` positions.
    """
    positions = jnp.maximum(jnp.arange(tokens.shape[1]) - _num_padding(segment_ids)[:, None], 0)
    logits, carried = _run(decoder, weights, (tokens, positions, segment_ids), lambda name: Past())

    def with_room(x: Array) -> Array:
        rest = jnp.zeros((*x.shape[:2], length - x.shape[2], *x.shape[3:]), x.dtype)
        return jnp.concatenate([x, rest], axis=2)

    return logits, jax.tree.map(with_room, carried)


def decode(
    decoder: Decoder,
    weights: PyTree,
    tokens: Int[Array, " b"],
    num_padding: Int[Array, " b"],
    carried: Carried,
    *,
    index: Any,
    length: int,
) -> tuple[Float[Array, "b V"], Carried]:
    """Runs one token of every row, and returns the logits behind it and what layers carry on.

    `index` is that of the token in its row, of `length`, and `num_padding` counts what is in front.
    """
    positions = (index - num_padding)[:, None]
    inputs = tokens[:, None], positions, jnp.ones_like(positions)

    def past(name: str) -> Past:
        return Past(carried[name], offset=index, num_slices=length)

    logits, new = _run(decoder, weights, inputs, past)
    return logits, jax.tree.map(
        lambda x, part: lax.dynamic_update_slice_in_dim(x, part, index, axis=2), carried, new
    )


def generate(
    decoder: Decoder,
    weights: PyTree,
    tokens: Int[Array, "b P"],
    segment_ids: Int[Array, "b P"],
    key: PRNGKeyArray,
    *,
    max_tokens: int,
    choose: Choose,
    is_token: Bool[np.ndarray, " V"],
    end: int,
) -> Int32[Array, "b N"]:
    """Returns the tokens that follow the prompts; behind the token `end` there is nothing else.

    A draw depends on the key, the index of the row and that of the token alone. Ids that the
    tokenizer does not have are never chosen.
    """
    num_rows, num_prompt = tokens.shape
    length, padding = num_prompt + max_tokens - 1, _num_padding(segment_ids)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(num_rows))

    def next_tokens(logits: Array, index: Any) -> Array:
        keys_of_index = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys)
        return choose(jnp.where(is_token, logits, -jnp.inf), keys_of_index)

    logits, carried = prefill(decoder, weights, tokens, segment_ids, length=length)
    newest = next_tokens(logits, 0)
    generated = jnp.full((num_rows, max_tokens), end, jnp.int32).at[:, 0].set(newest)
    if max_tokens == 1:
        return generated

    def goes_on(state: tuple[Any, ...]) -> Array:
        i, newest, _, _ = state
        return (i < max_tokens) & jnp.any(newest != end)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, newest, carried, generated = state
        index = num_prompt + i - 1
        logits, carried = decode(
            decoder, weights, newest, padding, carried, index=index, length=length
        )
        newest = jnp.where(newest == end, end, next_tokens(logits, i))
        return i + 1, newest, carried, generated.at[:, i].set(newest)

    return lax.while_loop(goes_on, step, (jnp.int32(1), newest, carried, generated))[-1]


def _num_padding(segment_ids: Int[Array, "b P"]) -> Int[Array, " b"]:
    return jnp.sum(segment_ids == 0, axis=1, dtype=jnp.int32)


def _run(
    decoder: Decoder,
    weights: PyTree,
    inputs: tuple[Array, Array, Array],
    past: Callable[[str], Past],
) -> tuple[Float[Array, "b V"], Carried]:
    """Runs tokens, positions and segment ids [b, t]; returns logits behind them and new state."""
    tokens, positions, segment_ids = inputs
    batch_inputs = {
        "tokens": tokens,
        "positions": positions,
        "segment_ids": segment_ids,
        "target_weights": jnp.zeros(tokens.shape, jnp.float32),
    }
    carried: Carried = {"embed": ()}
    if "layers" in weights["embed"]:
        x, written = decoder.embed(weights["embed"], batch_inputs, past("embed"))
        carried["embed"] = written.new
    else:
        x = decoder.embed(weights["embed"], batch_inputs)
    stages = past("stages")
    keys = () if decoder.layer_kinds is None else ((), decoder.layer_kinds)
    x, _, written = run_sliced_layers(
        decoder.layer, weights["stages"], x, batch_inputs, keys, stages
    )
    boundary = {name: weights[name] for name in (("embed", "head") if decoder.tied else ("head",))}
    return decoder.logits(boundary, x[:, -1:])[:, 0], carried | {"stages": written.new}


def choice(temperature: float, top_p: float) -> Choose:
    """Returns the rule of a temperature, 0 for the likeliest token, and of a share `top_p`."""
    return partial(draw, temperature=temperature, top_p=top_p) if temperature else likeliest


def likeliest(logits: Float[Array, "b V"], keys: Key[Array, " b"]) -> Int[Array, " b"]:
    """Returns the token with the largest logit, the first of several."""
    del keys
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def draw(
    logits: Float[Array, "b V"], keys: Key[Array, " b"], *, temperature: float, top_p: float
) -> Int[Array, " b"]:
    """Draws a token by the probabilities of the logits, divided by the temperature."""
    # The largest becomes 0: without that a small temperature makes infinities of several.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_p < 1:
        logits = nucleus(logits, top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def nucleus(logits: Float[Array, "b V"], top_p: float) -> Float[Array, "b V"]:
    """Keeps the fewest of the likeliest tokens whose probabilities add up to at least `top_p`.

    Holtzman et al., 2019, arXiv 1904.09751. The logits of all others become minus infinity.
    """
    order = jnp.argsort(logits, axis=-1, descending=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The likeliest has nothing before it, whatever the sums are rounded to.
    is_kept = (likelier < top_p).at[:, 0].set(True)
    kept = jnp.where(is_kept, ordered, -jnp.inf)
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
