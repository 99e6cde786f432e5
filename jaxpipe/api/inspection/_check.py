"""Compares a pipeline with the unpipelined program: loss, metrics and every gradient leaf."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, PyTree

from .._params import is_stored

TOLERANCE = 1e-5
_MAX_ROWS = 40


class Runnable(Protocol):
    """What is run here of a `PipelinedModel`."""

    def shard(self, params: PyTree) -> Any: ...
    def unshard(self, params: Any) -> PyTree: ...
    def value_and_grad(self, params: Any, batch: PyTree, key: Array | None = None) -> Any: ...
    def jit(self, function: Callable) -> Callable: ...


@dataclass(frozen=True, repr=False)
class Comparison:
    """The relative error of everything that a pipeline returns. Prints as a table.

    Attributes:
        errors: For the loss, every metric and every gradient leaf, the largest difference divided
            by the largest magnitude.
    """

    errors: dict[str, float]

    @property
    def largest(self) -> float:
        """Returns the largest of all errors; NaN if one is NaN."""
        return float(np.max(list(self.errors.values())))

    def __repr__(self) -> str:
        rows = sorted(self.errors.items(), key=lambda row: -np.nan_to_num(row[1], nan=np.inf))
        shown = {"loss"} | {name for name, _ in rows[:_MAX_ROWS]}
        width = max(map(len, shown))
        lines = [f"{'leaf':<{width}}  relative error"]
        lines += [
            f"{name:<{width}}  {e:>14.1e}" for name, e in self.errors.items() if name in shown
        ]
        if len(rows) > len(lines) - 1:
            lines.append(
                f"and {len(rows) - len(lines) + 1} leaves with smaller errors; the largest of all "
                f"is {self.largest:.1e}"
            )
        return "\n".join(lines)


def compare(got: Any, wanted: Any) -> Comparison:
    """Compares two results of `value_and_grad`.

    Args:
        got: ((loss, metrics), gradients in the user's tree).
        wanted: The same of the unpipelined program.

    Returns:
        The relative errors.

    Raises:
        AssertionError: If the results differ in structure or shape.
    """
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        raise AssertionError(
            f"The pipeline returns {jax.tree.structure(got)} and the unpipelined program "
            f"{jax.tree.structure(wanted)}."
        )
    pairs = zip(_named_leaves(got), _named_leaves(wanted), strict=True)
    return Comparison({name: _relative_error(name, x, true) for (name, x), (_, true) in pairs})


def require(comparison: Comparison, tolerance: float, what: str) -> None:
    """Raises an error if a result is not close enough.

    Args:
        comparison: The relative errors.
        tolerance: The largest that is accepted.
        what: What was compared, the subject of the message.

    Returns:
        None.

    Raises:
        AssertionError: If an error is larger, or NaN. It names the leaf.
    """
    worse = [(name, e) for name, e in comparison.errors.items() if not e <= tolerance]
    if worse:
        name, error = worse[0]
        more = f" and {len(worse) - 1} others are" if len(worse) > 1 else " is"
        raise AssertionError(
            f"{what} differs from the unpipelined program: {name} (relative error {error:.1e})"
            f"{more} above `tolerance` = {tolerance:g}.\n{comparison}"
        )


def check(
    pipe: Runnable,
    plain: Runnable,
    params: PyTree,
    batch: PyTree,
    key: Array | None,
    tolerance: float,
) -> Comparison:
    """Compares a pipeline with the unpipelined program on the same devices.

    Args:
        pipe: The pipeline.
        plain: The unpipelined program.
        params: Parameters from `pipe.shard`, or the user's tree.
        batch: [B, ...] leaves.
        key: The dropout key of the step, or None.
        tolerance: The largest relative error that is accepted.

    Returns:
        The relative errors.

    Raises:
        AssertionError: If an error is larger.
    """
    stored = params if is_stored(params) else pipe.shard(params)
    # From the host: what `unshard` returns may be on other devices than the plain program's.
    whole = jax.device_get(pipe.unshard(stored))
    wanted = run_value_and_grad(plain, plain.shard(whole), batch, key)
    found = compare(run_value_and_grad(pipe, stored, batch, key), wanted)
    require(found, tolerance, "The pipeline")
    return found


def run_value_and_grad(pipe: Runnable, params: PyTree, batch: PyTree, key: Array | None) -> Any:
    """Runs `value_and_grad`.

    Args:
        pipe: The pipeline.
        params: Parameters from `pipe.shard`.
        batch: [B, ...] leaves.
        key: The dropout key of the step, or None.

    Returns:
        ((loss, metrics), gradients in the user's tree), on the host.
    """
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    value, grads = step(params, batch)
    return jax.tree.map(np.asarray, (value, jax.device_get(pipe.unshard(grads))))


def _named_leaves(result: Any) -> Iterator[tuple[str, np.ndarray]]:
    (loss, metrics), grads = result
    for start, tree in (("loss", loss), ("metrics", metrics), ("gradients", grads)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            yield start + jax.tree_util.keystr(path), leaf


def _relative_error(name: str, x: Any, true: Any) -> float:
    if x.shape != true.shape:
        raise AssertionError(
            f"{name} is {x.shape} from the pipeline and {true.shape} from the unpipelined program."
        )
    x, true = x.astype(np.float64), true.astype(np.float64)
    difference = np.max(np.abs(x - true), initial=0.0)
    scale = np.max(np.abs(true), initial=0.0)
    if difference == 0:
        return 0.0
    return float(difference / scale) if scale else float("inf")
