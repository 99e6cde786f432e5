"""A run's folder is harmed in many ways: the run goes on with the losses of one that never was, or
is refused with one line that names a file, and then nothing has changed."""

import errno
import io
import json
import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpipe.train import Config, RunError, read_metrics, train

from .runs import NONE, TINY

SAVED, STEPS, PERIOD = 7, 9, 2  # saved: 2, 4, 6 and, as the run is stopped there, 7

Harm = Callable[[Path], object]
"""Does something to the folder of a run."""


def run_to(folder: Path, steps: int, **settings) -> str:
    """What the run says; its losses are in its metrics."""
    base = TINY | NONE | {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1.0}
    base |= {"learning_rate_schedule_steps": STEPS, "checkpoint_period": PERIOD}
    base |= {"num_pipeline_microbatches": 1, "base_num_decoder_layers": 2, "max_to_keep": 3}
    shown = io.StringIO()
    config = base | {"steps": steps, "output_dir": str(folder)} | settings
    train(Config.model_validate(config), stream=shown)
    return shown.getvalue()


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = read_metrics(folder / "default" / "metrics.jsonl")
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def whole(cached, tmp_path_factory) -> tuple[Path, list[tuple[int, float]]]:
    """A run that has stopped before its end, and the losses of one that has not."""
    folder = tmp_path_factory.mktemp("whole")
    run_to(folder / "all", STEPS)
    run_to(folder / "part", SAVED)
    return folder / "part", losses(folder / "all")


def content_of(folder: Path) -> dict[str, bytes | str | None]:
    """Every file, link and folder but the lock, which says who looked last."""
    found: dict[str, bytes | str | None] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.name != "lock":
            found[str(path)] = path.read_bytes() if path.is_file() else None
    return found


def outcome(whole: tuple[Path, list[tuple[int, float]]], folder: Path, harm: Harm) -> str:
    """What became of a copy of the run that was harmed and started again."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole[0], folder)
    harm(folder / "default")
    before = content_of(folder)
    try:
        said = run_to(folder, STEPS)
    except (ValueError, RunError) as error:
        line = str(error)
        assert "\n" not in line and str(folder / "default") in line, line
        assert content_of(folder) == before, line
        return "unreadable, refused" if "cannot be read" in line else "refused"
    assert losses(folder) == whole[1]
    names = os.listdir(folder / "default" / "checkpoints")
    assert sum(".damaged" in x or ".incomplete" in x for x in names) == said.count(" is corrupt: ")
    (resumed,) = [int(line.split()[-1]) for line in said.splitlines() if "resumed after" in line]
    kept = "from the newest checkpoint" if resumed == SAVED else "from an older checkpoint"
    return f"went on {kept}{', and said so' if 'corrupt' in said or 'Removed' in said else ''}"


def files_of(run: Path) -> list[Path]:
    return sorted(file for file in run.rglob("*") if file.is_file())


def flip_a_bit(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content) + 1)])


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


def append(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def zero_a_block(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice([1, 16, 512, 4096]))
    content[start:end] = bytes(end - start)
    file.write_bytes(content)


def swap_with_another(file: Path, rng: random.Random) -> None:
    run = next(folder for folder in file.parents if folder.name == "default")
    other = rng.choice(files_of(run))
    content = other.read_bytes()
    other.write_bytes(file.read_bytes())
    file.write_bytes(content)


RANDOM = (flip_a_bit, truncate, delete, append, zero_a_block, swap_with_another)


def at_random(seed: int) -> Harm:
    """One of them, to a file of any kind: most are of arrays, and few beside checkpoints."""

    def harm(run: Path) -> None:
        rng = random.Random(seed)
        files = files_of(run)
        if rng.random() < 0.3:
            files = [file for file in files if file.parent == run]
        rng.choice(RANDOM)(rng.choice(files), rng)

    return harm


def counted(found: list[str], what: str) -> None:
    print(f"\n{len(found)} {what}:")
    for name, count in Counter(found).most_common():
        print(f"  {count:4} {name}")


@pytest.mark.slow
def test_two_hundred_random_corruptions_give_no_wrong_number(whole, tmp_path):
    found = [outcome(whole, tmp_path / "run", at_random(seed)) for seed in range(200)]
    counted(found, "random corruptions")


def in_checkpoints(harm: Harm) -> Harm:
    return lambda run: harm(run / "checkpoints")


def renaming(old: str, new: str) -> Harm:
    return in_checkpoints(lambda steps: (steps / old).rename(steps / new))


def copying(old: str, new: str) -> Harm:
    def harm(steps: Path) -> None:
        shutil.rmtree(steps / new, ignore_errors=True)
        shutil.copytree(steps / old, steps / new)

    return in_checkpoints(harm)


def swapping(one: str, other: str) -> Harm:
    def harm(run: Path) -> None:
        (run / one).rename(run / "swapped")
        (run / other).rename(run / one)
        (run / "swapped").rename(run / other)

    return harm


def writing(name: str, content: bytes) -> Harm:
    return lambda run: (run / name).write_bytes(content)


def removing(name: str) -> Harm:
    def harm(run: Path) -> None:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return harm


def folder_in_place_of(name: str) -> Harm:
    def harm(run: Path) -> None:
        removing(name)(run)
        (run / name).mkdir()

    return harm


def file_in_place_of(name: str) -> Harm:
    def harm(run: Path) -> None:
        removing(name)(run)
        (run / name).touch()

    return harm


def link_in_place_of(name: str, target: str) -> Harm:
    def harm(run: Path) -> None:
        removing(name)(run)
        (run / name).symlink_to(target)

    return harm


def pipe_in_place_of(name: str) -> Harm:
    def harm(run: Path) -> None:
        removing(name)(run)
        os.mkfifo(run / name)

    return harm


def both(*harms: Harm) -> Harm:
    def harm(run: Path) -> None:
        for each in harms:
            each(run)

    return harm


def editing(name: str, edit: Callable[[bytes], bytes]) -> Harm:
    return lambda run: (run / name).write_bytes(edit((run / name).read_bytes()))


NEWEST = f"checkpoints/{SAVED}"
DIGESTS = f"{NEWEST}/digests.json"
DIRECTED: dict[str, Harm] = {
    "renamed to a later step": renaming("7", "10"),
    "renamed to the last step": renaming("7", "9"),
    "an older one renamed to a later step": renaming("6", "10"),
    "renamed over a gap": renaming("6", "5"),
    "renamed with a zero in front": renaming("7", "07"),
    "renamed to no step": renaming("7", "seven"),
    "copied to a later step": copying("6", "10"),
    "copied over the newest": copying("6", "7"),
    "copied over an older one": copying("7", "6"),
    "copied with a zero in front": copying("6", "010"),
    "copied to another name": copying("7", "7.backup"),
    "swapped with an older one": swapping("checkpoints/6", "checkpoints/7"),
    "two older ones swapped": swapping("checkpoints/4", "checkpoints/6"),
    "states swapped": swapping("checkpoints/6/state", "checkpoints/7/state"),
    "metadata swapped": swapping("checkpoints/6/metadata", "checkpoints/7/metadata"),
    "digests swapped": swapping("checkpoints/6/digests.json", DIGESTS),
    "markers swapped": swapping(
        "checkpoints/6/_CHECKPOINT_METADATA", f"{NEWEST}/_CHECKPOINT_METADATA"
    ),
    "metrics and starts swapped": swapping("metrics.jsonl", "starts.jsonl"),
    "no digests": removing(DIGESTS),
    "empty digests": writing(DIGESTS, b""),
    "digests of nothing": writing(DIGESTS, b"{}"),
    "digests cut off": editing(DIGESTS, lambda text: text[: len(text) // 2]),
    "digests of zeros": editing(DIGESTS, lambda text: bytes(len(text))),
    "digests that are a list": writing(DIGESTS, b"[1, 2]"),
    "digests nested deep": writing(DIGESTS, b"[" * 100_000),
    "digests of another step": editing(DIGESTS, lambda t: t.replace(b'"step": 7', b'"step": 8')),
    "digests without a file": editing(
        DIGESTS,
        lambda text: json.dumps(
            {k: v for k, v in json.loads(text).items() if k != "files"} | {"files": {}}
        ).encode(),
    ),
    "digests that are a folder": folder_in_place_of(DIGESTS),
    "digests that are a pipe": pipe_in_place_of(DIGESTS),
    "digests that are a link into nothing": link_in_place_of(DIGESTS, "nowhere"),
    "no digests in an older one": removing("checkpoints/6/digests.json"),
    "no digests in two": both(removing(DIGESTS), removing("checkpoints/6/digests.json")),
    "no marker": removing(f"{NEWEST}/_CHECKPOINT_METADATA"),
    "an empty marker": writing(f"{NEWEST}/_CHECKPOINT_METADATA", b""),
    "an empty marker in an older one": writing("checkpoints/6/_CHECKPOINT_METADATA", b""),
    "no marker and no digests": both(removing(f"{NEWEST}/_CHECKPOINT_METADATA"), removing(DIGESTS)),
    "no state": removing(f"{NEWEST}/state"),
    "no metadata": removing(f"{NEWEST}/metadata"),
    "no metadata in an older one": removing("checkpoints/4/metadata"),
    "a state that is a file": file_in_place_of(f"{NEWEST}/state"),
    "an empty step": both(removing(NEWEST), lambda run: (run / NEWEST).mkdir()),
    "a step that is a file": file_in_place_of(NEWEST),
    "a step that is a link to another": link_in_place_of(NEWEST, "6"),
    "a step that is a link into nothing": link_in_place_of(NEWEST, "nowhere"),
    "a step that is a link to itself": link_in_place_of(NEWEST, "7"),
    "a file too many": writing(f"{NEWEST}/state/more", b"more"),
    "metrics that orbax would read": lambda run: (
        (
            (run / NEWEST / "metrics").mkdir(),
            (run / NEWEST / "metrics" / "metrics").write_text("{"),
        )
    ),
    "a future step that is empty": lambda run: (run / "checkpoints" / "99").mkdir(),
    "a huge step": lambda run: (run / "checkpoints" / ("9" * 30)).mkdir(),
    "no newest checkpoint": removing(NEWEST),
    "no checkpoints": removing("checkpoints"),
    "an empty folder of checkpoints": folder_in_place_of("checkpoints"),
    "checkpoints that are a file": file_in_place_of("checkpoints"),
    "checkpoints that are a link into nothing": link_in_place_of("checkpoints", "nowhere"),
    "all checkpoints corrupt": lambda run: (
        [(step / "state" / "manifest.ocdbt").unlink() for step in (run / "checkpoints").iterdir()]
    ),
    "no checkpoints and no record of them": both(removing("checkpoints"), removing("saved.json")),
    "no record of what was saved": removing("saved.json"),
    "a record of another step": writing("saved.json", b'{"newest_step": 99}'),
    "no metrics": removing("metrics.jsonl"),
    "metrics of zeros": editing("metrics.jsonl", lambda text: bytes(len(text))),
    "metrics cut off in a line": editing("metrics.jsonl", lambda text: text[:-30]),
    "a torn line behind the metrics": editing("metrics.jsonl", lambda t: t + b'{"step": 8, "lo'),
    "zeros behind the metrics": editing("metrics.jsonl", lambda text: text + bytes(5000) + b"\n"),
    "another step behind the metrics": editing("metrics.jsonl", lambda t: t + b'{"step": 8}\n'),
    "another loss": editing("metrics.jsonl", lambda t: t.replace(b'"loss": 4', b'"loss": 5', 1)),
    "metrics that are a folder": folder_in_place_of("metrics.jsonl"),
    "metrics that are a pipe": pipe_in_place_of("metrics.jsonl"),
    "metrics that are a link into nothing": link_in_place_of("metrics.jsonl", "nowhere"),
    "starts cut off": editing("starts.jsonl", lambda text: text[:20]),
    "starts that are a folder": folder_in_place_of("starts.jsonl"),
    "a line behind the starts": editing("starts.jsonl", lambda t: t + b"oh\n"),
    "a torn line behind the starts": editing("starts.jsonl", lambda t: t + b'{"first'),
    "a config that is no YAML": writing("config.yml", b"{[\0"),
    "no config": removing("config.yml"),
    "a config that is a folder": folder_in_place_of("config.yml"),
    "a lock that is a link": link_in_place_of("lock", "metrics.jsonl"),
    "a lock that is a folder": folder_in_place_of("lock"),
    "what a kill leaves of a save": copying("7", "8.unsealed.orbax-checkpoint-tmp"),
    "what a kill leaves before the name": copying("7", "8.unsealed"),
    "what a kill leaves of a removal": copying("4", ".removed/2"),
    "what an older version leaves of a removal": copying("4", "2.incomplete"),
}


@pytest.mark.slow
def test_every_directed_corruption_gives_no_wrong_number(whole, tmp_path):
    found = {name: outcome(whole, tmp_path / "run", harm) for name, harm in DIRECTED.items()}
    counted([*found.values()], "directed corruptions")
    for name, what in found.items():
        print(f"  {name}: {what}")


UNREADABLE = (
    ".",
    "checkpoints",
    NEWEST,
    DIGESTS,
    f"{NEWEST}/state",
    f"{NEWEST}/state/_METADATA",
    f"{NEWEST}/state/manifest.ocdbt",
    f"{NEWEST}/metadata",
    f"{NEWEST}/metadata/metadata",
    f"{NEWEST}/_CHECKPOINT_METADATA",
    "checkpoints/6",
    "checkpoints/6/_CHECKPOINT_METADATA",
    "metrics.jsonl",
    "starts.jsonl",
)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the run becomes another user")
def test_what_another_user_may_not_read_is_refused_and_stays(whole):
    """As a restart by a user without the right to read everything."""
    import tempfile

    found = {}
    for name in UNREADABLE:
        # pytest's own folders are closed to all others
        with tempfile.TemporaryDirectory() as parent:
            os.chmod(parent, 0o755)
            folder = Path(parent) / "run"

            def harm(run: Path, name: str = name) -> None:
                for path in [run.parent, run, *run.rglob("*")]:
                    os.chown(path, 65534, 65534)
                os.chmod(run / name, 0)

            shutil.copytree(whole[0], folder)
            harm(folder / "default")
            before, modes = (
                content_of(folder),
                stat.S_IMODE((folder / "default" / name).stat().st_mode),
            )
            os.seteuid(65534)
            try:
                with pytest.raises((ValueError, RunError)) as error:
                    run_to(folder, STEPS)
            finally:
                os.seteuid(0)
            said = str(error.value)
            assert os.strerror(errno.EACCES) in said and "\n" not in said, said
            assert str(folder / "default" / name) in said or name == ".", said
            assert content_of(folder) == before and modes == 0
            found[name] = said
    counted(["unreadable, refused"] * len(found), "files and folders without permission")
