"""The differences between what a pipeline computes and what the user's program computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..reference import Result

TOLERANCE = 1e-5
_MAX_ROWS = 40


@dataclass(frozen=True)
class CheckedStep:
    """A step of a pipeline that is compared with the user's program.

    Attributes:
        stored: The parameters as the pipeline stores them.
        whole: The parameters in the user's tree.
        key: The dropout key. None if no function of the model takes one.
        plain: The user's program. None for the functions of the model.
    """

    pipe: Any
    stored: PyTree
    whole: PyTree
    batch: PyTree
    key: Array | None
    plain: Callable | None = None


@dataclass(frozen=True, repr=False)
class Comparison:
    """The relative error of everything that a pipeline returns. Prints as a table.

    Attributes:
        errors: For the loss, every metric, every gradient leaf and, after steps of an optimizer,
            every parameter, the largest difference divided by the largest magnitude.
        tolerance: The largest error that is accepted.
        reference: The program that the pipeline is compared with, and the reason for the tolerance.
        rounding: The largest error that rounding explains, the default of the tolerance.
        dtype: The narrowest dtype that the user's program computes with.
        noise: The names of results that are zero but for rounding, such as the gradient of a bias
            of keys of attention: the user's program in float32 is as far from itself in float64.
    """

    errors: dict[str, float]
    tolerance: float = TOLERANCE
    reference: str = ""
    rounding: float = TOLERANCE
    dtype: Any = jnp.float32
    noise: frozenset[str] = frozenset()

    @property
    def largest(self) -> float:
        """Returns the largest of all errors but those of noise; NaN if one is NaN."""
        return float(np.max([x for name, x in self.errors.items() if name not in self.noise]))

    @property
    def worse(self) -> list[str]:
        """Returns the names of results with an error above the tolerance, or NaN; without noise."""
        errors = self.errors.items()
        return [name for name, x in errors if not x <= self.tolerance and name not in self.noise]

    @property
    def worst(self) -> str:
        """Returns the name of the result whose error is the largest, or NaN."""
        return largest_error(self.errors)

    def __repr__(self) -> str:
        rows = sorted(self.errors.items(), key=lambda row: -np.nan_to_num(row[1], nan=np.inf))
        shown = {"loss"} | {name for name, _ in rows[:_MAX_ROWS]}
        width = max(map(len, shown))
        lines = [f"{'leaf':<{width}}  relative error"]
        lines += [
            f"{name:<{width}}  {e:>14.1e}{'  (rounding)' * (name in self.noise)}"
            for name, e in self.errors.items()
            if name in shown
        ]
        if len(rows) > len(lines) - 1:
            lines.append(
                f"and {len(rows) - len(lines) + 1} leaves with smaller errors; the largest of all "
                f"is {self.largest:.1e}"
            )
        return "\n".join([*lines, *([self.reference] if self.reference else [])])


def largest_error(errors: dict[str, float]) -> str:
    """Returns the name of the largest error; NaN is larger than any other."""
    return max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))


def compare(got: Result, wanted: Result) -> dict[str, float]:
    """Compares two results of a program."""
    for what, ours, theirs in (
        ("metrics", got.metrics, wanted.metrics),
        ("gradients", got.grads, wanted.grads),
    ):
        if set(ours) != set(theirs):
            only = sorted(set(ours) ^ set(theirs))
            raise AssertionError(
                f"The pipeline returns the {what} {sorted(ours)[:8]} and the user's program "
                f"{sorted(theirs)[:8]}: only one of them has {', '.join(only[:8])}."
            )
    expected = _by_name(wanted)
    return {name: _relative_error(name, x, expected[name]) for name, x in _by_name(got).items()}


def noise(got: Result, wanted: Result, exact: Result, tolerance: float) -> frozenset[str]:
    """Returns the names of results that are rounding, so that no program meets the tolerance.

    The user's program misses the tolerance itself, and the pipeline by four times as much, or four
    roundings of the largest gradient, at most.
    """
    ours, theirs, true = map(_by_name, (got, wanted, exact))
    rounding = _rounding(exact)
    names = set()
    for name in set(ours) & set(theirs) & set(true):
        of_pipe, of_user = (_magnitude(x[name] - true[name]) for x in (ours, theirs))
        misses = of_user > tolerance * _magnitude(true[name])
        if misses and of_pipe <= 4 * max(of_user, rounding):
            names.add(name)
    return frozenset(names)


_ZERO = 1e-3
"""Roundings in float32 that are zero in float64, which rounds 5e8 times as finely."""


def zeros(got: Result, wanted: Result, exact: Result) -> frozenset[str]:
    """Returns the names of gradients that are zero in `exact`, and rounding in the two others.

    `exact` may have other dropout masks: what is zero with these is so with any.
    """
    rounding = _rounding(exact)
    return frozenset(
        f"gradients{name}"
        for name, true in exact.grads.items()
        if _magnitude(true) <= _ZERO * rounding
        and max(_magnitude(got.grads[name]), _magnitude(wanted.grads[name])) <= 4 * rounding
    )


def _rounding(exact: Result) -> float:
    """Returns a rounding in float32 of the largest gradient."""
    largest = max((_magnitude(x) for x in exact.grads.values()), default=0.0)
    return float(jnp.finfo(jnp.float32).eps) * largest


def _by_name(result: Result) -> dict[str, Any]:
    metrics = {f"metrics[{name!r}]": x for name, x in result.metrics.items()}
    grads = {f"gradients{name}": x for name, x in result.grads.items()}
    return {"loss": result.loss} | metrics | grads


def _magnitude(x: Any) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def compare_leaves(start: str, got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Returns the relative errors of leaves by name."""
    return {f"{start}{name}": _relative_error(name, got[name], x) for name, x in wanted.items()}


ROUNDINGS_PER_LAYER = 32
"""Results of a transformer's layer that are rounded one after the other, forwards and backwards."""


def default_tolerance(dtype: Any, num_layers: int) -> tuple[float, str]:
    """Returns the largest relative error that rounding explains, and what it is for.

    Returns:
        (tolerance, text). For float32 1e-5, for float64 1e-12. Of 16 bits so many are lost in every
        operation that depth counts. Two programs round at other places, as XLA keeps float32 inside
        of what it fuses: after n roundings in a row, each of half an eps, they differ by
        sqrt(n) / 2 eps.
    """
    bits, eps, name = jnp.finfo(dtype).bits, float(jnp.finfo(dtype).eps), jnp.dtype(dtype).name
    if bits >= 32:
        tolerance = 1e-12 if eps < 1e-10 else TOLERANCE
        return tolerance, f"tolerance {tolerance:g}, for {name}"
    count = 0.5 * (ROUNDINGS_PER_LAYER * (num_layers + 1)) ** 0.5
    text = f"{count:.1f} eps of {name}, in which {num_layers} layers round at other places"
    return count * eps, f"tolerance {count * eps:.2g}, {text}"


def tolerance_of_function(dtype: Any) -> float:
    """Returns the largest relative error that rounding explains in one function of a model."""
    return max(TOLERANCE, 2 * float(jnp.finfo(dtype).eps))


def _relative_error(name: str, x: Any, true: Any) -> float:
    x, true = np.asarray(x), np.asarray(true)
    if x.shape != true.shape:
        raise AssertionError(
            f"{name} is {x.shape} from the pipeline and {true.shape} from the user's program."
        )
    is_complex = any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in (x, true))
    dtype = np.complex128 if is_complex else np.float64
    x, true = x.astype(dtype), true.astype(dtype)
    difference = np.max(np.abs(x - true), initial=0.0)
    scale = np.max(np.abs(true), initial=0.0)
    if difference == 0:
        return 0.0
    return float(difference / scale) if scale else float("inf")
