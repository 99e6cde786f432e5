"""`[CONFIG.yml ...] [key=value ...]`: how commands are told what to run."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the imports that take long happen when a command runs
    from ..train import Config


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the positional arguments."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="CONFIG.yml | key=value",
        help="files of settings, or single settings; `jaxpipe train --keys` lists all of them",
    )


def read_settings(settings: list[str]) -> "Config":
    """The config they make; pairs win over files.

    Raises:
        ValueError: If one of them is wrong.
    """
    from ..models import PRESETS
    from ..train import load_config

    files = [text for text in settings if text.endswith((".yml", ".yaml"))]
    overrides = [text for text in settings if text not in files]
    return load_config(files, overrides, presets=PRESETS)
