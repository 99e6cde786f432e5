"""Text files as documents."""

from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

BUILTIN = "builtin:"


def read_documents(paths: Sequence[str], *, separator: str, key: str = "data_files") -> list[str]:
    """All documents of some text files, in order.

    Args:
        paths: Files; folders, for all their *.txt at any depth in sorted order; or
            `builtin:sonnets`, which ships with the package.
        separator: What stands between two documents of a file; "" if a file is one document.
        key: What errors call `paths`.

    Raises:
        ValueError: If a path does not exist or holds no text, or a file is not UTF-8.
    """
    documents: list[str] = []
    for path in paths:
        found = [text for file in _files(path, key) for text in _split(_read(file), separator)]
        if not found:
            raise ValueError(
                f"`{key}` names {path!r}, which holds no document: all of it is blank, or a "
                "folder without *.txt files. Remove it or give a file with text."
            )
        documents += found
    return documents


def _files(path: str, key: str) -> list[Path] | list[Traversable]:
    if path.startswith(BUILTIN):
        return [_builtin(path, key)]
    if Path(path).is_dir():
        return sorted(file for file in Path(path).rglob("*.txt") if file.is_file())
    if not Path(path).is_file():
        raise ValueError(
            f"`{key}` names {path!r}, which does not exist. Give a file, a folder or "
            f"{BUILTIN}sonnets."
        )
    return [Path(path)]


def _builtin(path: str, key: str) -> Traversable:
    folder = resources.files("jaxpipe.data").joinpath("text")
    names = sorted(file.name.removesuffix(".txt") for file in folder.iterdir())
    name = path.removeprefix(BUILTIN)
    if name not in names:
        valid = ", ".join(BUILTIN + name for name in names)
        raise ValueError(f"`{key}` names {path!r}. Built in: {valid}.")
    return folder.joinpath(f"{name}.txt")


def _read(file: Path | Traversable) -> str:
    data = file.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(file)!r} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}. "
            "Convert it, for example with iconv."
        ) from None
    # As text files open everywhere: separators are written with \n.
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _split(text: str, separator: str) -> Iterator[str]:
    """The pieces between separators without blank lines around them; blank pieces are none."""
    for piece in text.split(separator) if separator else [text]:
        if piece.strip():
            yield piece.strip("\n")
