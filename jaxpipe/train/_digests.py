"""What the files of a checkpoint were when it was complete, and of which step it is.

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

from .._durable import rename, sync_tree, write_file
from ._reading import UnreadableError, is_file, is_folder, names_in, status

FILE = "digests.json"
"""In the folder of a step: the step, and of the other files their size and SHA-256, by path."""

_COMPLETE = "_CHECKPOINT_METADATA"
"""Orbax writes it into the folder of a step."""

_STEP = re.compile(r"0|[1-9][0-9]*")

MAX_LISTED = 4

SMALL_BYTES = 1 << 20
"""A quick look reads files up to this size, among them all but those of arrays."""


def steps_in(folder: Path) -> list[Path]:
    """All that has the name of a step in a folder of checkpoints, the newest first.

    Raises:
        UnreadableError: If the folder cannot be read.
    """
    return sorted(
        (folder / name for name in names_in(folder) if _STEP.fullmatch(name)),
        key=lambda step: int(step.name),
        reverse=True,
    )


def is_complete(step: Path) -> bool:
    """Whether orbax has written all of a step.

    Raises:
        UnreadableError: If the step's folder cannot be read.
    """
    return status(step / _COMPLETE) is not None


def has_digests(step: Path) -> bool:
    """Whether a step says of its files what they were, and which step it is.

    Raises:
        UnreadableError: If its digests cannot be read.
    """
    known = _read(step / FILE)
    return bool(known) and not _is_old(known)


def write_digests(step: Path, number: int) -> None:
    """Describes a complete step, all of which is on the disk then, before it has its name.

    Args:
        step: The folder.
        number: Of the step.
    """
    sync_tree(step)
    body = {
        "step": number,
        "files": {str(file.relative_to(step)): _digest(file) for file in _files(step)},
    }
    write_file(step / FILE, json.dumps(body | {"sha256": _of_body(body)}, indent=1))


def damage(step: Path, *, quick: bool = False) -> list[str]:
    """What is wrong with a step. Of one without digests only what its folder shows.

    Args:
        step: The folder; its name is the number of the step that it should be.
        quick: Compare large files by their sizes alone.

    Raises:
        UnreadableError: If a file is there and cannot be read.
    """
    if not is_folder(step):
        return ["it is no folder"]
    text = _read(step / FILE)
    if not text:
        return [] if is_complete(step) else [f"{_COMPLETE} is missing"]
    try:
        known = json.loads(text)
        files = {
            str(name): (int(size), str(digest))
            for name, (size, digest) in (known if _is_old(text) else known["files"]).items()
        }
        if not _is_old(text) and known["sha256"] != _of_body(known):
            return [f"{FILE} has changed"]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return [f"{FILE} is not what a run writes"]
    problems = [p for name, size in files.items() for p in _problems(step / name, *size, quick)]
    if _is_old(text):
        return problems
    if known["step"] != int(step.name):
        problems.insert(0, f"it is step {known['step']}, renamed or copied")
    there = (str(file.relative_to(step)) for file in _files(step))
    return problems + [f"{name} does not belong to it" for name in there if name not in files]


def set_aside(step: Path, why: str) -> Path:
    """Renames the folder of a step to `<step>.<why>`, or `<step>.<why>-2` and so on."""
    names = (f"{step.name}.{why}", *(f"{step.name}.{why}-{i}" for i in range(2, 1000)))
    free = (step.with_name(name) for name in names if not os.path.lexists(step.with_name(name)))
    aside = next(free)
    rename(step, aside)
    return aside


def described(step: Path, problems: list[str]) -> str:
    """One sentence on a damaged step."""
    more = len(problems) - MAX_LISTED
    listed = problems[:MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return f"The checkpoint {step} is damaged: {', '.join(listed)}."


def sha256_of(content: bytes) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _of_body(known: Mapping[str, Any]) -> str:
    body = {"step": known["step"], "files": known["files"]}
    return sha256_of(json.dumps(body, sort_keys=True).encode())


def _is_old(text: bytes) -> bool:
    """Whether digests are as an older version wrote them: files alone, and not which step."""
    try:
        known = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(known, dict) and not {"step", "files", "sha256"} & known.keys()


def _read(file: Path) -> bytes:
    """What a file holds; nothing if there is none."""
    if not is_file(file):
        return b""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UnreadableError(file, error) from error


def _files(step: Path) -> Iterator[Path]:
    """All in a step but its digests and hidden files, which file systems and desktops make."""

    def stop(error: OSError) -> None:
        raise UnreadableError(step, error) from error

    for folder, folders, names in os.walk(step, onerror=stop):
        folders.sort()
        for name in sorted(names):
            if not name.startswith(".") and (folder, name) != (str(step), FILE):
                yield Path(folder, name)


def _digest(file: Path) -> tuple[int, str]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
        return os.fstat(content.fileno()).st_size, digest.hexdigest()


def _problems(file: Path, size: int, digest: str, quick: bool) -> Iterator[str]:
    found = status(file)
    if found is None:
        yield f"{file.name} is missing"
    elif not is_file(file):
        yield f"{file.name} is no file"
    elif found.st_size != size:
        yield f"{file.name} has {found.st_size} bytes of {size}"
    elif not quick or size <= SMALL_BYTES:
        try:
            changed = _digest(file)[1] != digest
        except OSError as error:
            raise UnreadableError(file, error) from error
        if changed:
            yield f"{file.name} has changed"
