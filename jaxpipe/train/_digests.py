"""What the files of a checkpoint were when it was complete: damage is found before it loads.

Orbax makes a checkpoint whole or not at all. What happens to its files later, on a failing disk or
in a copy that broke off, it may load without a word.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

FILE = "digests.json"
"""In the folder of a step: of the other files their size and SHA-256, by path."""

_COMPLETE = "_CHECKPOINT_METADATA"
"""Orbax writes it into the folder of a step, and again when it gives the step its name."""

_TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of the folder of a step that is being written."""

MAX_LISTED = 4


def is_complete(step: Path) -> bool:
    """Whether orbax has written all of a step."""
    return (step / _COMPLETE).exists()


def steps_in(folder: Path) -> list[Path]:
    """The folders of complete steps, the newest first."""
    steps = [step for step in folder.iterdir() if step.name.isdigit() and is_complete(step)]
    return sorted(steps, key=lambda step: int(step.name), reverse=True)


def write_digests(folder: Path) -> None:
    """Of every complete step that has none yet, also of one that orbax is about to rename."""
    unnamed = [step for step in folder.iterdir() if _TEMPORARY in step.name]
    for step in [*steps_in(folder), *unnamed]:
        if (step / FILE).exists() or not is_complete(step):
            continue
        try:
            found = {str(file.relative_to(step)): _digest(file) for file in _files(step)}
            new = step / f"{FILE}.new"
            new.write_text(json.dumps(found, indent=1), encoding="utf-8")
            os.replace(new, step / FILE)
        except FileNotFoundError:
            continue  # an old step that is removed meanwhile


def damage(step: Path) -> list[str]:
    """What is wrong with the files of a step. Nothing is known of one without digests."""
    if not (step / FILE).exists():
        return []
    try:
        wanted = json.loads((step / FILE).read_text(encoding="utf-8"))
        files = {name: (size, digest) for name, (size, digest) in wanted.items()}
    except (ValueError, TypeError, AttributeError):
        return [f"{FILE} cannot be read"]
    return [problem for name, known in files.items() for problem in _problems(step / name, *known)]


def set_aside_damaged(folder: Path) -> list[str]:
    """Renames damaged steps to `<step>.damaged`, from the newest to the first that is sound.

    Returns:
        What was found, a text for each step.
    """
    found = []
    for step in steps_in(folder):
        problems = damage(step)
        if not problems:
            break
        aside = set_aside(step, "damaged")
        found.append(f"{described(step, problems)} It is left out, and kept as {aside.name}.")
    return found


def set_aside(step: Path, why: str) -> Path:
    """Renames the folder of a step to `<step>.<why>`, or `<step>.<why>-2` and so on."""
    names = (f"{step.name}.{why}", *(f"{step.name}.{why}-{i}" for i in range(2, 1000)))
    free = (step.with_name(name) for name in names if not step.with_name(name).exists())
    return step.rename(next(free))


def described(step: Path, problems: list[str]) -> str:
    """One sentence on a damaged step."""
    more = len(problems) - MAX_LISTED
    listed = problems[:MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return f"The checkpoint {step} is damaged: {', '.join(listed)}."


def _files(step: Path) -> Iterator[Path]:
    names = (FILE, _COMPLETE)
    return (file for file in sorted(step.rglob("*")) if file.is_file() and file.name not in names)


def _digest(file: Path) -> tuple[int, str]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
        return os.fstat(content.fileno()).st_size, digest.hexdigest()


def _problems(file: Path, size: int, digest: str) -> Iterator[str]:
    if not file.exists():
        yield f"{file.name} is missing"
    elif file.stat().st_size != size:
        yield f"{file.name} has {file.stat().st_size} bytes of {size}"
    elif problem := _changed(file, digest):
        yield f"{file.name} {problem}"


def _changed(file: Path, digest: str) -> str:
    try:
        return "has changed" if _digest(file)[1] != digest else ""
    except OSError as error:
        return f"cannot be read: {error.strerror}"
