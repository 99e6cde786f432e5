"""The results of many comparisons, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..api.inspection import Comparison


@dataclass(frozen=True)
class Case:
    """One engine and schedule on a number of ranks."""

    engine: str
    schedule: str | None  # the family of schedules; None without one
    num_ranks: int  # S
    comparison: Comparison | None  # the relative errors; None if the case does not fit
    reason: str  # why the case does not fit; "" if it does


@dataclass(frozen=True, repr=False)
class ExactnessTable:
    """All cases of a check. Prints as a table of the largest relative errors."""

    cases: tuple[Case, ...]
    tolerance: float  # the largest relative error that is accepted

    @property
    def failed(self) -> tuple[Case, ...]:
        """Returns the cases whose errors are larger than the tolerance."""
        ran = (case for case in self.cases if case.comparison is not None)
        return tuple(c for c in ran if c.comparison and not c.comparison.largest <= self.tolerance)

    @property
    def largest(self) -> float:
        """Returns the largest relative error of all cases."""
        return max(c.comparison.largest for c in self.cases if c.comparison is not None)

    def __repr__(self) -> str:
        ran = [case for case in self.cases if case.comparison is not None]
        ranks = sorted({case.num_ranks for case in self.cases})
        cells = {
            (c.engine, c.schedule, c.num_ranks): f"{c.comparison.largest:.1e}"
            + "*" * (c in self.failed)
            for c in ran
            if c.comparison
        }
        rows = dict.fromkeys((case.engine, case.schedule) for case in ran)
        table = [("engine", "schedule", *(f"{n} ranks" for n in ranks))]
        table += [(e, s or "-", *(cells.get((e, s, n), "-") for n in ranks)) for e, s in rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        lines.append(f"{len(ran)} cases; largest relative errors of loss, metrics and gradients")
        if self.failed:
            lines.append(f"* above `tolerance` = {self.tolerance:g}")
        return "\n".join([*lines, *_not_fitting(self.cases)])


def _not_fitting(cases: Sequence[Case]) -> list[str]:
    """Returns lines that say which cases do not fit, by reason."""
    by_reason: dict[tuple[str, str], dict[str, list[int]]] = {}
    for case in cases:
        if case.comparison is None:
            schedules = by_reason.setdefault((case.engine, case.reason), {})
            schedules.setdefault(case.schedule or "no schedule", []).append(case.num_ranks)
    lines = ["do not fit:"] if by_reason else []
    for (engine, reason), schedules in by_reason.items():
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for schedule, ranks in schedules.items():
            by_ranks.setdefault(tuple(ranks), []).append(schedule)
        named = "; ".join(
            f"{', '.join(names)} at {', '.join(map(str, ranks))} ranks"
            for ranks, names in by_ranks.items()
        )
        lines.append(f"  {engine}, {named}: {reason}")
    return lines
