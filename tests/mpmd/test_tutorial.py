"""JaxPP's tutorial, run by us: what it prints is what the document shows, and trains as plain JIT.

It runs under the XLA flags of all tests, without fused multiply-add and LLVM's optimizations: so a
program computes the same numbers however it is cut, and weights are compared to the last bit. With
these, the last bits depend on what is compiled together, and Adam makes them larger where gradients
are next to nothing.
"""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
TOLERANCE = 1e-6  # of losses after 6 steps


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("tutorial") / "result.json"
    command = [sys.executable, str(HERE / "tutorial_script.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text("utf-8"))


def shown(tutorial: dict[str, Any], code: str) -> Any:
    """The last expression of the cells with this in them."""
    return [cell["shown"] for cell in tutorial["cells"] if code in cell["code"]]


def printed(tutorial: dict[str, Any]) -> str:
    return "".join(cell["printed"] for cell in tutorial["cells"])


# In [36], [37], [40] and [41] of the document.
LISTS = [
    "fwd_2__0 fwd_2__1 fwd_2__2 bwd_2__0 fwd_2__3 bwd_2__1 bwd_2__2 bwd_2__3",
    "FusedTask(fwd_3__0, bwd_3__0) FusedTask(fwd_3__1, bwd_3__1) FusedTask(fwd_3__2, bwd_3__2) "
    "FusedTask(fwd_3__3, bwd_3__3)",
    "fwd_0__0 fwd_0__1 fwd_0__2 fwd_0__3 fwd_4__0 fwd_4__1 fwd_4__2 fwd_4__3 "
    "bwd_4__0 bwd_4__1 bwd_4__2 bwd_4__3 bwd_0__0 bwd_0__1 bwd_0__2 bwd_0__3",
    "fwd_3__0 fwd_3__1 fwd_3__2 fwd_3__3 FusedTask(fwd_7__0, bwd_7__0) "
    "FusedTask(fwd_7__1, bwd_7__1) FusedTask(fwd_7__2, bwd_7__2) FusedTask(fwd_7__3, bwd_7__3) "
    "bwd_3__0 bwd_3__1 bwd_3__2 bwd_3__3",
]


@pytest.mark.slow
def test_its_lists_of_tasks_are_those_of_the_document(tutorial: dict[str, Any]):
    assert [" ".join(tasks) for tasks in shown(tutorial, ".tasks(NUM_MB)")] == LISTS


@pytest.mark.slow
def test_its_print_of_the_program_begins_with_the_first_forward(tutorial: dict[str, Any]):
    """Ten lines before `task_name=fwd_0` and fifty from there on, as in In [39]."""
    (text,) = [c["printed"] for c in tutorial["cells"] if "jaxpr_lines[idx - 10" in c["code"]]
    lines = text.splitlines()
    assert len(lines) == 60
    assert lines[10].strip() == "task_name=fwd_0__0"
    names = re.findall(r"task_name=(\S+)", text)
    assert names[:5] == ["start", "fwd_0__0", "fwd_0__1", "fwd_0__2", "fwd_0__3"]
    for line in ("task_info=(0, F, 0)", "mpmd_idx=0", "donate_invars=(False, False,"):
        assert line in text
    assert "_ = delete[mpmd_idx=0]" in text


@pytest.mark.slow
def test_its_mesh_and_arrays_print_as_in_the_document(tutorial: dict[str, Any]):
    (mesh,) = [m for m in shown(tutorial, "MpmdMesh(mesh") if m is not None]
    assert "mpmd_axis_name='stage'" in mesh
    text = printed(tutorial)
    assert re.findall(r"layer_\d MpmdArray\(.*mpmd_idxs=\((\d),\)", text) == [*"00112233"]
    # The document has no value here.
    assert re.search(
        r"^MpmdArray\(\d+, dtype=int32, mpmd_idxs=\(0, 1, 2, 3\)\)$", text, re.MULTILINE
    )
    assert "sharding=NamedSharding(mesh=Mesh('stage': 1, 'fsdp': 1, axis_types=" in text
    interleaved = re.findall(r"^MpmdArray\(.*mpmd_idxs=\((\d),\)", text, re.MULTILINE)
    assert interleaved == [*"01230123"]


@pytest.mark.slow
def test_its_losses_are_those_of_plain_jit(tutorial: dict[str, Any]):
    """Of the pipelined runs. The document's first run, over fsdp, sums in another order."""
    losses = [float(x) for x in re.findall(r"Final training loss: (\S+)", printed(tutorial))]
    assert len(losses) == 3
    for loss in losses[1:]:
        assert abs(loss - tutorial["loss"]) <= TOLERANCE * tutorial["loss"]


@pytest.mark.slow
def test_interleaved_stages_make_the_same_parameters_to_the_last_bit(tutorial: dict[str, Any]):
    assert len(tutorial["interleaved_is_staged"]) == 8 * 16
    assert all(tutorial["interleaved_is_staged"])


@pytest.mark.slow
def test_plain_jit_on_one_device_makes_the_same_parameters_to_the_last_bit(
    tutorial: dict[str, Any],
):
    assert all(tutorial["staged_is_plain"])


@pytest.mark.slow
def test_it_writes_into_a_temporary_folder_only(tutorial: dict[str, Any]):
    folder = Path(tutorial["folder"])
    assert not folder.is_relative_to(EXAMPLES.parent)
    assert (folder / "tutorial-trace").is_dir()


def test_the_notebook_is_made_of_the_file():
    """python examples/to_notebook.py examples/mpmd_tutorial.py"""
    to_json = runpy.run_path(str(EXAMPLES / "to_notebook.py"))["to_json"]
    source = (EXAMPLES / "mpmd_tutorial.py").read_text("utf-8")
    text = (EXAMPLES / "mpmd_tutorial.ipynb").read_text("utf-8")
    assert text == to_json(source)
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    code = [c["source"] for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(f"# %%\n{''.join(lines)}\n" in source for lines in code)
