"""The files of the campaign: sound ones, hostile ones, and sound ones with one thing changed."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

GOLDEN = Path(__file__).parents[1] / "train" / "golden"

# Words of attacks, put into texts. Each is bytes.
NEEDLES = (
    *(b"", b"\0", b"\xff\xfe", b"\xf0\x9f\x92\xa9", b"\r", b"\x1b[2J", b"\n\n", b'"', b"'", b"\\"),
    *(b"NaN", b"-1", b"0", b"1e999", b"1" * 5000, b"99999999999", b"1.5", b"true", b"null", b"[]"),
    *(b"[" * 5000, b'{"a":' * 5000, b"a" * 200_000, b"\\ud800", b"{}", b"- " * 3000, b"&a [*a]"),
    *(b"!!python/object:os.system x", b"!!timestamp x", b"? [a]\n", b"<<: *b", b",,,,", b"s3F9"),
)


def write_world(folder: Path, run: Callable[..., None]) -> None:
    """Writes `sound` and `hostile` into a folder.

    Args:
        folder: An empty one.
        run: Runs a command of jaxpipe in it, which must succeed.
    """
    sound, hostile = folder / "sound", folder / "hostile"
    sound.mkdir()
    hostile.mkdir()
    _write_texts(sound)
    _write_tables(sound)
    _write_tokenizer(sound / "tokenizer.json")
    np.arange(64, dtype=np.uint16).tofile(sound / "ids.bin")
    np.save(sound / "ids.npy", np.arange(64, dtype=np.int32))
    for name in ("llama2", "deepseek_v3"):
        (sound / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(GOLDEN / name / file, sound / name / file)
        run("convert", f"sound/{name}", f"sound/{name}_ours")
    run("schedule", "export", "zbv", "--ranks", "2", "--microbatches", "4", "--csv", "sound/s.csv")
    _write_run(sound / "run", sound / "llama2_ours")
    _write_hostile(hostile)


def _write_texts(folder: Path) -> None:
    (folder / "a.txt").write_text("one\n\n\ntwo\n\n\nthree " * 20)
    lines = [json.dumps({"text": f"document {n}", "id": n}) for n in range(8)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"steps": 3, "base_emb_dim": 16, "learning_rate": 1e-3, "data_files": ["a", "b"]}
    (folder / "a.yml").write_text(yaml.safe_dump(settings))


def _write_tables(folder: Path) -> None:
    import pyarrow
    from pyarrow import feather, parquet

    table = pyarrow.table({"text": [f"document {n}" for n in range(8)], "id": list(range(8))})
    parquet.write_table(table, folder / "a.parquet")
    feather.write_feather(table, str(folder / "a.arrow"))


def _write_tokenizer(file: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "</s>": 1, "one": 2, "document": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(file))


def _write_run(folder: Path, converted: Path) -> None:
    """A run of four steps, whose checkpoint is of the converted model."""
    from jaxpipe.train import Config

    folder.mkdir()
    settings = yaml.safe_load((converted / "config.yml").read_text())
    config = Config(**settings | {"steps": 9, "ici_fsdp_parallelism": 1, "run_name": "run"})
    (folder / "config.yml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    lines = [json.dumps({"step": n, "loss": 1 / n, "step_time_seconds": 0.1}) for n in range(1, 5)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    start = {"first_step": 1, "time": "2030-01-01T00:00:00+00:00", "num_devices": 1}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    shutil.copytree(converted / "weights", folder / "checkpoints")
    event = {"name": "0F0", "ph": "X", "pid": 0, "ts": 0.0, "dur": 5.0}
    of_rank = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0, measured"}}
    (folder / "trace_3.json").write_text(json.dumps({"traceEvents": [of_rank, event]}))


def _write_hostile(folder: Path) -> None:
    (folder / "folder").mkdir()
    (folder / "folder.csv").mkdir()
    (folder / "folder.yml").mkdir()
    os.symlink("loop", folder / "loop")
    os.symlink("loop.yml", folder / "loop.yml")
    os.symlink("nowhere", folder / "broken")
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "fifo.yml")
    for name in ("zero", "full", "null", "stdin"):
        os.symlink(f"/dev/{name}", folder / name)
    os.symlink("/dev/zero", folder / "zero.yml")
    os.symlink("/dev/zero", folder / "zero.csv")
    for name in ("sparse", "sparse.yml", "sparse.csv", "sparse.json"):
        with (folder / name).open("wb") as file:
            file.truncate(1 << 40)
    for name, content in _contents().items():
        (folder / name).write_bytes(content)


def _contents() -> dict[str, bytes]:
    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    return {
        "empty": b"",
        "nul": b"\0" * 100,
        "latin.csv": b"0F0,0B0 # \xe9\n",
        "latin.yml": b"steps: 3 # \xe9\n",
        "wide.csv": b"0F0," + b"x" * 300_000,
        "ranks.csv": b"0F0,0B0\n" * 1_000_000,
        "numbers.csv": b"999999F9999999,0F0\n",
        "slices.csv": b"0F0s99999999,0B0s0\n",
        "backwards.csv": b"".join(b"%dF0,%dB0\n" % (n, n) for n in reversed(range(2000))),
        "laughs.yml": laughs.encode() + b"data_files: *a11\n",
        "deep.yml": b"steps: " + b"[" * 3000,
        "long.yml": b"data_files: [" + b"1," * 100_000 + b"]",
        "keys.yml": b"".join(b"k%d: 1\n" % n for n in range(20_000)),
        "giant.yml": b"run_name: " + b"x" * 900_000,
        "deep.json": b"[" * 100_000,
        "wide.json": b"[" + b"[]," * 100_000 + b"[]]",
        "deep.jsonl": b'{"text": ' + b"[" * 100_000 + b"\n",
        "number.jsonl": b'{"text": "a", "n": ' + b"1" * 10_000 + b"}\n",
    }


def mutated(data: bytes, seed: int) -> bytes:
    """Returns a content with one to three things changed."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 3)):
        at, length = chance.randint(0, len(data)), chance.choice((0, 0, 1, 4, 30))
        kind = chance.randrange(6)
        if kind == 0:
            data = data[:at]
        elif kind == 1 and data:
            flipped = data[min(at, len(data) - 1)] ^ (1 << chance.randrange(8))
            data = data[:at] + bytes([flipped]) + data[at + 1 :]
        elif kind == 2:
            data = _number_replaced(data, chance)
        else:
            data = data[:at] + chance.choice(NEEDLES) + data[at + length :]
    return data


def _number_replaced(data: bytes, chance: random.Random) -> bytes:
    """Returns a content in which a number, or a word, is another one."""
    import re

    found = list(re.finditer(rb"[0-9]+(\.[0-9]+)?|\"[a-z_]+\"", data))
    if not found:
        return data
    match = chance.choice(found)
    return data[: match.start()] + chance.choice(NEEDLES) + data[match.end() :]


def realised(world: Path, place: Path, name: str, inside: str, change: int | str) -> str:
    """Makes a changed copy of something sound, and returns its name.

    Args:
        world: The folder with `sound` and `hostile`.
        place: Where the copy is made.
        name: What is copied, of `sound`.
        inside: If that is a folder, the file in it that is changed.
        change: The seed of `mutated`; or the name of what stands for the file, of `hostile`.
    """
    source = world / "sound" / name
    target = place / name
    if source.is_dir():
        if not target.exists():
            shutil.copytree(source, target)
        target = target / inside
        source = source / inside
    content = source.read_bytes() if source.is_file() else b""
    if target.is_dir() or target.is_symlink() or target.exists():
        shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
    if isinstance(change, str):
        os.symlink(world / "hostile" / change, target)
    else:
        target.write_bytes(mutated(content, change))
    return name


def members(world: Path, name: str) -> list[str]:
    """Returns the files of something sound, or [""] if it is a file."""
    top = world / "sound" / name
    if not top.is_dir():
        return [""]
    return sorted(str(f.relative_to(top)) for f in top.rglob("*") if f.is_file())


def config_values() -> dict[str, Any]:
    """Returns the default of every key."""
    from jaxpipe.train import Config

    return Config().model_dump(mode="json")
