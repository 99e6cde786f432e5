"""`jaxpipe sample` prints how the model of a run goes on behind a prompt."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from ..._input import short_repr
from .._options import add_verbose, bounded_float, bounded_integer, path, text
from ..process import check_address_space, emulate_devices, use_compile_cache

if TYPE_CHECKING:
    from ...train import Sample
    from ...train.sampling import OpenedRun

_HELP = "print how the model of a run goes on behind a prompt"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("sample", help=_HELP, description=_HELP.capitalize() + ".")
    add = parser.add_argument
    add("run", type=path, metavar="RUN", help="the folder of a run, or one of `jaxpipe convert`")
    add(
        "--prompt",
        type=_prompt,
        action="append",
        required=True,
        metavar="TEXT",
        help="may be given repeatedly",
    )
    add(
        "--max-tokens",
        type=bounded_integer(1, 1_000_000),
        default=128,
        metavar="N",
        help="the most tokens that follow a prompt; default: 128",
    )
    add(
        "--temperature",
        type=bounded_float(0, 1e6),
        default=0.0,
        metavar="X",
        help="what logits are divided by before a token is drawn; 0 (default): the likeliest",
    )
    add(
        "--top-p",
        type=bounded_float(1e-9, 1),
        default=1.0,
        metavar="P",
        help="draw of the likeliest tokens with this share of the probability; default: 1",
    )
    add("--seed", type=bounded_integer(0, 2**32 - 1), default=0, metavar="N", help="of all draws")
    add(
        "--bos",
        type=bounded_integer(0, 2**31 - 1),
        metavar="ID",
        help="of a token in front of each prompt; default: none, as in training",
    )
    add(
        "--step",
        type=bounded_integer(0, 2**31 - 1),
        metavar="N",
        help="of which checkpoint; default: newest",
    )
    add(
        "--tokenizer",
        type=text,
        metavar="FILE",
        help="a tokenizer.json, a sentencepiece .model, or `bytes`; default: the run's",
    )
    add("--allow-unverified", action="store_true", help="take also a checkpoint without digests")
    add(
        "settings",
        nargs="*",
        metavar="key=value",
        help="over which devices weights are divided, such as ici_fsdp_parallelism=4",
    )
    add_verbose(parser)
    parser.set_defaults(func=run)


def _prompt(value: str) -> str:
    """Reads an option that is text of any kind."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{short_repr(value)} is not UTF-8.") from None
    return value


def run(args: argparse.Namespace) -> int:
    """Restores the weights of a checkpoint, and prints a sample for each prompt."""
    from ...hugging_face import carried_tokenizer
    from ...train.config import check_values, parse_override
    from ...train.sampling import SamplingOptions, open_run, printable, sampled_config, sampler

    options = SamplingOptions(args.max_tokens, args.temperature, args.top_p, args.seed, args.bos)
    settings = {key: value for text in args.settings for key, value in parse_override(text).items()}
    count = settings.pop("emulate_devices", 0)
    if count != 0:
        check_values({"emulate_devices": count}, "the command line")
    check_address_space(count)
    if count:
        emulate_devices(count)
    config = sampled_config(args.run, settings)
    if config.jax_cache_dir == "auto":
        use_compile_cache()
    tokenizer = args.tokenizer
    if tokenizer is None and not config.reads_text and (file := carried_tokenizer(args.run)):
        tokenizer = str(file)
    opened = open_run(
        args.run, config, args.step, tokenizer, allow_unverified=args.allow_unverified
    )
    sample_weights = sampler(opened.plan, opened.tokenizer, args.prompt, options)
    print(f"{args.run} step {opened.step}: {_what(opened)}", flush=True)
    started = time.perf_counter()
    samples = sample_weights(opened.weights)
    seconds = time.perf_counter() - started
    for sample in samples:
        end = "the document ends" if sample.has_ended else f"{len(sample.token_ids)} tokens"
        print(f"\n{printable(sample.text)}\n[{end}]")
    count = sum(len(sample.token_ids) for sample in samples)
    print(f"\n{count} tokens in {seconds:.1f} s, with compiling")
    _print_long(opened, samples)
    return 0


def _what(opened: "OpenedRun") -> str:
    plan = opened.plan
    devices = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1)
    return (
        f"{plan.weights.num_parameters / 1e6:.2f}M parameters in {plan.model.config.dtype} on "
        f"{plan.mesh.size} {plan.weights.devices.platform} device(s)"
        + (f" ({devices})" if devices else "")
    )


def _print_long(opened: "OpenedRun", samples: "list[Sample]") -> None:
    """Says that samples are longer than what the model was trained on."""
    length = opened.trained_length
    lengths = [
        len(opened.tokenizer.encode(sample.prompt)) + len(sample.token_ids) for sample in samples
    ]
    if length is not None and max(lengths) > length:
        print(
            f"jaxpipe: a sample has {max(lengths)} tokens, and the run was trained on rows of "
            f"{length} (`max_target_length`): what is behind these says little about it.",
            file=sys.stderr,
        )
