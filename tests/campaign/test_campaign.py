"""Every command is given bad input, thousands of times: no traceback, no hang, no full memory.

Cases are generated from the parsers and the keys as they are, so nothing has to be added for a new
command, option or key. `JAXPIPE_CAMPAIGN_CASES` sets how many the slow test runs, all different.

And sound commands meet faults that come while they run; `JAXPIPE_CAMPAIGN_FAULTS` sets how many.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

from .faults import (
    DATA,
    REFUSED_AFTERWARDS,
    RUN,
    RUNS,
    WRITERS,
    FaultyCase,
    all_faulty_cases,
    expected_codes,
)
from .generated import Case, cases, leaves
from .world import realised, write_world

pytestmark = pytest.mark.ci

CODES = {0, 1, 2, 129, 130, 143}
MAX_BYTES, MAX_SECONDS, MAX_SAID = 2 << 30, 60.0, 8000
CASES, MANY_CASES = 200, int(os.environ.get("JAXPIPE_CAMPAIGN_CASES", "5500"))
MANY_FAULTS = int(os.environ.get("JAXPIPE_CAMPAIGN_FAULTS", "150"))
_MAX_SHOWN = 50
TESTS = Path(__file__).parents[1]

Run = Callable[..., dict[str, Any]]
"""Runs the words of a command, and takes its fault as `server.py` does."""
World = tuple[Path, Run]


@contextmanager
def server(folder: Path) -> Iterator[Run]:
    """A function that runs a command in a fork of a process that has imported everything."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": str(folder)}
    paths = (str(TESTS), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    for name in ("XLA_FLAGS", "NPROC"):
        environment.pop(name, None)
    with (
        (folder / "server.txt").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "campaign.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None

        def run(argv: tuple[str, ...], fault: tuple[Any, ...] | None = None) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            job = {"argv": argv, "cwd": str(folder), "fault": fault}
            process.stdin.write(json.dumps(job) + "\n")
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
        f"takes {did['seconds']:.0f} s": min(did["seconds"], did["cpu"]) > MAX_SECONDS,
        f"takes {did['bytes'] >> 20} MiB": did["bytes"] > MAX_BYTES,
        f"says {did['size']} bytes": did["size"] > MAX_SAID,
        "fails without a reason": code in (1, 2) and "error: " not in said,
    }
    return [problem for problem, applies in found.items() if applies]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    """The folder of `write_world`, and what runs commands in it."""
    folder = tmp_path_factory.mktemp("world")
    with server(folder) as run:
        write_world(folder, partial(_succeed, run))
        yield folder, run


def campaign(world: World, num_cases: int) -> str:
    """Runs different cases, and returns a table of exit codes by command."""
    (folder, run), codes, seen = world, Counter[tuple[str, int]](), set[Case]()
    slowest, largest, failures = 0.0, 0, list[str]()

    def attack(case: Case) -> None:
        nonlocal slowest, largest
        if case in seen:
            reject()
        seen.add(case)
        before = {file.name for file in folder.iterdir()}
        for change in case.changes:
            realised(folder, folder, change.name, change.inside, change.change)
        did = run(case.words)
        _remove_all_but(folder, before)
        codes[" ".join(words), did["code"]] += 1
        slowest, largest = max(slowest, did["seconds"]), max(largest, did["bytes"])
        if found := problems(did):
            failures.append(f"{'; '.join(found)}\n{case}\n{did['said'][-3000:]}")

    # What a command with few cases, such as `schedule list`, leaves goes to the others.
    commands = sorted(leaves(), key=lambda leaf: len(leaf[1]._actions))
    for i, (words, parser) in enumerate(commands):
        drawn = given(cases(folder, words, parser))(attack)
        share = -(-(num_cases - len(seen)) // (len(commands) - i))
        _settings(max_examples=share)(seed(20260101)(drawn))()
    table = _table(codes, slowest, largest)
    shown = "\n\n".join(failures[:_MAX_SHOWN])
    assert not failures, f"{len(failures)} cases fail\n{shown}\n{table}"
    return table


_settings = partial(
    settings,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)


def _succeed(run: Run, *argv: str, fault: tuple[Any, ...] | None = None) -> None:
    did = run(argv, fault)
    assert did["code"] == 0, did["said"]


def _remove_all_but(folder: Path, names: set[str]) -> None:
    for file in [file for file in folder.iterdir() if file.name not in names]:
        is_folder = file.is_dir() and not file.is_symlink()
        shutil.rmtree(file) if is_folder else file.unlink()


def campaign_of_faults(world: World, chosen: Sequence[FaultyCase]) -> str:
    """Runs sound commands into faults, and returns a table of exit codes by fault.

    After each fault of a run it starts once more, without any. It must have all losses then.
    """
    (folder, run), codes = world, Counter[tuple[str, int]]()
    slowest, largest, failures = 0.0, 0, list[str]()
    tokens = np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tobytes()
    whole: dict[tuple[str, ...], list[str]] = {}
    (folder / "cache").mkdir(exist_ok=True)
    before = {file.name for file in folder.iterdir()}

    def put_data() -> None:
        _remove_all_but(folder, before | {RUN.parts[0]})
        (folder / DATA).write_bytes(tokens)

    for words in dict.fromkeys(case.words for case in chosen if case.words in RUNS):
        put_data()
        _succeed(run, *words, fault=())
        whole[words] = _losses(folder)
        _remove_all_but(folder, before)
    for case in chosen:
        put_data()
        did = run(case.words, (case.fault, case.at))
        codes[f"{case.words[0]}, {case.fault}", did["code"]] += 1
        slowest, largest = max(slowest, did["seconds"]), max(largest, did["bytes"])
        found = [p for p in problems(did) if did["code"] != -signal.SIGKILL]
        if did["code"] not in expected_codes(case):
            found.append(f"has exit code {did['code']}")
        if case.words in RUNS:
            put_data()
            found += _afterwards(folder, case, run(case.words, ()), whole[case.words])
        if found:
            failures.append(f"{'; '.join(found)}\n{case}\n{did['said'][-3000:]}")
        _remove_all_but(folder, before)
    table = _table(codes, slowest, largest)
    shown = "\n\n".join(failures[:_MAX_SHOWN])
    assert not failures, f"{len(failures)} cases fail\n{shown}\n{table}"
    return table


def _afterwards(folder: Path, case: FaultyCase, did: dict[str, Any], whole: list[str]) -> list[str]:
    """Returns what is wrong with the start after a fault."""
    found = problems(did)
    if did["code"] == 0 and _losses(folder) != whole:
        found.append(f"has the losses {_losses(folder)} and not {whole}")
    if did["code"] != 0 and (did["code"] != 2 or case.fault not in REFUSED_AFTERWARDS):
        found.append(f"has exit code {did['code']}: {did['said'][-1000:]}")
    return [f"afterwards it {problem}" for problem in found]


def _losses(folder: Path) -> list[str]:
    file = folder / RUN / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.dumps([values["step"], values["loss"]]) for values in map(json.loads, lines)]


def _table(codes: Counter[tuple[str, int]], slowest: float, largest: int) -> str:
    names = sorted({name for name, _ in codes})
    found = sorted({code for _, code in codes})
    rows = [("command", *map(str, found)), *(
        (name, *(str(codes[name, code]) for code in found)) for name in names
    )]  # fmt: skip
    lines = [f"{row[0]:20}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows]
    lines.append(f"{codes.total()} cases; slowest {slowest:.1f} s; most {largest >> 20} MiB")
    return "\n".join(lines)


def test_bad_input_of_every_command_is_refused_in_a_few_lines(world):
    print(campaign(world, CASES))


@pytest.mark.slow
def test_thousands_of_bad_inputs_of_every_command_are_refused_in_a_few_lines(world):
    print(campaign(world, MANY_CASES))


def test_faults_that_come_later_end_a_command_with_1_and_a_reason_and_lose_nothing(world):
    writes = [FaultyCase(words, "full disk", 0) for words in WRITERS[1:]]
    fails = [FaultyCase(words, "failing disk", 0) for words in WRITERS[-2:]]
    runs = [FaultyCase(RUNS[0], fault, 4) for fault in ("full disk", "data removed")]
    print(campaign_of_faults(world, [*writes, *fails, *runs]))


@pytest.mark.slow
def test_many_faults_that_come_later_end_a_command_with_1_and_a_reason_and_lose_nothing(world):
    every = all_faulty_cases()
    chosen = random.Random(20260101).sample(every, min(MANY_FAULTS, len(every)))
    print(campaign_of_faults(world, chosen))


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
