"""The text of a small step after every pass, compared with the files in `goldens`.

`JAXPIPE_WRITE_GOLDENS=1 pytest tests/mpmd/test_goldens.py` writes the files.
"""

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import Add, mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.mpmd.passes import LOWERING
from mpmd.small import groups

FOLDER = Path(__file__).parent / "goldens"


def step(weights: Any, xs: Any) -> Any:
    """Two stages, three microbatches, 1F1B, and an optimizer update outside of the loop."""

    def loss(weights: Any, x: Any) -> Any:
        first, second = (w * w for w in weights)  # an invariant of the loop
        return jnp.sum(mark_stage_end(jnp.sin(x * first)) * second)

    def of_microbatch(x: Any) -> Any:
        return jax.value_and_grad(loss)(weights, x)

    value, grads = treduce(of_microbatch, xs, schedule="1f1b", operation=Add)
    new = [w - 0.5 * g for w, g in zip(weights, grads, strict=True)]
    return new, value, {"loss": value}  # each result is an array of its own


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    weights = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    xs = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    specs = [P("fsdp"), None]
    jitted = mpmd_jit_with_loop(step, groups(2, fsdp=2), in_shardings=(specs, None))
    found: dict[str, str] = {}
    jitted.trace(weights, xs).lower(observe=lambda name, result: found.update({name: str(result)}))
    return found


def golden(name: str) -> Path:
    number = [one_pass.__name__ for one_pass in LOWERING].index(name)
    return FOLDER / f"{number + 1:02}_{name}.txt"


def in_order(text: str) -> str:
    """Returns a text whose sums of cotangents have their operands in order, which JAX may swap."""
    return re.sub(
        r"add_any (v\d+) (v\d+)", lambda m: f"add_any {min(m[1], m[2])} {max(m[1], m[2])}", text
    )


@pytest.mark.parametrize("name", [one_pass.__name__ for one_pass in LOWERING])
def test_the_step_reads_like_this_after(name: str, texts: dict[str, str]):
    file, text = golden(name), in_order(texts[name] + "\n")
    if os.environ.get("JAXPIPE_WRITE_GOLDENS"):
        file.write_text(text)
    assert file.read_text() == text


def test_every_golden_belongs_to_a_pass():
    expected = [golden(one_pass.__name__) for one_pass in LOWERING]
    assert sorted(FOLDER.iterdir()) == expected
