"""`jaxpipe tokenize` writes the data of a run as one file of tokens.

A file of tokens is mapped into memory, so later runs start at once and read only their own rows.
"""

import argparse

from .._options import add_settings, path, read_settings
from ..process import unwinding

_HELP = "write the data of a run as a file of tokens, which later runs read without loading it"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tokenize", help=_HELP, description=_HELP.capitalize() + ".")
    parser.add_argument("file", type=path, metavar="FILE.bin", help="the file to write")
    add_settings(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Writes the file, and prints the settings with which a run reads it."""
    from ...train.loop import write_corpus

    with unwinding():
        done = write_corpus(read_settings(args.settings), args.file)
    print(f"{args.file}: {done.num_tokens} tokens of {done.num_documents} documents. Train with")
    print(
        f"dataset_type=tokens data_files={args.file} token_dtype={done.token_dtype} "
        f"token_eod={done.token_eod}"
    )
    return 0
