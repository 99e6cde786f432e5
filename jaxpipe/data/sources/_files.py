"""The files that paths name, in order."""

import os
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ..._input import is_file
from ._source_config import SourceType

BUILTIN = "builtin:"
SUFFIXES: dict[SourceType, tuple[str, ...]] = {
    "text": (".txt",),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "tokens": (".bin", ".npy"),
}
"""The suffixes of the files of a type."""


def resolve_files(path: str, kind: SourceType, *, key: str) -> list[Path] | list[Traversable]:
    """Returns the files that a path names: a file, all of a folder, or `builtin:sonnets`."""
    if path.startswith(BUILTIN):
        return [_builtin(path, kind, key)]
    if os.path.isdir(path):
        candidates = (file for file in Path(path).rglob("*") if file.suffix in SUFFIXES[kind])
        files = sorted(file for file in candidates if is_file(file))
        if not files:
            raise ValueError(
                f"`{key}` names {path!r}, a folder without "
                f"{' or '.join('*' + ending for ending in SUFFIXES[kind])} files. Remove it "
                "or give one with such files."
            )
        return files
    if os.path.exists(path) and not is_file(path):
        raise ValueError(f"`{key}` names {path!r}, a device or a pipe. Give a regular file.")
    if not is_file(path):
        also = f" or {BUILTIN}sonnets" if kind == "text" else ""
        raise ValueError(
            f"`{key}` names {path!r}, which does not exist. Give a file, a folder{also}."
        )
    return [Path(path)]


def _builtin(path: str, kind: SourceType, key: str) -> Traversable:
    if kind != "text":
        raise ValueError(f"`{key}` names {path!r}, which is text, not {kind}. Give files.")
    folder = resources.files("jaxpipe.data").joinpath("text")
    names = sorted(file.name.removesuffix(".txt") for file in folder.iterdir())
    name = path.removeprefix(BUILTIN)
    if name not in names:
        valid = ", ".join(BUILTIN + name for name in names)
        raise ValueError(f"`{key}` names {path!r}. Built in: {valid}.")
    return folder.joinpath(f"{name}.txt")
