"""`jaxpipe train [CONFIG.yml ...] [key=value ...]`"""

import argparse

from ._emulate import emulate_devices

_HELP = "train a model, set up by YAML files and key=value pairs; pairs win over files"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser("train", help=_HELP, description=_HELP.capitalize() + ".")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="CONFIG.yml | key=value",
        help="files of settings, or single settings; `--keys` lists all of them",
    )
    parser.add_argument("--keys", action="store_true", help="print every key with its default")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Trains. Devices are emulated before JAX looks for real ones."""
    from ..models import PRESETS
    from ..train import base_yaml, load_config, train

    if args.keys:
        print(base_yaml())
        return 0
    files = [text for text in args.settings if text.endswith((".yml", ".yaml"))]
    overrides = [text for text in args.settings if text not in files]
    config = load_config(files, overrides, presets=PRESETS)
    if config.emulate_devices:
        emulate_devices(config.emulate_devices)
    train(config)
    return 0
