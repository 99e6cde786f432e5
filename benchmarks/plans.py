"""What the planner answers to requests of the shape that teams have, beside recipes and rows.

    python benchmarks/plans.py [--recipes] [NAME ...]

Prints a row for each request: the seconds of CPU that planning took, the first plan, its predicted
seconds and memory, and its share of the peak. `--recipes` prints other rows: layouts that recipes
publish, as this planner predicts them, beside its own first plan and the published seconds. Rows of
recipes in 8 bits are predicted in bfloat16, which is slower: their layouts can be compared, their
seconds cannot.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jaxpipe as jp
from jaxpipe.planner import Plans

B405: dict[str, Any] = {
    "model_name": "llama3.1-70b",
    "base_emb_dim": 16384,
    "base_num_query_heads": 128,
    "base_num_decoder_layers": 126,
    "base_mlp_dim": 53248,
}
"""Llama 3.1 405B, as differences from the preset of 70B."""
EIGHT, SEVENTY, SEVEN = "llama3-8b", "llama3.1-70b", "llama2-7b"
V3, LITE = "deepseek3-671b", "deepseek2-16b"


class Ask(NamedTuple):
    """A request.

    Attributes:
        name: Its name.
        model: A preset, or values of keys.
        devices: The devices.
        batch: Sequences of a step.
        sequence: Tokens of a sequence.
        keys: Values of other keys, and `num_slices`, `memory_gb`, `schedule`, `max_stages`.
    """

    name: str
    model: Any
    devices: str
    batch: int
    sequence: int
    keys: Mapping[str, Any] = MappingProxyType({})


ASKS = (
    Ask("7B, one host", SEVEN, "v5p-8", 48, 2048),
    Ask("7B, 60 GB", SEVEN, "v5p-8", 48, 2048, {"memory_gb": 60}),
    Ask("7B, four small chips", SEVEN, "v5e:2x2", 32, 2048),
    Ask("7B on 64 v5e", SEVEN, "v5e:8x8", 256, 2048),
    Ask("8B, one host", EIGHT, "v6e:2x4", 24, 8192),
    Ask("8B, four slices", EIGHT, "v6e:2x4", 128, 8192, {"num_slices": 4}),
    Ask("8B on 8 H100", EIGHT, "h100:8", 128, 8192),
    Ask("8B on 16 H100, small batch", EIGHT, "h100:2x8", 16, 8192),
    Ask("8B on A100 of 40 GB", EIGHT, "a100-40gb:2x8", 64, 4096),
    Ask("8B, 32,768 tokens", EIGHT, "v5p-32", 32, 32768),
    Ask("8B, 131,072 tokens", EIGHT, "h100:4x8", 8, 131072),
    Ask("70B on 32 v6e", SEVENTY, "v6e:4x8", 64, 8192),
    Ask(
        "70B on 32 v6e, 16-bit weights", SEVENTY, "v6e:4x8", 64, 8192, {"weight_dtype": "bfloat16"}
    ),
    Ask("70B on 256 v5e", SEVENTY, "v5e:16x16", 256, 4096),
    Ask("70B on 32 v5p", SEVENTY, "v5p-64", 256, 4096),
    Ask("70B on 64 tpu7x", SEVENTY, "tpu7x:4x4x4", 256, 8192),
    Ask("70B on 64 H100", SEVENTY, "h100:8x8", 128, 8192),
    Ask("70B on 64 H100, 1F1B", SEVENTY, "h100:8x8", 128, 8192, {"schedule": "1f1b"}),
    Ask("70B on 16 H200", SEVENTY, "h200:2x8", 64, 8192),
    Ask("70B on 64 GB200", SEVENTY, "gb200:64", 256, 8192),
    Ask("70B, racks of 18", SEVENTY, "gb200:4x18", 288, 8192),
    Ask("70B on 1,024 H100", SEVENTY, "h100:128x8", 1024, 8192),
    Ask("70B, two slices", SEVENTY, "v5p:4x4x4", 256, 4096, {"num_slices": 2}),
    Ask("405B on 1,024 H100", B405, "h100:128x8", 512, 8192),
    Ask("405B, 131,072 tokens", B405, "h100:128x8", 64, 131072),
    Ask("405B on 512 v5p", B405, "v5p:8x8x8", 1024, 8192),
    Ask("405B on 2 x 256 v6e", B405, "v6e:16x16", 512, 8192, {"num_slices": 2}),
    Ask("405B on 256 GB300", B405, "gb300:256", 1536, 8192),
    Ask("405B on 16 ranks", B405, "h100:32x8", 512, 8192, {"ici_pipeline_parallelism": 16}),
    Ask("16B experts on 8 H100", LITE, "h100:8", 64, 4096),
    Ask("16B experts on 32 v5e", LITE, "v5e:4x8", 128, 4096),
    Ask("671B on 512 v5p", V3, "v5p-1024", 2048, 4096),
    Ask("671B on 256 H100", V3, "h100:32x8", 2048, 4096),
    Ask("671B on 256 GB200", V3, "gb200:256", 4096, 4096),
    Ask("671B on 256 B200", V3, "b200:32x8", 2048, 4096),
)

_PP, _TP, _FSDP = (f"ici_{axis}_parallelism" for axis in ("pipeline", "tensor", "fsdp"))
_DATA, _CP, _EP = (f"ici_{axis}_parallelism" for axis in ("data", "context", "expert"))


class Recipe(NamedTuple):
    """A layout that others publish.

    Attributes:
        ask: The name of the request that it answers.
        source: Who publishes it, and the dtype of its products.
        layout: Its keys.
        seconds: The published seconds of a step.
    """

    ask: str
    source: str
    layout: dict[str, Any]
    seconds: float


def _megatron(pp: int, chunks: int, **axes: int) -> dict[str, Any]:
    sizes = {f"ici_{axis}_parallelism": size for axis, size in axes.items()}
    return sizes | {_PP: pp, "num_pipeline_repeats": chunks, "schedule": "interleaved_1f1b"}


RECIPES = (
    Recipe("8B, one host", "MaxText, bf16", {_PP: 1, _FSDP: 8}, 3.443),
    Recipe("70B on 32 v6e", "MaxText, bf16", {_PP: 1, _FSDP: 32}, 17.79),
    Recipe("70B on 64 tpu7x", "MaxText, bf16", {_PP: 1, _FSDP: 128}, 12.2),
    Recipe("405B on 512 v5p", "MaxText, bf16", {_PP: 1, _FSDP: 512}, 131.47),
    Recipe(
        "405B on 2 x 256 v6e",
        "MaxText, bf16",
        {_PP: 1, "ici_fsdp_parallelism": 256, "dcn_fsdp_parallelism": 2},
        54.8,
    ),
    Recipe("8B on 8 H100", "Megatron, fp8", {_PP: 1, _FSDP: 8}, 9.07),
    Recipe("70B on 64 GB200", "Megatron, fp8", {_PP: 1, _FSDP: 64}, 7.6),
    Recipe(
        "70B on 64 H100",
        "NeMo, fp8",
        _megatron(4, 5, tensor=4, context=2, data=2, fsdp=1),
        10.69,
    ),
    Recipe(
        "405B on 1,024 H100",
        "Megatron, fp8",
        _megatron(8, 8, tensor=8, context=2, data=8, fsdp=1),
        14.03,
    ),
    Recipe("405B on 256 GB300", "Megatron, fp8", _megatron(8, 4, tensor=4, data=8, fsdp=1), 46.9),
    Recipe("671B on 256 GB200", "Megatron, mxfp8", _megatron(4, 4, expert=64, fsdp=1), 13.34),
    Recipe(
        "671B on 256 B200",
        "Megatron, mxfp8",
        {_PP: 16, "schedule": "1f1b", _EP: 8, _DATA: 2, _FSDP: 1},
        15.32,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the planner answers")
    parser.add_argument("names", nargs="*", help="of requests; all, if none is named")
    parser.add_argument("--recipes", action="store_true", help="beside published layouts")
    args = parser.parse_args()
    if unknown := set(args.names) - {ask.name for ask in ASKS}:
        parser.error(f"no requests: {', '.join(unknown)}")
    for line in recipes(args.names) if args.recipes else answers(args.names):
        print(line, flush=True)


def answers(names: list[str]) -> Iterator[str]:
    yield f"{'request':<30}{'CPU s':>6}{'step s':>8}{'GB':>7}{'MFU':>7}  first plan"
    for ask in ASKS:
        if names and ask.name not in names:
            continue
        seconds, plans = planned(ask)
        if isinstance(plans, str):
            yield f"{ask.name:<30}{seconds:>6.1f}  {plans.splitlines()[0]}"
            continue
        best = plans.best
        yield (
            f"{ask.name:<30}{seconds:>6.1f}{best.time.seconds:>8.2f}{best.memory.total / 1e9:>7.1f}"
            f"{best.time.mfu:>7.1%}  {layout(plans)}"
        )


def recipes(names: list[str]) -> Iterator[str]:
    yield f"{'request':<21}{'published':>10}{'as planned':>11}{'ours':>8}  source; our first plan"
    asks = {ask.name: ask for ask in ASKS}
    for recipe in RECIPES:
        if names and recipe.ask not in names:
            continue
        ask = asks[recipe.ask]
        _, ours = planned(ask)
        _, theirs = planned(ask._replace(keys={**ask.keys, **recipe.layout}))
        yield (
            f"{recipe.ask:<21}{recipe.seconds:>10.2f}{step(theirs):>11}{step(ours):>8}  "
            f"{recipe.source}; {layout(ours)}"
        )


def planned(ask: Ask) -> tuple[float, Plans | str]:
    """Returns the CPU seconds of planning, and the plans or the reason that there are none."""
    started = time.process_time()
    try:
        plans = jp.plan(ask.model, ask.devices, ask.batch, ask.sequence, **ask.keys)
    except ValueError as error:
        plans = str(error)
    return time.process_time() - started, plans


def step(plans: Plans | str) -> str:
    return "none" if isinstance(plans, str) else f"{plans.best.time.seconds:.2f}"


def layout(plans: Plans | str) -> str:
    """Returns the first plan in one line."""
    if isinstance(plans, str):
        return plans.split(": ")[0]
    return next(line for line in repr(plans).splitlines() if line.startswith("1  "))[3:].split(
        "  "
    )[0]


if __name__ == "__main__":
    main()
