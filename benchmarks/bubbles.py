"""Bubbles and memory of schedules in the simulator, beside the closed forms of their papers.

    python benchmarks/bubbles.py

The first table has 8 ranks and 32 microbatches, and F, I and W of a rank take equally long. Bubbles
are in units of F of a whole rank: `whole` from the first start to the last end, `of a rank` the
most that one rank waits between its own start and end, as the zero-bubble papers count. `peak` is
the most that a rank stores, in activations of a microbatch on a whole rank.

The second table has the profiles of Zero Bubble (arXiv 2401.10241, tables 9 and 5): fractions of a
step in which ranks wait, published and simulated. Nothing is measured, and no JAX is needed.
"""

import csv
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from jaxpipe import schedules
from jaxpipe.schedules.analysis import parallelogram_bubble, rectangular_bubble
from jaxpipe.schedules.language import num_slices

RANKS, MICROBATCHES = 8, 32
PROFILES = Path(__file__).parents[1] / "tests" / "cost" / "published" / "zero_bubble_profile.csv"
PUBLISHED = {"1f1b": "1F1B", "zero_bubble_h1": "ZB_H1", "zero_bubble_h2": "ZB_H2"}
"""Families, and their names in the paper's tables."""


class Form(NamedTuple):
    """A family and what its paper says, in F of a whole rank, for p ranks of v chunks.

    Attributes:
        name: The name for `schedules.build`.
        options: Chunks or slices.
        bubble: The closed form of the bubble.
        is_whole: Whether that is the bubble of the whole step, not of a rank.
        text: The closed form as text.
    """

    name: str
    options: dict[str, int]
    bubble: Callable[[int], Fraction | int]
    is_whole: bool
    text: str


FORMS = (
    Form("gpipe", {}, lambda p: 3 * (p - 1), True, "(p-1)(F+B)"),
    Form("1f1b", {}, lambda p: 3 * (p - 1), True, "(p-1)(F+B)"),
    Form("eager_1f1b", {}, lambda p: 3 * (p - 1), True, "(p-1)(F+B)"),
    Form(
        "interleaved_1f1b",
        {"chunks": 2},
        lambda p: Fraction(3 * (p - 1), 2),
        True,
        "(p-1)(F+B)/v",
    ),
    Form("looped_bfs", {"chunks": 2}, lambda p: Fraction(3 * (p - 1), 2), True, "(p-1)(F+B)/v"),
    Form("seq1f1b", {"slices": 2}, lambda p: Fraction(3 * (p - 1), 2), True, "(p-1)(F+B)/s"),
    Form("zero_bubble_h1", {}, lambda p: p - 1, True, "(p-1)(F+I-W)"),
    Form("zero_bubble_h2", {}, lambda p: 0, False, "(p-1)(F+I-2W)"),
    Form(
        "interleaved_zero_bubble",
        {"chunks": 2},
        lambda p: Fraction(p - 1, 2),
        True,
        "(p-1)(F+I-W)/v",
    ),
    Form("zbv", {}, lambda p: 0, False, "0 if F=I=W"),
    Form("dualpipe", {}, lambda p: p - 2, True, "(p/2-1)(F&B+B-3W)"),
    Form("dualpipev", {}, lambda p: p - 1, True, "(p-1)(F&B+B-3W)/2"),
)


def main() -> None:
    print(
        f"{'schedule':<24}{'whole':>7}{'of a rank':>11}{'paper':>7}  {'closed form':<22}{'peak':>6}"
    )
    for form in FORMS:
        print(_form_line(form))
    print(f"\n{'ranks x M':<12}" + "".join(f"{f'{n}: paper, ours':>29}" for n in PUBLISHED))
    with PROFILES.open() as file:
        for row in csv.DictReader(file):
            print(_profile_line(row))


def _form_line(form: Form) -> str:
    schedule = schedules.build(form.name, ranks=RANKS, microbatches=MICROBATCHES, **form.options)
    timeline = schedules.simulate(schedule, schedules.Costs(1, 1, 1))
    parts = Fraction(schedule.num_stages * num_slices(schedule), RANKS)
    whole, rank = rectangular_bubble(timeline) / parts, parallelogram_bubble(timeline) / parts
    peak = max(schedules.peak_activations(schedule)) / parts
    return (
        f"{form.name:<24}{float(whole):>7.1f}{float(rank):>11.1f}"
        f"{float(form.bubble(RANKS)):>7.1f}  {form.text:<22}{float(peak):>6.1f}"
    )


def _profile_line(row: dict[str, str]) -> str:
    ranks, microbatches = int(row["p"]), int(row["m"])
    times = [float(row[f"T_{kind}_ms"]) for kind in ("F", "B", "W", "comm")]
    costs = schedules.Costs(*times[:3], transfer=times[3])
    work, cells = microbatches * sum(times[:3]), []
    for name, column in PUBLISHED.items():
        schedule = schedules.build(name, ranks=ranks, microbatches=microbatches)
        wait = parallelogram_bubble(schedules.simulate(schedule, costs))
        published = float(row[f"bubble_{column}"])
        cells.append(f"{published:>21.2%}{float(wait / (wait + work)):>8.2%}")
    return f"{ranks:>3} x {microbatches:<6}" + "".join(cells)


if __name__ == "__main__":
    main()
