"""The commands and the settings of the tutorials are those of the trainer."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from jaxpipe import plan
from jaxpipe.cli._options import split_settings
from jaxpipe.models import PRESETS
from jaxpipe.train import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def commands(text: str) -> list[list[str]]:
    """Returns the words of every `jaxpipe train`, of diffs those that are added or stay."""
    shell = re.sub(r"^-.*\n", "", text, flags=re.MULTILINE)
    found = re.findall(r"^[+ ]\s*jaxpipe train ((?:.*\\\n)*.*)$", shell, re.MULTILINE)
    return [shlex.split(words.replace("\\\n", " ")) for words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_trainer_reads_the_settings_of_the_tutorials(page: Path, tmp_path: Path):
    text = page.read_text()
    files = {"ours/config.yml": {}, "mine.yml": {}}  # the first is written by `jaxpipe convert`
    for block in re.findall(r"```yaml\n# (mine\.yml)\n(.*?)```", text, re.DOTALL):
        files[block[0]] = yaml.safe_load(block[1])
    if "--write plan.yml" in text:
        plans = plan("llama2-7b", "v5p-8", 48, 2048, ici_fsdp_parallelism=4, num_plans=1)
        files["plan.yml"] = yaml.safe_load(plans.yaml())
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(yaml.safe_dump(content))
    for words in commands(text):
        if words == ["--keys"]:
            continue
        given, settings = split_settings(words)
        assert {*given} <= {*files} and all("=" in word for word in settings), words
        given = [tmp_path / file for file in given]
        load_config(given, settings, presets=PRESETS)


def test_the_tutorials_have_commands():
    assert sum(len(commands(page.read_text())) for page in PAGES) >= 4
