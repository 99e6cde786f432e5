"""Reads the settings of a run, `[CONFIG.yml ...] [key=value ...]`, from a command line."""

import argparse
from typing import TYPE_CHECKING

from .._input import is_file

if TYPE_CHECKING:  # slow imports happen when a command runs
    from ..train import Config


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

    files = [text for text in settings if is_config_file(text)]
    overrides = [text for text in settings if text not in files]
    return load_config(files, overrides, presets=PRESETS)


def is_config_file(text: str) -> bool:
    """Returns whether an argument names a config file: `tokenizer_path=x.yml` does not."""
    from ..train import Config

    key, equals, _ = text.partition("=")
    is_pair = bool(equals) and (key in Config.model_fields or key.isidentifier())
    is_known = key in Config.model_fields or not is_file(text)
    return text.endswith((".yml", ".yaml")) and not (is_pair and is_known)
