"""Fits the constants of the time model to published measurements."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from statistics import fmean, median

from _published import TORCHTITAN, Case, has_experts

from jaxpipe.cost.training_step import Efficiency, efficiency

_LEAST, _MOST = 0.05, 1.0

CHIPS = {"gb200": "b200", "gb300": "b300"}
"""Kinds of devices with the chip of another, whose products are as efficient."""

Rows = tuple[Case, ...]


@dataclass(frozen=True)
class Constants:
    """What is fitted.

    Attributes:
        products: By chip, what large products reach of the peak in fp8, or in bfloat16 if it is an
            A100 or a v5p.
        dtypes: By dtype, what other dtypes reach of that.
        experts: By kind of device and release, what products of experts reach of what equally large
            ones do.
        attention: What PyTorch's attention reaches on the GPUs of torchtitan's report.
    """

    products: dict[str, float]
    dtypes: dict[str, float]
    experts: dict[tuple[str, str], float]
    attention: float

    def reached(self, case: Case) -> Efficiency:
        """Returns the efficiency of a case."""
        known = _known(case)
        if case.source == TORCHTITAN:
            return replace(known, attention=self.attention)
        chip = _chip(case)
        if chip not in self.products and case.device.torus_axes:
            chip = "v5p"
        products = self.products.get(chip, fmean(self.products.values()))
        products *= self.dtypes.get(case.layout.dtype, 1.0)
        if case.layout.dtype == "bf16" and not case.device.torus_axes and _chip(case) != "a100":
            products = known.products
        return replace(known, products=products, experts=self.experts_of(case))

    def experts_of(self, case: Case) -> float:
        """Returns what experts reach: of the release, or of the nearest that has a row."""
        releases = sorted(stack for kind, stack in self.experts if kind == case.device.kind)
        if not releases:
            return median(self.experts.values() or [1.0])
        before = [stack for stack in releases if stack <= case.stack]
        return self.experts[case.device.kind, before[-1] if before else releases[0]]

    @property
    def newest(self) -> dict[str, float]:
        """What experts reach with the newest release that has a row, by kind of device."""
        return {kind: self.experts[kind, stack] for kind, stack in sorted(self.experts)}

    def described(self) -> Iterator[tuple[str, str]]:
        """Yields what the constants are, and their values."""
        yield "large products, of the peak, by chip", _listed(self.products)
        yield "another dtype, of fp8, or of bfloat16 on v5p", _listed(self.dtypes)
        by_release = {f"{kind} {stack}".strip(): v for (kind, stack), v in self.experts.items()}
        yield (
            "products of experts, of equally large ones, by device and release",
            _listed(by_release),
        )
        yield "attention of PyTorch in torchtitan's report, of the peak", f"{self.attention:.2f}"


def constants(rows: Rows) -> Constants:
    """Returns the constants that rows suggest."""
    return Constants(
        *_products(tuple(case for case in rows if not has_experts(case))),
        _experts(rows),
        median(suggested(case, "attention") for case in rows if case.source == TORCHTITAN),
    )


def without(case: Case, rows: Rows) -> Constants:
    """Returns the constants that the other rows suggest, as far as they matter for one."""
    others = tuple(other for other in rows if other is not case)
    if has_experts(case):  # the fit of products has no rows with experts
        return replace(constants(rows), experts=_experts(others, rows))
    if case.source == TORCHTITAN:
        return replace(constants(rows), attention=constants(others).attention)
    products, dtypes = _products(tuple(case for case in others if not has_experts(case)))
    return Constants(products, dtypes, {}, 1.0)


@cache
def _products(rows: Rows) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the constants of products, by chip and by dtype.

    The logarithm is a sum of a number of the chip and one of the dtype, found by alternating means.
    """
    rows = tuple(case for case in rows if case.source != TORCHTITAN)
    wanted = [(_chip(case), case.layout.dtype, log(suggested(case, "products"))) for case in rows]
    chips = dict.fromkeys((chip for chip, _, _ in wanted), 0.0)
    dtypes = dict.fromkeys((d for _, d, _ in wanted if d not in ("bf16", "fp8")), 0.0)
    for _ in range(50):
        for chip in chips:
            chips[chip] = fmean(w - dtypes.get(d, 0.0) for c, d, w in wanted if c == chip)
        for dtype in dtypes:
            dtypes[dtype] = fmean(w - chips[c] for c, d, w in wanted if d == dtype)
    return (
        {name: exp(value) for name, value in chips.items()},
        {name: exp(value) for name, value in dtypes.items()},
    )


def _experts(rows: Rows, all_rows: Rows = ()) -> dict[tuple[str, str], float]:
    """Returns the median of what rows suggest for experts, by kind of device and release."""
    all_rows = all_rows or rows
    products, dtypes = _products(tuple(case for case in all_rows if not has_experts(case)))
    first = Constants(products, dtypes, {("", ""): 1.0}, 1.0)
    found: dict[tuple[str, str], list[float]] = {}
    for case in rows:
        if has_experts(case):
            value = suggested(case, "experts", first.reached(case))
            found.setdefault((case.device.kind, case.stack), []).append(value)
    return {key: median(values) for key, values in found.items()}


def _known(case: Case) -> Efficiency:
    """Returns the efficiency that the package has, but that of cuDNN for PyTorch's attention."""
    known = efficiency(case.known_device, case.layout.dtype)
    return replace(known, attention_by_heads=False) if case.source == TORCHTITAN else known


def _chip(case: Case) -> str:
    return CHIPS.get(case.device.kind, case.device.kind)


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


_Key = tuple[int, str, Efficiency]
_SUGGESTED: dict[_Key, tuple[Case, float]] = {}


def suggested(case: Case, name: str, reached: Efficiency | None = None) -> float:
    """Returns the value of a constant with which the prediction equals the measurement.

    Seconds are nearly a + b / value, so two predictions say enough.
    """
    reached = reached or _known(case)
    key = id(case), name, reached
    if key not in _SUGGESTED:  # the case stays alive, so that no other has its id
        first, second = 0.4, 0.7
        slow, fast = (case.seconds(replace(reached, **{name: v})) for v in (first, second))
        b = (slow - fast) / (1 / first - 1 / second)
        rest = case.measured - (slow - b / first)
        _SUGGESTED[key] = case, min(_MOST, max(_LEAST, b / rest)) if rest > 0 else _MOST
    return _SUGGESTED[key][1]
