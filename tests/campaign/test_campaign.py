"""Every command is given bad input, thousands of times: no traceback, no hang, no full memory.

Cases are generated from the parsers and the keys as they are, so nothing has to be added for a new
command, option or key. `JAXPIPE_CAMPAIGN_CASES` sets how many the slow test runs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from .generated import Case, cases, leaves
from .world import realised, write_world

CODES = {0, 1, 2, 130, 143}
MOST_BYTES, MOST_SECONDS, MOST_SAID = 2 << 30, 60.0, 8000
# A command without options, such as `schedule list`, has few cases: some 5,000 are left.
CASES, MANY_CASES = 200, int(os.environ.get("JAXPIPE_CAMPAIGN_CASES", "5500"))
_MOST_SHOWN = 50
SERVER = Path(__file__).parent / "server.py"

Run = Callable[[tuple[str, ...]], dict[str, Any]]


@contextmanager
def server(folder: Path) -> Iterator[Run]:
    """A function that runs a command in a fork of a process that has imported everything."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": str(folder)}
    for name in ("XLA_FLAGS", "NPROC"):
        environment.pop(name, None)
    with (
        (folder / "server.txt").open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None

        def run(argv: tuple[str, ...]) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps({"argv": argv, "cwd": str(folder)}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, (folder / "server.txt").read_text()
            return json.loads(answer)

        try:
            yield run
        finally:
            process.stdin.close()
            process.wait(timeout=120)


def problems(did: dict[str, Any]) -> list[str]:
    """Returns what is wrong with what a command did."""
    said, code = did["said"], did["code"]
    found = {
        f"has exit code {code}": code not in CODES,
        "shows a traceback": "Traceback (most recent call last)" in said,
        "reaches the last resort": "this is a bug of jaxpipe" in said,
        f"takes {did['seconds']:.0f} s": min(did["seconds"], did["cpu"]) > MOST_SECONDS,
        f"takes {did['bytes'] >> 20} MiB": did["bytes"] > MOST_BYTES,
        f"says {did['size']} bytes": did["size"] > MOST_SAID,
        "fails without a reason": code in (1, 2) and "error: " not in said,
    }
    return [problem for problem, applies in found.items() if applies]


def campaign(folder: Path, num_cases: int) -> str:
    """Runs cases, and returns a table of exit codes by command."""
    codes: Counter[tuple[str, int]] = Counter()
    slowest, largest, failures = 0.0, 0, list[str]()
    with server(folder) as run:

        def succeed(*argv: str) -> None:
            did = run(argv)
            assert did["code"] == 0, did["said"]

        write_world(folder, succeed)

        def attack(case: Case) -> None:
            nonlocal slowest, largest
            before = {file.name for file in folder.iterdir()}
            for change in case.changes:
                realised(folder, folder, change.name, change.inside, change.change)
            did = run(case.words)
            for file in [file for file in folder.iterdir() if file.name not in before]:
                is_folder = file.is_dir() and not file.is_symlink()
                shutil.rmtree(file) if is_folder else file.unlink()
            codes[" ".join(words), did["code"]] += 1
            slowest, largest = max(slowest, did["seconds"]), max(largest, did["bytes"])
            if found := problems(did):
                failures.append(f"{'; '.join(found)}\n{case}\n{did['said'][-3000:]}")

        commands = leaves()
        for words, parser in commands:
            drawn = given(cases(folder, words, parser))(attack)
            _settings(max_examples=-(-num_cases // len(commands)))(seed(20260101)(drawn))()
    table = _table(codes, slowest, largest)
    shown = "\n\n".join(failures[:_MOST_SHOWN])
    assert not failures, f"{len(failures)} cases fail\n{shown}\n{table}"
    return table


_settings = partial(
    settings,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def _table(codes: Counter[tuple[str, int]], slowest: float, largest: int) -> str:
    names = sorted({name for name, _ in codes})
    found = sorted({code for _, code in codes})
    rows = [("command", *map(str, found)), *(
        (name, *(str(codes[name, code]) for code in found)) for name in names
    )]  # fmt: skip
    lines = [f"{row[0]:20}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows]
    lines.append(f"{codes.total()} cases; slowest {slowest:.1f} s; most {largest >> 20} MiB")
    return "\n".join(lines)


def test_bad_input_of_every_command_is_refused_in_a_few_lines(tmp_path):
    print(campaign(tmp_path, CASES))


@pytest.mark.slow
def test_thousands_of_bad_inputs_of_every_command_are_refused_in_a_few_lines(tmp_path):
    print(campaign(tmp_path, MANY_CASES))


def test_every_option_says_what_it_takes():
    """`int` and `float` alone take what no command can use, such as -5 and nan."""
    for words, parser in leaves():
        for action in parser._actions:
            bare = action.type in (int, float, Path) or (
                action.type is None
                and action.nargs != 0
                and not action.choices
                and action.dest != "settings"
                and not isinstance(action, argparse._SubParsersAction)
            )
            assert not bare, (words, action)
