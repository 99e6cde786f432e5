"""What `convert` writes, as transformers itself reads it. The other way round is in `golden`."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from harness.contract import assert_close
from jaxpipe.hugging_face import from_hugging_face, to_hugging_face
from jaxpipe.train.sampling import decoding_plan, generate
from jaxpipe.train.sampling._generate import likeliest

from .converted import NAMES, loaded, logits

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING),
        reason=f'{" and ".join(MISSING)} not installed: pip install "jaxpipe[dev,hugging-face]". '
        "What they compute is in tests/train/golden, and tested without them",
    ),
    pytest.mark.filterwarnings("ignore"),  # of libraries that are not ours
]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_what_we_do_before_and_after(name: str, tmp_path: Path):
    from .golden import make_golden

    make_golden.build(name).save_pretrained(tmp_path / "theirs")
    tokens = make_golden.tokens_of(name)
    expected = make_golden.logits_of(tmp_path / "theirs", tokens)

    from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    assert_close(logits(tmp_path / "ours", tokens), expected, name)

    to_hugging_face(tmp_path / "ours", tmp_path / "back", max_shard_bytes=20_000)
    found = make_golden.logits_of(tmp_path / "back", tokens)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_generates_the_tokens_that_we_do(name: str, tmp_path: Path):
    from .golden import make_golden

    # With large embeddings models that are tied would repeat their last token.
    model = make_golden.build(name, 0.1 if name in ("llama3", "gemma3") else 1.0)
    tokens = make_golden.tokens_of(name)[:, :6]
    model.save_pretrained(tmp_path / "theirs")
    expected = make_golden.generated_by(model, tokens, 20)
    assert len({*expected.ravel().tolist()}) > 8

    from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    setup, weights = loaded(tmp_path / "ours")
    weights["stages"] = jax.tree.map(lambda w: w[0, 0], weights["stages"])
    found = jax.jit(
        lambda weights: generate(
            decoding_plan(setup.config, setup.mesh).decoder,
            weights,
            jax.numpy.asarray(tokens),
            jax.numpy.ones_like(tokens),
            jax.random.key(0),
            max_tokens=20,
            choose=likeliest,
            is_token=np.ones(setup.config.vocab_size, bool),
            end=-1,
        )
    )(weights)
    np.testing.assert_array_equal(found, expected)
