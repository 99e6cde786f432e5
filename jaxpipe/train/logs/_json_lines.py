"""Files with a JSON object a line, of which a kill or a full disk may have torn the last."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..._durable import write_file
from ..._input import MEGABYTE, parse_json, short_repr
from ..runtime._reading import read_file

_MAX_BYTES = 256 * MEGABYTE
"""The size of a million lines of 250 bytes each."""


def read_lines(path: Path, *, key: str) -> list[dict[str, Any]]:
    """Returns the objects of all lines but a torn last one; none if the file does not exist."""
    lines = complete_lines(path, most_bytes=_MAX_BYTES)
    return [parse_line(line, key, f"{path} line {n}") for n, line in lines]


def complete_lines(
    path: Path, *, most_bytes: int | float = math.inf
) -> Iterable[tuple[int, bytes]]:
    """Returns every line that ends with a newline, with its number from 1 on."""
    # Whole lines end in a newline, so the last piece is empty or torn.
    data = read_file(path, most_bytes=most_bytes) or b""
    return enumerate(data.split(b"\n")[:-1], start=1)


def write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file, at once: what it held is lost only when all of the new one is there."""
    write_file(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def parse_line(line: bytes, key: str, where: str) -> dict[str, Any]:
    """Returns the JSON object that a line holds."""
    try:
        entry = parse_json(line.decode("utf-8"), where)
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8. Remove the line.") from None
    except ValueError as error:
        raise ValueError(f"{error} Remove the line.") from None
    number = entry.get(key) if isinstance(entry, dict) else None
    if type(number) is not int or not 0 <= number < 2**62:
        raise ValueError(
            f"{where} is {short_repr(line.decode(), 80)}, not an object with a `{key}`. "
            "Remove the line."
        )
    return entry
