"""Writes docs/predictions.md: published times of training steps beside predicted ones.

Run it from the root of the repository: `python docs/_predictions.py`. A test compares the page with
what this script writes. With `--fit` it prints the constants that the measurements suggest.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

from _fit import Constants, constants, has_experts, without
from _published import (
    HELD_BACK,
    SOURCES,
    TORCHTITAN,
    Case,
    ProfiledCase,
    cases,
    profiled_cases,
    table_5,
)

from jaxpipe.cost.training_step import Efficiency, efficiency

PAGE = Path(__file__).parent / "predictions.md"


@cache
def held_back() -> tuple[tuple[Case, float], ...]:
    """Returns the rows that nothing is fitted to, with the predicted seconds of a step."""
    fitted = constants(cases())
    return tuple((case, case.seconds(fitted.reached(case))) for case in cases(HELD_BACK))


@cache
def compared() -> tuple[tuple[Case, float, float], ...]:
    """Returns the rows with the seconds of a step: leaving the row out, and with all rows."""
    rows = cases()
    fitted = constants(rows)
    return tuple(
        (case, case.seconds(without(case, rows).reached(case)), case.seconds(fitted.reached(case)))
        for case in rows
    )


def errors(found: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns the mean and the largest of relative errors, from (predicted, measured)."""
    each = [abs(predicted / measured - 1) for predicted, measured in found]
    return fmean(each), max(each)


def in_words(found: Iterable[tuple[float, float]]) -> str:
    """Returns the mean and the largest of relative errors, as text."""
    mean, largest = errors(found)
    return f"mean {mean:.1%}, largest {largest:.1%}"


def known(case: Case) -> Efficiency:
    """Returns the efficiency that the package has for a case."""
    return efficiency(case.known_device, case.layout.dtype)


def schedule_ratio() -> tuple[float, float]:
    """Returns how much faster torchtitan is with interleaved 1F1B: published, predicted."""
    reached = constants(cases())
    plain, interleaved = table_5()
    predicted = plain.seconds(reached.reached(plain)) / interleaved.seconds(
        reached.reached(interleaved)
    )
    return plain.measured / interleaved.measured, predicted


def targets() -> Iterator[tuple[str, str, bool]]:
    """Yields what was to be reached, what is, and whether it is."""
    zero_bubble = [(case.predicted, case.measured) for case in profiled_cases()]
    mean, _ = errors(zero_bubble)
    yield "Zero Bubble, table 4, from profiles: mean within 3%", in_words(zero_bubble), mean < 0.03
    megatron = [(fit, c.measured) for c, _, fit in compared() if c.source == "arXiv:2205.05198"]
    yield (
        "Megatron, 22B and 530B: each within 5%",
        in_words(megatron),
        errors(megatron)[1] < 0.05,
    )
    for name, experts in (("without experts", False), ("with experts", True)):
        rows = [
            (alone, c.measured)
            for c, alone, _ in compared()
            if "Bridge" in c.source and has_experts(c) == experts
        ]
        near = sum(abs(predicted / measured - 1) < 0.1 for predicted, measured in rows)
        yield (
            f"Megatron-Bridge, models {name}, each row left out: each within 10%",
            f"{in_words(rows)}; {near} of {len(rows)} are",
            near == len(rows),
        )
    published, predicted = schedule_ratio()
    yield (
        "torchtitan, interleaved 1F1B beside 1F1B: within 5%",
        f"{published:.2f} times as fast, predicted {predicted:.2f}",
        abs(predicted / published - 1) < 0.05,
    )


def page() -> str:
    """Returns the text of the page."""
    parts = (_targets(), _constants(), _zero_bubble(), _sources(), _held_back())
    return "\n".join([HEAD, *(line for part in parts for line in part), ""])


HEAD = """\
# Predictions and measurements

`jaxpipe.cost` predicts the time of a training step by arithmetic: a roofline of every matrix
product, the bytes of everything else, collectives over links and networks, the optimizer, and the
project's own schedules in its own simulator, with the time of every stage. This page compares it
with published measurements of other systems. It is written by
[docs/_predictions.py](_predictions.py) from the files in
[tests/cost/published](../tests/cost/published), and a test compares it with them. Nobody has
measured jaxpipe's own programs on such devices yet."""


def _targets() -> Iterator[str]:
    yield "\n## What was to be reached\n"
    yield "| target | result | reached |\n|---|---|---|"
    for target, result, met in targets():
        yield f"| {target} | {result} | {'yes' if met else 'no'} |"
    yield TARGETS_NOTE


TARGETS_NOTE = """
Of the models without experts one row misses: Llama 3.1 405B in nvfp4 on GB200, which is faster than
the other GB200 rows suggest. Models with experts miss their target where experts are not joined by
the links of a rack. Rows of one model on the same devices differ there by a factor of 2 (Qwen3 30B
on 16 H100: 10494 tokens/s where tokens are dropped, 5113 where none are), and Qwen3 235B is slower
on B300 than on B200. What the files do not say decides: how tokens are dispatched, what runs beside
it, and whether the host starts operations fast enough. One constant per kind of device cannot tell
such rows apart."""


def _constants() -> Iterator[str]:
    fitted = constants(cases())
    yield CONSTANTS_HEAD
    yield "| constant | values |\n|---|---|"
    for name, text in fitted.described():
        yield f"| {name} | {text} |"
    yield CONSTANTS_NOTE


CONSTANTS_HEAD = """
## Constants

These are fitted to the rows below, and no others. No row has a constant of its own, unless it is
the only one of its device.
"""
CONSTANTS_NOTE = """
Not fitted but chosen, as round numbers, and equal for all: fused attention reaches 0.5 of the
peak in bfloat16, memory 0.8 of its bandwidth, links 0.75, networks 0.8; an operation takes 4
microseconds beside its work; 0.7 of a collective that runs beside products is hidden. A TPU
without a constant has that of a v5p, and a GPU in bfloat16 that of an A100. What the recipes say
of recomputation, of layers per stage and of communication beside products is in
[docs/_published.py](_published.py). "Left out" means that the constants are fitted to the other
rows only. Where no other row has the device, it has that of a v5p or the mean of the others."""


def _zero_bubble() -> Iterator[str]:
    found = profiled_cases()
    yield ZERO_BUBBLE_HEAD
    yield "| model | schedule | microbatches | published | predicted | error |"
    yield "|---|---|---|---|---|---|"
    for case in found:
        row = case.row
        yield (
            f"| {' '.join(row['model'].split()[:2])} | {row['schedule']} | {case.microbatches} "
            f"| {case.measured:.3f} | {case.predicted:.3f} | {_error(case.predicted, case)} |"
        )
    yield f"\nError: {in_words((case.predicted, case.measured) for case in found)}."


ZERO_BUBBLE_HEAD = """
## Zero Bubble (arXiv 2401.10241, table 4)

Predicted from the paper's profile of F, I, W and a transfer (table 9); nothing is fitted. A rank
waits while it receives and while it sends. Optimizer and the sum of the tied embedding's gradients
follow from sizes. ZB-1p is our `zero_bubble_h1`; ZB-2p is what our `search` finds with the paper's
bytes of F and W, with bubbles at most 0.001 above those of its table 5. Seconds of a step.
"""


def _sources() -> Iterator[str]:
    for source in SOURCES:
        rows = [found for found in compared() if found[0].source == source]
        if not rows:
            continue
        yield f"\n## {source}\n"
        yield "| model | devices | dtype | layout | published | left out | error | fitted | error |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for case, alone, fit in rows:
            yield (
                f"| {case.row['model'].split(' (')[0]} | {case.layout.devices} {case.device.kind} "
                f"| {case.layout.dtype} | {_layout(case)} | {case.measured:.2f} "
                f"| {alone:.2f} | {_error(alone, case)} | {fit:.2f} | {_error(fit, case)} |"
            )
        left_out = in_words((alone, case.measured) for case, alone, _ in rows)
        fitted = in_words((fit, case.measured) for case, _, fit in rows)
        yield f"\nError: left out {left_out}; fitted {fitted}. Seconds of a step."
        if source == TORCHTITAN:
            published, predicted = schedule_ratio()
            yield (
                f"\nTable 5 of the same report: interleaved 1F1B with 8 microbatches is "
                f"{published:.2f} times as fast as 1F1B, predicted {predicted:.2f} with 2 stages "
                "per rank. The report states neither number."
            )


def _held_back() -> Iterator[str]:
    yield HELD_BACK_HEAD
    yield "| model | release or table | devices | dtype | layout | published | predicted | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for case, seconds in held_back():
        yield (
            f"| {case.row['model'].split(' (')[0]} | {case.row['table']} "
            f"| {case.layout.devices} {case.device.kind} | {case.layout.dtype} | {_layout(case)} "
            f"| {case.measured:.2f} | {seconds:.2f} | {_error(seconds, case)} |"
        )
    for name, experts in (("without experts", False), ("with experts", True)):
        rows = [(s, case.measured) for case, s in held_back() if has_experts(case) == experts]
        yield f"\nError of models {name}: {in_words(rows)}."


HELD_BACK_HEAD = """
## Rows that nothing is fitted to

The other rows of Megatron-Bridge's archive (by release) and of torchtitan's report (by table), and
MaxText's tables for v5e and v5p, on 1 to 32 slices. No constant is fitted to them; a v5e has those
of a v5p. Two rules were chosen with MaxText's tables at hand: that a ring of a torus has at most 16
devices, and that tensor parallelism there does not run beside products. Seconds of a step.
"""


def _error(predicted: float, case: Case | ProfiledCase) -> str:
    return f"{predicted / case.measured - 1:+.1%}"


def _layout(case: Case) -> str:
    """Returns the sizes of the mesh, in short."""
    layout, row = case.layout, case.row
    sizes = {
        "stage": layout.stage,
        "chunks": layout.chunks,
        "tensor": layout.tensor,
        "expert": int(row["ep"]) if row["ep"].isdigit() else 1,
        "context": layout.context,
        "fsdp": layout.fsdp,
        "data": layout.data * layout.expert,
    }
    named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    noun = "microbatch" if layout.microbatches == 1 else "microbatches"
    return ", ".join([*named, f"{layout.microbatches} {noun} of {layout.rows}"])


if __name__ == "__main__":
    if "--fit" in sys.argv:
        fitted: Constants = constants(cases())
        print("\n".join(f"{name}: {text}" for name, text in fitted.described()))
    else:
        PAGE.write_text(page())
