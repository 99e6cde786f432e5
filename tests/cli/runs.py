"""Small runs from the outside, and what they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path

from quick import ENVIRONMENT

SMALL = [
    "dtype=float32",
    "base_emb_dim=16",
    "base_mlp_dim=32",
    "max_target_length=16",
    "num_pipeline_microbatches=4",
    "ici_fsdp_parallelism=1",
    "enable_tensorboard=false",
]


def run_jaxpipe(*words: str) -> str:
    """What `jaxpipe WORDS`, which must succeed, prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "jaxpipe", *words],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def losses(folder: Path) -> list[float]:
    """Of every step of the run `default` in a folder."""
    lines = (folder / "default" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
