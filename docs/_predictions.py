"""Writes docs/predictions.md: published times of training steps beside predicted ones.

Run it from the root of the repository: `python docs/_predictions.py`. A test compares the page with
what this script writes. With `--fit` it prints the constants that the measurements suggest.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import fmean, quantiles

from _fit import Constants, constants, without
from _published import (
    HELD_BACK,
    LATER,
    SOURCES,
    TORCHTITAN,
    Case,
    ProfiledCase,
    cases,
    fitted_cases,
    has_experts,
    later_cases,
    left_out,
    profiled_cases,
    read,
    table_5,
)

from jaxpipe.cost.training_step import Efficiency, efficiency
from jaxpipe.planner import CLOSE

PAGE = Path(__file__).parent / "predictions.md"


@cache
def held_back() -> tuple[tuple[Case, float], ...]:
    """Returns the rows that nothing is fitted to, with the predicted seconds of a step."""
    return _with_constants(cases(HELD_BACK))


@cache
def later() -> tuple[tuple[Case, float], ...]:
    """Returns the rows of later releases and of other sources, with the predicted seconds."""
    return _with_constants(later_cases())


def _with_constants(rows: Iterable[Case]) -> tuple[tuple[Case, float], ...]:
    fitted = constants(fitted_cases())
    return tuple((case, case.seconds(fitted.reached(case))) for case in rows)


@cache
def compared() -> tuple[tuple[Case, float, float], ...]:
    """Returns the rows with the seconds of a step: leaving the row out, and with all rows."""
    rows = fitted_cases()
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
    reached = constants(fitted_cases())
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
    parts = (
        _targets(),
        _by_device(),
        _ranking(),
        _constants(),
        _zero_bubble(),
        _sources(),
        _held_back(),
        _later(),
    )
    return "\n".join([HEAD, *(line for part in parts for line in part), ""])


HEAD = """\
# Predictions and measurements

`jaxpipe.cost` predicts the time of a training step by arithmetic: a roofline of every matrix
product, the bytes of everything else, collectives over links and networks, the optimizer, and the
project's own schedules in its own simulator, with the time of every stage. This page compares it
with published measurements of other systems. It is written by
[docs/_predictions.py](_predictions.py) from the files in
[tests/cost/published](../tests/cost/published), and a test compares it with them. Of jaxpipe's
own programs ten ran on [one GPU](benchmarks.md#one-gpu), an H200, and six of them had plans: they
took 1.04 to 1.19 times as long as planned. Plans then learnt from that run what attention reaches
with heads of 64, 192 and 256 channels and products of experts in their kernel, and that storing
what layers keep takes time there too. With that four of the steps take 0.98 to 1.12 of what is
planned; the other two had kernels that plans no longer choose. On TPUs and several GPUs nobody has
measured them."""


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
    fitted = constants(fitted_cases())
    yield CONSTANTS_HEAD
    yield "| constant | values |\n|---|---|"
    for name, text in fitted.described():
        yield f"| {name} | {text} |"
    yield CONSTANTS_NOTE


CONSTANTS_HEAD = """
## Constants

These are fitted to the rows of the next sections, and no others. No row has a constant of its own,
unless it is the only one of its device and release. Plans use those of the newest release.
"""
CONSTANTS_NOTE = """
Not fitted but chosen, as round numbers, and equal for all: fused attention reaches 0.5 of the peak
in bfloat16 (but on Hopper 0.31, 0.32 and 0.30 with heads of 64, 192 and 256 channels), memory 0.8
of its bandwidth, links 0.75, networks 0.8; an operation takes 4 microseconds beside its work; 0.7
of a collective that runs beside products is hidden. A TPU without a constant has that of a v5p, and
a GPU in bfloat16 that of an A100. What the recipes say of recomputation, of layers per stage and of
communication beside products is in [docs/_published.py](_published.py). "Left out" means that the
constants are fitted to the other rows only. Where no other row has the device, it has that of a v5p
or the mean of the others."""


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


def _later() -> Iterator[str]:
    yield LATER_HEAD
    yield "| model | release or table | devices | dtype | layout | published | predicted | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for case, seconds in later():
        yield (
            f"| {case.row['model'].split(' (')[0]} | {case.row['table'].split('/')[-1]} "
            f"| {case.layout.devices} {case.device.kind} | {case.layout.dtype} | {_layout(case)} "
            f"| {case.measured:.2f} | {seconds:.2f} | {_error(seconds, case)} |"
        )
    for case in profiled_cases(LATER):
        model = " ".join(case.row["model"].split()[:2])
        yield (
            f"| {model} | table {case.row['table']} | {case.row['pp']} a100 | bf16 "
            f"| {case.row['schedule']}, {case.microbatches} microbatches | {case.measured:.2f} "
            f"| {case.predicted:.2f} | {_error(case.predicted, case)} |"
        )
    yield "\nRows of the same file from which nothing is predicted:\n"
    reasons: dict[str, int] = {}
    for row in read(LATER):
        if (why := left_out(row)) and "below" not in why:
            key = f"{row['source'].split('@')[0]}: {why}"
            reasons[key] = reasons.get(key, 0) + 1
    yield from (f"- {count} of {key}." for key, count in reasons.items())


LATER_HEAD = """
## Later releases, and other sources

Rows that came after the model was made. Of Megatron-Bridge, constants of experts are fitted to the
rows of 26.04 and 26.06, as the same layout got up to a third faster since 26.02; those rows are
above, and none of these is fitted to. Rows of the Zero Bubble paper with few microbatches are
predicted from the profile of the fewest that has one. Seconds of a step.
"""


@cache
def unfitted() -> tuple[tuple[Case, float], ...]:
    """Returns all rows with seconds that are not fitted to them."""
    return (*((case, alone) for case, alone, _ in compared()), *held_back(), *later())


def _by_device() -> Iterator[str]:
    yield BY_DEVICE_HEAD
    yield "| source | device | models | rows | dates | mean error | signed |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[tuple[str, str, bool], list[tuple[Case, float]]] = {}
    for case, seconds in unfitted():
        groups.setdefault((case.source, case.device.kind, has_experts(case)), []).append(
            (case, seconds)
        )
    for (source, kind, experts), rows in sorted(groups.items()):
        dates = sorted({case.date for case, _ in rows} - {""})
        each = [seconds / case.measured - 1 for case, seconds in rows]
        yield (
            f"| {source} | {kind} | {'with' if experts else 'without'} experts | {len(rows)} "
            f"| {' to '.join(dict.fromkeys([*dates[:1], *dates[-1:]])) or 'not stated'} "
            f"| {fmean(map(abs, each)):.1%} | {fmean(each):+.1%} |"
        )


BY_DEVICE_HEAD = """
## How far off, by source and device

All rows below but those of profiles, by constants that are not fitted to the row itself. *signed*
is the mean of errors with their sign: above zero, a step is predicted too slow.
"""


def rankings() -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yields groups of layouts of one model: what they are of, and (predicted, measured)."""
    groups: dict[str, list[tuple[float, float, str]]] = {}
    tables = [(case, case.seconds(known(case))) for case in table_5()]
    for case, seconds in (*unfitted(), *tables):
        layout = case.layout
        name = (
            f"{case.row['model'].split(' (')[0]}, {layout.devices} {case.device.kind}, "
            f"{layout.batch} x {layout.sequence:,}, {layout.dtype} {case.stack}".strip()
        )
        groups.setdefault(name, []).append((seconds, case.measured, _layout(case) + layout.remat))
    for case in (*profiled_cases(), *profiled_cases(LATER)):
        model = " ".join(case.row["model"].split()[:2])
        name = f"{model}, {case.row['pp']} a100, M {case.microbatches}"
        groups.setdefault(name, []).append((case.predicted, case.measured, case.row["schedule"]))
    for name, rows in groups.items():
        by_layout: dict[str, tuple[float, float]] = {}
        for seconds, measured, layout in sorted(rows, key=lambda row: row[1]):
            by_layout.setdefault(layout, (seconds, measured))  # of several releases the fastest
        if len(by_layout) > 1:
            yield name, list(by_layout.values())


def pairs_in_order(rows: list[tuple[float, float]]) -> list[tuple[float, bool]]:
    """Returns, of every pair of layouts, how far predictions are apart, and if in the right order.

    Args:
        rows: (predicted, measured) seconds.
    """
    pairs = combinations(rows, 2)
    return [(max(a[0], b[0]) / min(a[0], b[0]) - 1, (a < b) == (a[1] < b[1])) for a, b in pairs]


def _ranking() -> Iterator[str]:
    yield RANKING_HEAD
    yield "| model, devices, step, dtype | layouts | pairs in order | chosen is slower by |"
    yield "|---|---|---|---|"
    every: list[tuple[float, bool]] = []
    regrets = []
    for name, rows in rankings():
        pairs = pairs_in_order(rows)
        every += pairs
        regrets.append(min(rows)[1] / min(measured for _, measured in rows) - 1)
        right = sum(in_order for _, in_order in pairs)
        yield f"| {name} | {len(rows)} | {right} of {len(pairs)} | {regrets[-1]:.1%} |"
    close = [in_order for apart, in_order in every if apart < CLOSE]
    far = [in_order for apart, in_order in every if apart >= CLOSE]
    yield (
        f"\nThe fastest is chosen in {regrets.count(0.0)} of {len(regrets)} groups. Of pairs that "
        f"are predicted within {CLOSE:.0%} of each other {sum(close)} of {len(close)} are in "
        f"order, of the others {sum(far)} of {len(far)}: `jaxpipe plan` takes the simplest of "
        "plans that are so close."
    )


RANKING_HEAD = """
## Which layout is the fastest

Layouts of one model for the same tokens on the same devices, of which a planner chooses one; of
Megatron-Bridge with the releases of one constant. Where several releases measured one layout, the
fastest counts. *chosen is slower by* is what it costs to take the one that is predicted to be the
fastest.
"""


def evidence() -> dict[tuple[str, bool], tuple[int, int, float, float, str]]:
    """Returns what predictions rest on, by kind of device and whether a model has experts.

    Returns:
        Rows, rows with a pipeline, the range of measured over predicted (a tenth of the rows is
        below, a tenth above; of fewer than ten rows the least and the most), and the last date.
    """
    groups: dict[tuple[str, bool], list[tuple[Case, float]]] = {}
    for case, seconds in unfitted():
        kind = case.device.kind.removesuffix("-500w")
        groups.setdefault((kind, has_experts(case)), []).append((case, seconds))
    return {
        key: (
            len(rows),
            sum(case.layout.stage > 1 for case, _ in rows),
            *_range([case.measured / seconds for case, seconds in rows]),
            max(case.date for case, _ in rows),
        )
        for key, rows in sorted(groups.items())
    }


def _range(ratios: list[float]) -> tuple[float, float]:
    if len(ratios) < 10:
        return round(min(ratios), 2), round(max(ratios), 2)
    tenths = quantiles(ratios, n=10)
    return round(tenths[0], 2), round(tenths[-1], 2)


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
        fitted: Constants = constants(fitted_cases())
        print("\n".join(f"{name}: {text}" for name, text in fitted.described()))
        print("\n".join(f"    {key}: {row}," for key, row in evidence().items()))
    else:
        PAGE.write_text(page())
