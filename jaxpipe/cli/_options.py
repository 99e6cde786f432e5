"""Parses options, and the settings `[CONFIG.yml ...] [key=value ...]` of a run."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .._input import is_file, read_text, short_repr, shorten

if TYPE_CHECKING:  # slow imports happen when a command runs
    from ..train import Config

_MAX_MESSAGE = 2000


class Parser(argparse.ArgumentParser):
    """An argument parser whose error messages have at most `_MAX_MESSAGE` characters."""

    def error(self, message: str) -> NoReturn:
        super().error(shorten(message, _MAX_MESSAGE))


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Adds `--verbose`, which is also looked for before JAX is imported."""
    parser.add_argument(
        "--verbose", action="store_true", help="show also what libraries log: XLA, libtpu, orbax"
    )


def bounded_integer(least: int, most: int) -> Callable[[str], int]:
    """Returns a parser of options that are integers from `least` to `most`."""
    return _bounded(int, "an integer", least, most)


def bounded_float(least: float, most: float) -> Callable[[str], float]:
    """Returns a parser of options that are numbers from `least` to `most`."""
    return _bounded(float, "a number", least, most)


def text(value: str) -> str:
    """Reads an option that is a name: printable text."""
    if not value or len(value) > 4096 or not value.isprintable():
        raise argparse.ArgumentTypeError(f"{short_repr(value)}. Give printable text.")
    return value


def path(value: str) -> Path:
    """Reads an option that is a path."""
    try:
        os.fsencode(value).decode("utf-8")
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"{short_repr(value)} is not UTF-8.") from None
    if not value or "\0" in value:
        raise argparse.ArgumentTypeError(f"{short_repr(value)} is not a path.")
    return Path(value)


def _bounded(kind: Callable[[str], Any], name: str, least: float, most: float) -> Callable:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{short_repr(text)}. Give {name} from {least:,} to {most:,}."
            )
        return value

    return read


def add_devices(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Adds `--devices`, which is also called `--topology`, and `--num-slices` to the parser.

    Without a `default`, which the help names, the option is required.
    """
    parser.add_argument(
        "--devices",
        "--topology",
        type=text,
        required=not default,
        metavar="NAME",
        help="such as v5p-64 (TensorCores), v6e:4x4 (chips), h100:2x8 (hosts and devices of each), "
        f"or here{default and '; else '}{default}",
    )
    parser.add_argument(
        "--num-slices", type=bounded_integer(1, 4096), default=1, metavar="N", help="slices of it"
    )


def topology_name(devices: str | None) -> str | None:
    """Returns the name by which compilers know devices that are absent; None for those here."""
    if devices is None or devices == "here":
        return None
    if ":" in devices:  # a compiler may know more of these than the planner
        return devices
    from ..planner import parse_devices

    return parse_devices(devices).topology


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the positional arguments to the parser of a command."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="CONFIG.yml | key=value",
        help="files of settings, or single settings; `jaxpipe train --keys` lists all of them",
    )


def read_settings(settings: list[str]) -> "Config":
    """Reads settings; pairs win over files."""
    from ..models import PRESETS
    from ..train import load_config

    return load_config(*split_settings(settings), presets=PRESETS)


def read_values(settings: list[str]) -> dict[str, Any]:
    """Returns the keys that files and pairs give; later ones win, and pairs over files."""
    from ..train.config import MAX_YAML_BYTES, parse_override, parse_yaml

    files, pairs = split_settings(settings)
    texts = [read_text(file, most_bytes=MAX_YAML_BYTES) for file in files]
    mappings = [parse_yaml(text, "a file of settings") for text in texts]
    mappings += [parse_override(text) for text in pairs]
    return {key: value for values in mappings for key, value in values.items()}


def split_settings(settings: list[str]) -> tuple[list[str], list[str]]:
    """Returns the files of settings, without MaxText's base.yml, and the `key=value` pairs."""
    files = [text for text in settings if _is_config_file(text)]
    pairs = [text for text in settings if text not in files]
    unread = [file for file in files if _is_maxtexts_base(file)]
    for file in unread:
        what = "is MaxText's" if is_file(file) else "is not there and has the name of MaxText's"
        print(
            f"jaxpipe: {short_repr(file)} {what} base.yml. It is not read: defaults are those of "
            "`jaxpipe train --keys`. Give what you changed in it as key=value.",
            file=sys.stderr,
        )
    return [file for file in files if file not in unread], pairs


def _is_maxtexts_base(file: str) -> bool:
    """Returns whether a path is that of MaxText's base.yml, which need not be there.

    The file has `hardware`, which is no key of jaxpipe.
    """
    from ..train.config import MAX_YAML_BYTES

    if Path(file).parts[-2:] != ("configs", "base.yml"):
        return False
    if not is_file(file):
        return True
    return "\nhardware:" in read_text(file, most_bytes=MAX_YAML_BYTES)


def _is_config_file(text: str) -> bool:
    """Returns whether an argument names a config file: `tokenizer_path=x.yml` does not."""
    from ..train import Config

    key, equals, _ = text.partition("=")
    is_pair = bool(equals) and (key in Config.model_fields or key.isidentifier())
    is_known = key in Config.model_fields or not is_file(text)
    return text.endswith((".yml", ".yaml")) and not (is_pair and is_known)
