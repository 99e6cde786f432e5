"""Programs that tests read are HLO: XLA's own parser reads them, in a process of its own.

The parser ends the process where it fails a check.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parent / "hlo").glob("*.hlo"))
NOT_IN_OPEN_XLA = "tpu7x_sparsecore_call"
"""libtpu gives the operands of a `call-start` to its `call-update`, and open XLA reads none."""

PARSE = """
import sys
from jaxlib import _hlo
print(_hlo.hlo_module_from_text(open(sys.argv[1]).read()).name)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("jaxlib._hlo") is None, reason="this jaxlib exports no parser of HLO"
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_xla_parses(program: Path):
    command = [sys.executable, "-c", PARSE, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if program.stem == NOT_IN_OPEN_XLA:
        assert done.returncode != 0  # once it is read, it is no exception any more
        return
    assert done.returncode == 0, done.stderr[-500:]
    assert program.read_text(encoding="utf-8").startswith(f"HloModule {done.stdout.strip()}")
