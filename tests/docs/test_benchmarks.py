"""The page of benchmarks is what its script writes, and what is simulated is still so."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
assert spec is not None and spec.loader is not None
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)


def test_nothing_on_the_page_is_typed():
    assert page.PAGE.read_text() == page.page(page.written())


def test_every_section_has_its_command_a_date_and_versions():
    assert {"bubbles"} <= set(page.written())
    for name, result in page.written().items():
        assert re.match(r"\*\d{4}-\d\d-\d\d, jaxpipe [\d.]+, Python 3\.\d+\.\d+", result), name
        for package in page.BENCHMARKS[name].packages:
            assert re.search(rf"^\*.*, {package} [\d.]+.*\*$", result, re.MULTILINE), name


def test_every_script_has_a_section():
    scripts = {file.name for file in (ROOT / "benchmarks").glob("*.py")} - {"page.py"}
    assert scripts == {benchmark.script for benchmark in page.BENCHMARKS.values()}


def test_bubbles_are_those_of_the_page_and_of_the_papers():
    script = [sys.executable, str(ROOT / "benchmarks" / "bubbles.py")]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in page.written()["bubbles"]
    profiles = done.stdout.split("ranks x M")[1].splitlines()[1:]
    for line in profiles:
        percent = re.findall(r"[\d.]+%", line)
        assert len(percent) == 6 and percent[::2] == percent[1::2], line
