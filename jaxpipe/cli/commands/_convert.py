"""`jaxpipe convert` converts checkpoints to and from Hugging Face's safetensors."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..._input import short_repr
from .._options import add_verbose, bounded_integer, path, text
from ..process import unwinding

if TYPE_CHECKING:
    from ...hugging_face import ConversionSummary

_HELP = "convert a checkpoint to Hugging Face's safetensors, or from them"
_OF_MAX_LENGTH = "`max_position_embeddings`"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "convert",
        help=_HELP,
        description=f"{_HELP.capitalize()}: which way, the folder SOURCE says.",
    )
    add = parser.add_argument
    add("source", type=path, metavar="SOURCE", help="folder with config.json, or of a run")
    add("destination", type=path, metavar="DESTINATION", help="a new folder")
    add("--dtype", choices=("float32", "bfloat16"), help="of the result; default: as it is")
    out = parser.add_argument_group("to Hugging Face")
    out.add_argument(
        "--step",
        type=bounded_integer(0, 2**31 - 1),
        metavar="N",
        help="of which checkpoint; default: newest",
    )
    out.add_argument(
        "--max-shard-size", type=text, metavar="SIZE", help="of a file: 5GB (default), 200MB"
    )
    out.add_argument(
        "--max-length", type=bounded_integer(1, 2**31 - 1), metavar="T", help=_OF_MAX_LENGTH
    )
    out.add_argument(
        "--allow-unverified", action="store_true", help="take also a checkpoint without digests"
    )
    add_verbose(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Converts, and prints how to use the result."""
    from ...hugging_face import from_hugging_face, to_hugging_face

    if not args.source.is_dir():
        raise ValueError(f"{args.source} is not a folder. Give one with config.json, or of a run.")
    dtype = args.dtype or ""
    if (args.source / "config.json").exists():
        _check_no_options(args)
        with unwinding():
            done = from_hugging_face(args.source, args.destination, dtype=dtype)
        print(_result_sentence(args.source, done))
        _print_carried(done, args.destination / "hugging_face")
        print(f"jaxpipe train {args.destination}/config.yml init_from={args.destination} ...")
        return 0
    with unwinding():
        done = to_hugging_face(
            args.source,
            args.destination,
            step=args.step,
            dtype=dtype,
            max_shard_bytes=parse_size(args.max_shard_size or "5GB"),
            max_length=args.max_length,
            allow_unverified=args.allow_unverified,
        )
    print(_result_sentence(args.destination, done))
    _print_carried(done, args.destination)
    return 0


def parse_size(size_text: str) -> int:
    """Parses a size such as `5GB`, `200MB` or a number of bytes; units are powers of 1000.

    Example:
        >>> parse_size("200MB")
        200000000
    """
    match = re.fullmatch(r"([0-9]{1,15})\s*([KMG]?B)?", size_text.strip().upper())
    size = int(match[1]) * _UNITS[match[2] or ""] if match else 0
    if not size:
        raise ValueError(
            f"`--max-shard-size` is {short_repr(size_text)}. Give a size such as 5GB or 200MB."
        )
    return size


def _check_no_options(args: argparse.Namespace) -> None:
    for name in ("step", "max_shard_size", "max_length", "allow_unverified"):
        value = getattr(args, name)
        if value is not None and value is not False:
            raise ValueError(
                f"`--{name.replace('_', '-')}` is {value} and {args.source} has a config.json. It "
                "is for the way to Hugging Face alone: leave it out."
            )


def _print_carried(done: "ConversionSummary", folder: Path) -> None:
    """Prints which files of the tokenizer and of generation settings a conversion has copied."""
    if done.carried:
        print(f"{folder}: {', '.join(done.carried)}")


def _result_sentence(folder: Path, done: "ConversionSummary") -> str:
    return (
        f"{folder}: {done.decoder_block}, {done.num_parameters / 1e6:.2f}M parameters, "
        f"{done.num_tensors} tensors in {done.num_files} file(s); result in {done.dtype}"
    )
