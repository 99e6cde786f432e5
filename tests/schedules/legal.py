"""Random schedules, and which counts each family takes: from the papers' words, not the code."""

from typing import Any, NamedTuple

from hypothesis import strategies as st

from jaxpipe.schedules import FAMILIES, Schedule, build


class Case(NamedTuple):
    """Arguments of `build`."""

    name: str
    ranks: int
    microbatches: int
    options: dict[str, Any]


def is_legal(case: Case) -> bool:
    name, p, m, options = case
    g = options.get("group")
    if FAMILIES[name].takes == ("chunks", "group") and name != "grouped_interleaved":
        return (
            m % max(1, m // p) == 0
            if g is None
            else m <= g or (g >= p and (m % g == 0 or m % g >= p))
        )
    latency = options.get("latency", 0)
    return {
        "grouped_interleaved": g is None or (p + 1) // 2 <= g <= p,
        "circular": m % p == 0,
        "zero_bubble_h1": m >= p,
        "zero_bubble_h2": m >= int(2 * p - 1 + 2 * (p - 1) * latency),
        "dualpipe": p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
        "dualpipev": m >= 2 * p,
    }.get(name, True)


_OPTIONS = {
    "chunks": st.integers(1, 3),
    "group": st.integers(1, 12),
    "slices": st.integers(1, 3),
    "latency": st.sampled_from([0, 0.5, 1]),
    "spare": st.integers(0, 2),
}


@st.composite
def counts(draw: st.DrawFn) -> Case:
    """A family and arguments it takes, legal or not."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    given = [option for option in FAMILIES[name].takes if draw(st.booleans())]
    options = {option: draw(_OPTIONS[option]) for option in given}
    return Case(name, draw(st.integers(1, 5)), draw(st.integers(1, 12)), options)


def cases() -> st.SearchStrategy[Case]:
    """Any schedule of any family.

    Not built yet: beartype looks at random items of a list, which hypothesis forbids in a strategy.
    """
    return counts().filter(is_legal)


def made(case: Case) -> Schedule:
    return build(case.name, ranks=case.ranks, microbatches=case.microbatches, **case.options)
