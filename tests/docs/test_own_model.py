"""The scripts of docs/own-model.md: seven new lines make a pipeline with the losses of 20 steps."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "own-model.md"
SECTIONS = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
DIFFS = {
    name: found[1]
    for name, text in SECTIONS
    if (found := re.search(r"```diff\n(.*?)```", text, re.S))
}
SELECTIONS = {
    "circular": 'schedule="circular"',
    "one program": 'schedule="zero_bubble_h1"',
    "mpmd": 'schedule="1f1b", engine="mpmd"',
}


def script(name: str, sign: str) -> str:
    lines = DIFFS[name].splitlines()
    return "\n".join(line[1:] for line in lines if line[:1] in (" ", sign))


def run(text: str) -> dict[str, Any]:
    names: dict = {"__name__": "script"}
    text = text.replace('{"stage": 2}', '{"stage": 2}, devices=jax.devices()[:2]')  # of eight
    with jax.numpy_dtype_promotion("standard"):  # optax wants it
        exec(compile(text, str(PAGE), "exec"), names)
    return names


def losses_of(text: str) -> Any:
    losses = np.array(run(text)["losses"])
    assert losses.shape == (20,)
    return losses


@functools.cache
def plain_losses(name: str) -> Any:
    return losses_of(script(name, "-"))


QUICK = [("Plain JAX", "circular"), ("Linen", "mpmd"), ("NNX", "mpmd")]


@pytest.mark.parametrize(
    ("name", "selection"),
    [
        pytest.param(name, selection, marks=() if (name, selection) in QUICK else pytest.mark.slow)
        for name in DIFFS
        for selection in SELECTIONS
    ],
)
def test_the_losses_are_those_of_the_plain_script(name: str, selection: str):
    text = script(name, "+").replace(SELECTIONS["circular"], SELECTIONS[selection])
    assert SELECTIONS[selection] in text
    losses, plain = losses_of(text), plain_losses(name)
    error = np.max(np.abs(losses - plain) / plain)
    print(f"{name}, {selection}: {error:.1e}")
    assert error <= 1e-6


def test_the_changes_are_seven_lines():
    assert list(DIFFS) == ["Plain JAX", "NNX", "Linen", "Equinox"]
    for name, diff in DIFFS.items():
        assert sum(line.startswith("+") for line in diff.splitlines()) <= 7, name


def test_the_vision_transformer_is_exact():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = run(block)
    model, params = names["model"], names["params"]
    assert not model.tied
    assert sorted(model.to_groups(params)["head"]) == ["head.bias", "head.kernel"]
