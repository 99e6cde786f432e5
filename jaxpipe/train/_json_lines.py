"""Files with a JSON object a line, of which a kill or a full disk may have torn the last."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._input import MEGABYTE, parse_json, read_text, shown

_MOST_BYTES = 256 * MEGABYTE
"""A million steps, of 250 bytes each."""


def read_lines(path: Path, *, key: str) -> list[dict[str, Any]]:
    """The objects; of a torn last line, nothing.

    Raises:
        ValueError: If another line is not a JSON object with an integer `key`.
    """
    # Whole lines end in a newline, so the last piece is empty or torn.
    lines = read_text(path, most_bytes=_MOST_BYTES).split("\n")[:-1]
    return [_parse(line, key, f"{path} line {n}") for n, line in enumerate(lines, start=1)]


def write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file, at once: what it held is lost only when all of the new one is there."""
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    os.replace(new, path)


def _parse(line: str, key: str, where: str) -> dict[str, Any]:
    try:
        entry = parse_json(line, where)
    except ValueError as error:
        raise ValueError(f"{error} Remove the line.") from None
    if not isinstance(entry, dict) or not _is_number(entry.get(key)):
        raise ValueError(
            f"{where} is {shown(line, 80)}, not an object with a `{key}`. Remove the line."
        )
    return entry


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
