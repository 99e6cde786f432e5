"""CITATION.cff, CONTRIBUTING.md and docs/compatibility.md agree with pyproject and Makefile."""

import re
import tomllib
from pathlib import Path

import yaml

import jaxpipe

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_has_the_name_version_and_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["title"] == PROJECT["name"]
    assert citation["version"] == jaxpipe.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["keywords"] == PROJECT["keywords"]


def test_the_versions_that_the_policy_names_are_those_of_the_package():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    needed = dict(
        re.split(r">=", requirement)
        for requirement in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["flax"]]
    )
    python = PROJECT["requires-python"].removeprefix(">=")
    assert f"| Python | {python} or newer |" in page
    assert f"| jax | {needed['jax']} or newer |" in page
    assert f"| flax | {needed['flax']} or newer |" in page
    assert f"| numpy, jaxtyping | {needed['numpy']}, {needed['jaxtyping']} or newer |" in page


def test_the_makefile_has_the_targets_that_contributors_are_told():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    told = set(re.findall(r"`make ([a-z-]+)`", text))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert told and told <= set(targets)
