"""What `convert` writes, as transformers itself reads it. The other way round is in `golden`."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from harness.contract import assert_close
from jaxpipe.hugging_face import from_hugging_face, to_hugging_face

from .converted import NAMES, logits

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
