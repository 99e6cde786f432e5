"""Records the digests of a checkpoint's files and its step, and compares them later.

Orbax makes a checkpoint whole or not at all. What happens to its files later, on a failing disk, in
a copy that broke off or under another name, it may load without a word.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..._durable import fsync_tree, rename, write_file
from ..runtime._reading import UnreadableError, is_file, is_folder, list_names, stat_or_none

DIGESTS_FILE = "digests.json"
"""The file in the folder of a step with the step, and the size and SHA-256 of all other files."""

_ORBAX_METADATA = "_CHECKPOINT_METADATA"
"""Orbax writes it into the folder of a step."""

_STEP = re.compile(r"0|[1-9][0-9]*")

MAX_LISTED = 4

SMALL_BYTES = 1 << 20
"""A quick check reads files up to this size. Only files of arrays are larger."""


def steps_in(folder: Path) -> list[Path]:
    """Returns the entries of a folder of checkpoints that are named as a step, newest first."""
    return sorted(
        (folder / name for name in list_names(folder) if _STEP.fullmatch(name)),
        key=lambda step: int(step.name),
        reverse=True,
    )


def is_complete(step: Path) -> bool:
    """Returns whether Orbax has written all of a step."""
    return stat_or_none(step / _ORBAX_METADATA) is not None


def has_digests(step: Path) -> bool:
    """Returns whether a step has digests that also name the step."""
    text = _read(step / DIGESTS_FILE)
    return bool(text) and not _is_old_format(text)


def write_digests(step: Path, step_id: int) -> None:
    """Forces a complete step onto the disk, and writes its digests."""
    fsync_tree(step)
    body = {
        "step": step_id,
        "files": {str(file.relative_to(step)): _digest(file) for file in _files(step)},
    }
    write_file(step / DIGESTS_FILE, json.dumps(body | {"sha256": _body_digest(body)}, indent=1))


def find_corruption(step: Path, *, quick: bool = False) -> list[str]:
    """Finds the problems of a saved step. Without digests only its completeness is checked."""
    if not is_folder(step):
        return ["it is not a folder"]
    text = _read(step / DIGESTS_FILE)
    if not text:
        return [] if is_complete(step) else [f"{_ORBAX_METADATA} is missing"]
    try:
        saved = json.loads(text)
        files = {
            str(name): (int(size), str(digest))
            for name, (size, digest) in (saved if _is_old_format(text) else saved["files"]).items()
        }
        if not _is_old_format(text) and saved["sha256"] != _body_digest(saved):
            return [f"{DIGESTS_FILE} has changed"]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return [f"{DIGESTS_FILE} is not what a run writes"]
    problems = [p for name, size in files.items() for p in _problems(step / name, *size, quick)]
    if _is_old_format(text):
        return problems
    if saved["step"] != int(step.name):
        problems.insert(0, f"it is step {saved['step']}, renamed or copied")
    there = (str(file.relative_to(step)) for file in _files(step))
    return problems + [f"{name} does not belong to it" for name in there if name not in files]


def quarantine(step: Path, why: str) -> Path:
    """Renames the folder of a step to `<step>.<why>`, or `<step>.<why>-2` and so on."""
    names = (f"{step.name}.{why}", *(f"{step.name}.{why}-{i}" for i in range(2, 1000)))
    free = (step.with_name(name) for name in names if not os.path.lexists(step.with_name(name)))
    aside = next(free)
    rename(step, aside)
    return aside


def describe_corruption(step: Path, problems: list[str]) -> str:
    """Returns a sentence on a corrupt step and its problems."""
    more = len(problems) - MAX_LISTED
    listed = problems[:MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return f"The checkpoint {step} is corrupt: {', '.join(listed)}."


def sha256_of(data: bytes) -> str:
    """Returns the SHA-256 of some bytes in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _body_digest(digests: Mapping[str, Any]) -> str:
    body = {"step": digests["step"], "files": digests["files"]}
    return sha256_of(json.dumps(body, sort_keys=True).encode())


def _is_old_format(text: bytes) -> bool:
    """Returns whether an older version wrote these digests, which do not name the step."""
    try:
        digests = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(digests, dict) and not {"step", "files", "sha256"} & digests.keys()


def _read(file: Path) -> bytes:
    """Returns the content of a file; b"" if it does not exist."""
    if not is_file(file):
        return b""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UnreadableError(file, error) from error


def _files(step: Path) -> Iterator[Path]:
    """Yields all files of a step except its digests and hidden files, which other programs make."""

    def stop(error: OSError) -> None:
        raise UnreadableError(step, error) from error

    for folder, folders, names in os.walk(step, onerror=stop):
        folders.sort()
        for name in sorted(names):
            if not name.startswith(".") and (folder, name) != (str(step), DIGESTS_FILE):
                yield Path(folder, name)


def _digest(file: Path) -> tuple[int, str]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
        return os.fstat(opened.fileno()).st_size, digest.hexdigest()


def _problems(file: Path, size: int, digest: str, quick: bool) -> Iterator[str]:
    status = stat_or_none(file)
    if status is None:
        yield f"{file.name} is missing"
    elif not is_file(file):
        yield f"{file.name} is not a regular file"
    elif status.st_size != size:
        yield f"{file.name} has {status.st_size} bytes of {size}"
    elif not quick or size <= SMALL_BYTES:
        try:
            changed = _digest(file)[1] != digest
        except OSError as error:
            raise UnreadableError(file, error) from error
        if changed:
            yield f"{file.name} has changed"
