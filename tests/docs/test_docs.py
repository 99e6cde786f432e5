"""What the documents say is run: Python of the README, and the sessions in docs/."""

import doctest
import re
import shlex
from pathlib import Path

import jax
import pytest

from jaxpipe.cli import main
from jaxpipe.models import PRESETS
from jaxpipe.train import load_config, set_up

ROOT = Path(__file__).parents[2]
PAGES = [p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "dev"]


def test_the_code_in_the_readme_runs_and_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len(blocks[0].splitlines()) < 20
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(blocks[0], "README.md", "exec"), names)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "leaf",
        "loss",
        "gradients['embed']",
        "gradients['head']",
        "gradients['layers']",
        "reference:",
    ]
    drawn = (tmp_path / "pipeline.svg").read_text()
    assert drawn == (ROOT / "docs" / "pipeline.svg").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT / "docs")))
def test_sessions_in_the_docs_print_what_they_show(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


def test_links_in_the_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_and_functions_that_the_architecture_names_exist():
    """A file without a folder is in that of the file before; a function is in that file."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    folder = file = ROOT / "jaxpipe"
    found = set()
    for name, call in re.findall(r"`([\w/]+\.py)`(?:: `(\w+)`)?", text.split("## One micro")[1]):
        file = ROOT / "jaxpipe" / name if "/" in name else folder / name
        folder = file.parent
        assert file.exists(), name
        assert not call or re.search(rf"^def {call}\(", file.read_text(), re.MULTILINE), call
        found |= {name, call}
    assert len(found) > 40


def reads(engine: str, setting: str) -> bool:
    settings = ["model_name=llama-tiny", f"pipeline_engine={engine}", setting]
    try:
        load_config([], settings, presets=PRESETS)
    except ValueError as error:
        assert f"`pipeline_engine` is {engine!r} and `{setting.split('=')[0]}`" in str(error)
        return False
    return True


def test_engines_read_the_settings_that_the_page_about_engines_says():
    table = (ROOT / "docs" / "which_engine.md").read_text().split("settings does each of them")[1]
    rows = [line.replace("\\|", "!") for line in table.splitlines() if line.startswith("|")]
    engines, _, *settings = [[cell.strip(" `") for cell in row.split("|")[2:-1]] for row in rows]
    names = [row.split("|")[1].strip(" `").replace("!", "|") for row in rows[2:]]
    assert len(names) == 14
    for name, answers in zip(names, settings, strict=True):
        said = dict(zip(engines, answers, strict=True))
        assert said == {e: "yes" if reads(e, name) else "no" for e in engines}, name


def test_the_table_of_folders_names_every_folder_and_no_other():
    table = (ROOT / "docs" / "architecture.md").read_text().split("| folder |")[1].split("\n\n")[0]
    named = set()
    for row in table.splitlines()[2:]:
        tops, contents = (re.findall(r"`([a-z_/]+)/`", cell) for cell in row.split("|")[1:3])
        named |= {*tops, *(f"{tops[0]}/{inner}" for inner in contents)}
    package = ROOT / "jaxpipe"
    inits = (init.parent.relative_to(package) for init in package.glob("*/**/__init__.py"))
    assert named == {str(folder) for folder in inits}


def test_the_runs_for_clusters_can_be_planned(capsys):
    text = (ROOT / "docs" / "clusters.md").read_text()
    launch = text.split("## A job for SLURM")[1].split("```")[1].split("jaxpipe ")[1]
    words = shlex.split(launch.split(">")[0].replace("\\\n", " "))
    assert words[:2] == ["launch", "--print"] and main(words) == 0
    assert "#SBATCH --nodes=4\n" in capsys.readouterr().out
    pods = text.split("## TPU pods")[1].split("```")[1].split("jaxpipe train")[1]
    settings = re.findall(r"(\b[a-z_]+=[^\s\"]+)", pods)
    setup = set_up(load_config([], settings, presets=PRESETS), jax.devices()[:8])
    assert (setup.mesh.size, setup.mesh.shape["stage"]) == (8, 2)
