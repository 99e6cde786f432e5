"""Faults that come while a command runs: a disk that fills or fails, data that vanish, a signal.

`FAULTS` has them all. The commands that they hit are sound, and run in the folder of `write_world`
with `data.bin` beside it; a run writes to `out/run`.
"""

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RUN, DATA = Path("out/run"), Path("data.bin")
SMALL = (
    *("dtype=float32", "base_emb_dim=16", "base_mlp_dim=32", "max_target_length=16", "steps=6"),
    *("num_pipeline_microbatches=4", "ici_fsdp_parallelism=1", "enable_tensorboard=false"),
    *("base_num_decoder_layers=2", "vocab_size=64", "checkpoint_period=2", "run_name=run"),
    *("dataset_type=tokens", f"data_files={DATA}", "token_eod=7", "output_dir=out"),
    *("jax_cache_dir=cache", "enable_progress_bar=false"),
)
TWO_DEVICES = ("emulate_devices=2", "per_device_batch_size=4", "ici_pipeline_parallelism=2")
RUNS = (
    ("train", *SMALL, "per_device_batch_size=8"),
    ("train", *SMALL, *TWO_DEVICES),
    ("train", *SMALL, *TWO_DEVICES, "pipeline_engine=scheduled", "pipeline_schedule=1f1b"),
    ("train", *SMALL, *TWO_DEVICES, "pipeline_engine=mpmd", "pipeline_schedule=1f1b"),
)
"""Runs of six steps, with each engine. They save after every second step."""

WRITERS = (
    ("convert", "sound/llama2", "new"),
    ("convert", "sound/llama2_ours", "new"),
    ("convert", "sound/deepseek_v3", "new"),
    ("tokenize", "new.bin", "dataset_type=text", "data_files=sound/a.txt"),
    ("report", "sound/run", "--output=new.html"),
    ("schedule", "export", "zbv", "--ranks=2", "--microbatches=4", "--csv=new.csv"),
    ("schedule", "show", "zbv", "--ranks=2", "--microbatches=4", "--svg=new.svg"),
    ("schedule", "show", "zbv", "--ranks=2", "--microbatches=4", "--trace=new.json"),
)
"""Commands that write something else, in less than a second each."""


@dataclass(frozen=True)
class FaultyCase:
    """A sound command, and what goes wrong while it runs.

    Attributes:
        words: The command's words.
        fault: The name of the fault, a key of `FAULTS`.
        at: When it comes: before this step of a run. Of a command that is no run: the number of
            bytes that a file can have, or of calls of `fsync` that work.
    """

    words: tuple[str, ...]
    fault: str
    at: int


def all_faulty_cases() -> list[FaultyCase]:
    """Returns every combination of a command, a fault and a time."""

    def made() -> Iterator[FaultyCase]:
        for words in WRITERS:
            yield from (FaultyCase(words, "full disk", n) for n in (0, 1, 50, 4000, 20_000))
            yield from (FaultyCase(words, "failing disk", n) for n in (0, 1, 3))
        for words in RUNS:
            yield from (FaultyCase(words, fault, n) for fault in FAULTS for n in range(1, 7))

    return list(made())


def arrange(fault: str, at: int, *, in_a_run: bool) -> None:
    """Makes a fault come in this process.

    Args:
        fault: Its name.
        at: As in `FaultyCase`.
        in_a_run: Whether it waits for a step of a run.
    """
    if not in_a_run:
        _full_disk(at) if fault == "full disk" else _failing_disk(at)
        return
    from jaxpipe.train.loop import _steps

    shard_batch, steps = _steps.shard_batch_of_step, 0

    def shard_batch_and_fail(*args: object, **named: object) -> object:
        nonlocal steps
        steps += 1
        if steps == at:
            FAULTS[fault]()
        return shard_batch(*args, **named)  # pyright: ignore[reportArgumentType]

    _steps.shard_batch_of_step = shard_batch_and_fail  # pyright: ignore[reportAttributeAccessIssue]


def _full_disk(num_bytes: int = 0) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def _failing_disk(num_calls: int = 0) -> None:
    fsync, calls = os.fsync, 0

    def fail(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > num_calls:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    os.fsync = fail


def _instead_of(path: Path, make: Callable[[Path], object] | None) -> Callable[[], None]:
    """Returns what removes a file or folder, and makes something else of its name."""

    def act() -> None:
        while path.is_dir():
            with suppress(OSError):  # a checkpoint is being written: its files come and go
                shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if make is not None:
            make(path)

    return act


def _damage_newest_checkpoint() -> None:
    steps = sorted(int(s.name) for s in (RUN / "checkpoints").iterdir() if s.name.isdigit())
    files = [f for s in steps[-1:] for f in (RUN / "checkpoints" / str(s)).rglob("*")]
    for file in [file for file in files if file.is_file()]:
        file.write_bytes(file.read_bytes()[::-1])


def _damage_metrics() -> None:
    with (RUN / "metrics.jsonl").open("r+b") as file:
        file.write(b"\0" * 10)


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], None]] = {
    "full disk": _full_disk,
    "failing disk": _failing_disk,
    "data removed": _instead_of(DATA, None),
    "data truncated": lambda: os.truncate(DATA, 10),
    "data are a folder": _instead_of(DATA, Path.mkdir),
    "run removed": _instead_of(RUN, None),
    "run is a file": _instead_of(RUN, Path.touch),
    "checkpoints removed": _instead_of(RUN / "checkpoints", None),
    "checkpoints are a file": _instead_of(RUN / "checkpoints", Path.touch),
    "newest checkpoint damaged": _damage_newest_checkpoint,
    "metrics damaged": _damage_metrics,
    "SIGINT": _signal(signal.SIGINT),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGHUP": _signal(signal.SIGHUP),
    "SIGKILL": _signal(signal.SIGKILL),
}

REFUSED_AFTERWARDS = {
    "run removed",  # a save that was on its way has made a part of it anew
    "run is a file",
    "checkpoints removed",
    "checkpoints are a file",
    "metrics damaged",
}
"""Faults after which the next start may be refused: it says what to do about them."""


def expected_codes(case: FaultyCase) -> set[int]:
    """Returns the exit codes that a command may have: 1, or 0 if the fault has not hit it."""
    if case.fault == "SIGKILL":
        return {-signal.SIGKILL}
    if case.fault.startswith("SIG"):
        return {0, 128 + signal.Signals[case.fault]}
    return {0, 1}
