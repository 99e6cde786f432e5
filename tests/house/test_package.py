"""What is packaged: one version everywhere, names that type checkers see, a release that runs."""

import ast
import re
import tomllib
from pathlib import Path

import yaml

import jaxpipe

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELEASE = ROOT / ".github" / "workflows" / "release.yml"


def test_a_name_that_a_type_checker_sees_in_the_front_door_is_there():
    tree = ast.parse((ROOT / "jaxpipe" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname for node in imports for alias in node.names if alias.asname}
    assert {"Model", "equinox", "pipeline"} < seen <= set(dir(jaxpipe))
    assert all(getattr(jaxpipe, name) is not None for name in seen)


def test_the_version_is_in_one_place_and_other_files_agree():
    assert PROJECT["project"]["dynamic"] == ["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == jaxpipe.__version__
    newest = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == jaxpipe.__version__


def test_the_release_runs_scripts_that_exist_on_every_python_that_the_package_names():
    text = RELEASE.read_text()
    jobs = yaml.safe_load(text)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = re.findall(r"\.ci/\w+", " ".join(commands))
    assert scripts and all((ROOT / script).stat().st_mode & 0o100 for script in scripts)
    named = re.findall(r":: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert jobs["install"]["strategy"]["matrix"]["python"] == named
    assert "secrets." not in text and jobs["publish"]["permissions"] == {"id-token": "write"}
