"""The z-loss is its formula, in chunks too, and the same in every engine."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from harness.contract import Row, assert_close, check_row
from jaxpipe.models.layers import rms_norm
from small_models import small_llama_loss

from .test_chunked_loss import batch

MULTIPLIER = 0.1


def by_formula(boundary: Any, x: Any, batch_inputs: Any) -> Any:
    logits = rms_norm(x, boundary["head"]["norm"], 1e-5) @ boundary["head"]["logits"]
    exponentials = jnp.sum(jnp.exp(logits), axis=-1)
    picked = jnp.take_along_axis(jnp.exp(logits), batch_inputs["targets"][..., None], axis=-1)[
        ..., 0
    ]
    z_loss = MULTIPLIER * jnp.sum(jnp.log(exponentials) ** 2 * batch_inputs["target_weights"])
    entropy = -jnp.sum(jnp.log(picked / exponentials) * batch_inputs["target_weights"])
    return entropy + z_loss, z_loss


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_it_is_the_formula(num_chunks: int):
    boundary, x, batch_inputs = batch()

    next_token_loss = small_llama_loss(num_vocab_tiling=num_chunks, z_loss_multiplier=MULTIPLIER)

    def loss(boundary, x):
        value, metrics = next_token_loss(boundary, x, batch_inputs)
        return value, metrics["z_loss"]

    found, true = (
        jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(boundary, x)
        for f in (loss, lambda boundary, x: by_formula(boundary, x, batch_inputs))
    )
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(true), strict=True)
    for (path, leaf), of_formula in pairs:
        assert_close(leaf, of_formula, jax.tree_util.keystr(path))


llama = functools.partial(Row, model="llama", packed=True, z_loss=0.1)
FSDP: Any = (("fsdp", 2),)
ROWS = [
    llama("scheduled", ranks=2, repeats=1, microbatches=4, axes=(), schedule="1f1b",
          vocab_parallel=True, tied=True),
    llama("circular", ranks=2, repeats=2, microbatches=4, axes=FSDP, dropout=0.1),
    llama("scheduled", ranks=2, repeats=2, microbatches=4, axes=FSDP, schedule="zbv"),
    llama("mpmd", ranks=2, repeats=1, microbatches=4, axes=FSDP, schedule="zero_bubble_h1"),
    llama("nnx", ranks=2, repeats=1, microbatches=4, axes=FSDP),
    Row("circular", "deepseek", 2, 1, 4, axes=FSDP, packed=True, z_loss=0.1),
]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] * bool(i)) for i, row in enumerate(ROWS)],
    ids=str,
)
def test_every_engine_has_it(row: Row):
    check_row(row)
