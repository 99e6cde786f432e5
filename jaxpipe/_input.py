"""Reads files and values that users give, within bounds.

A file of any kind neither fills the memory nor blocks, and no value makes an error message long.
"""

import importlib
import json
import os
import re
import reprlib
import stat
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

MEGABYTE = 1 << 20
MAX_JSON_BYTES = 32 * MEGABYTE
"""Largest size of a JSON text, in bytes. In memory it may become 25 times as large."""

_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and lone surrogates, by which Python represents bytes that are not UTF-8."""


def short_repr(value: object, most: int = 160) -> str:
    """Returns the `repr` of a value, in which strings have at most `most` characters."""
    short = _Repr()
    short.maxstring = short.maxother = short.maxlong = most
    text = short.repr(value)
    return text if len(text) <= 4 * most else f"{text[: 4 * most]}..."


def short_list(names: Iterable[str]) -> str:
    """Returns the first eight names with commas between them, or "none" if there are no names."""
    shown = [short_repr(name) for name in islice(names, 9)]
    return ", ".join([*shown[:8], *(["..."] if len(shown) > 8 else [])]) or "none"


def shorten(text: str, most: int) -> str:
    """Returns a text, without its middle if it is long."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def clause(error: object, most: int = 500) -> str:
    """Returns another library's error on one line without full stop, as a part of our sentence."""
    return shorten(" ".join(str(error).split()), most).rstrip(" .:;,")


def plain_text(value: str) -> str:
    """Returns a name or path, if it has no control characters; the error is for pydantic."""
    if _CONTROL_CHARACTERS.search(value):
        raise ValueError("Input should be UTF-8 text without control characters")
    return value


def import_function(key: str, name: str, arguments: str) -> Callable[..., Any]:
    """Imports a user's function `module:function`, whose module may be in the current folder.

    Errors name the config key, and what arguments the function takes.
    """
    module_name, _, function_name = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # a console script has its own folder there
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"`{key}` is {name!r}, which cannot be imported: {type(error).__name__}: "
            f"{clause(error)}. Give a module that Python finds, and the name of a function in it."
        ) from error
    if not callable(function):
        raise ValueError(
            f"`{key}` is {name!r}, which is {type(function).__name__} and no function. Give a "
            f"function that takes {arguments}."
        )
    return function


def is_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path names a regular file. A path that cannot exist names none."""
    return os.path.isfile(path)  # `Path.is_file` raises for names that are too long


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int) -> bytes:
    """Returns the content of a regular file. A ValueError begins with the file's name."""
    name = os.fspath(path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ValueError(f"{name} is a folder. Give a file.")
        if not stat.S_ISREG(mode):
            raise ValueError(f"{name} is a device or a pipe. Give a regular file.")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file.") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}.") from None
    if len(data) > most_bytes:
        raise ValueError(
            f"{name} has more than {most_bytes:,} bytes, which no file of this kind needs. Give "
            "another file."
        )
    return data


def read_text(path: str | os.PathLike[str], *, most_bytes: int) -> str:
    """Returns the text of a regular UTF-8 file without byte order mark, as `read_bytes`."""
    data = read_bytes(path, most_bytes=most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{os.fspath(path)} is not UTF-8: byte 0x{data[error.start]:02x} in line {line}. "
            "Convert it, for example with iconv."
        ) from None


def parse_json(text: str, where: str) -> Any:
    """Returns the value of a JSON text; `where` begins the message of a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply.") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, character {error.colno}"
        place = place if "\n" in text.strip() else f"character {error.colno}"
        raise ValueError(
            f"{where} is not JSON: {error.msg.removesuffix(' at')} at {place}."
        ) from None
    except ValueError:  # Python reads no integer of more than 4300 digits
        raise ValueError(f"{where} is not usable: a number has thousands of digits.") from None


class _Repr(reprlib.Repr):
    """The standard library's shortened `repr`, also for integers that `repr` refuses."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 4000:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)
