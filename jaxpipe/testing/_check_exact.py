"""Runs a model under every engine, schedule and number of ranks that fits, and compares.

M microbatches, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from ..api import Model, PipelinedModel, pipeline
from ..api.inspection import (
    CheckedStep,
    Comparison,
    Reference,
    compared,
    reference_result,
    require,
    run,
)
from ..engines import ENGINES
from ..schedules import FAMILIES


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


SCHEDULES = tuple(
    name
    for name, family in FAMILIES.items()
    if not family.is_variant and "slices" not in family.takes
)
"""Families that any model can be run with, of each kind one."""
_MAX_COUNTS = 3
"""How many numbers of microbatches are tried until one fits a schedule."""


def check_exact(
    model: Model,
    params: PyTree,
    batch: PyTree,
    *,
    ranks: Sequence[int] = (2, 3, 4, 8),
    schedules: Sequence[str] = SCHEDULES,
    engines: Sequence[str] = tuple(ENGINES),
    key: Array | None = None,
    tolerance: float | None = None,
    raises: bool = True,
    **options: Any,
) -> ExactnessTable:
    """Compares a model with the user's own program under every engine, schedule and rank count.

    Loss, metrics and every gradient leaf are compared with those of the model's functions one after
    another, on the whole batch and on one device, as by `PipelinedModel.check`. Cases that cannot
    run, such as more stages than layers, are listed with the reason. Each case compiles a program,
    so give a small model.

    Args:
        model: The user's functions, without a pipeline.
        params: The parameters, in the tree that the functions of `model` read.
        batch: [B, ...] leaves. M is the least number that divides B and suits the schedule, if
            possible not less than the number of ranks.
        ranks: Numbers of ranks; as many devices are needed as the largest.
        schedules: Names of families in `jaxpipe.schedules`.
        engines: Names of engines. One that runs none of `schedules` is run without a schedule.
        key: The dropout key of the step. None if no function of the model takes one.
        tolerance: The largest relative error that is accepted: the largest difference divided by
            the largest magnitude of the leaf. Default: by dtype, as for `PipelinedModel.check`.
        raises: Whether the first failure ends the check; otherwise the table says what failed.
        **options: Further arguments of `pipeline`, such as `remat`.

    Returns:
        All cases, which print as a table.

    Raises:
        AssertionError: If an error is larger than `tolerance`. It names the case and the leaf, and
            the function of the model that is the cause, if one is.
        ValueError: If a name is unknown, or nothing fits.
    """
    _check_names("schedules", schedules, FAMILIES)
    _check_names("engines", engines, ENGINES)

    def step_of(pipe: PipelinedModel, stored: PyTree = None) -> CheckedStep:
        return CheckedStep(pipe, stored, params, batch, key if pipe.takes_key else None)

    reference = _references()
    alone = pipeline(model, schedule=None, mesh=_mesh(1), microbatches=1)
    reference(step_of(alone))  # raises what the model's own functions raise

    def case(engine: str, schedule: str | None, num_ranks: int) -> Case:
        pipe_or_reason = _pipeline(model, params, batch, engine, schedule, num_ranks, options)
        if isinstance(pipe_or_reason, str):
            return Case(engine, schedule, num_ranks, None, pipe_or_reason)
        step = step_of(*pipe_or_reason)
        comparison = compared(step, run(step), reference(step), tolerance)
        if raises:
            what = f"{engine} with {schedule or 'no schedule'} at {num_ranks} ranks"
            require(step, comparison, what)
        return Case(engine, schedule, num_ranks, comparison, "")

    cases: list[Case] = []
    for engine in engines:
        of_engine = [case(engine, schedule, n) for schedule in schedules for n in ranks]
        if not any(c.comparison for c in of_engine):
            of_engine += [case(engine, None, n) for n in ranks]
        cases += of_engine
    tolerances = [c.comparison.tolerance for c in cases if c.comparison]
    table = ExactnessTable(tuple(cases), tolerances[0] if tolerances else 0.0)
    if not tolerances:
        raise ValueError(f"Nothing fits the model and the batch.\n{table}")
    return table


def _check_names(argument: str, names: Sequence[str], valid: Any) -> None:
    unknown = [name for name in names if name not in valid]
    if unknown:
        raise ValueError(f"`{argument}` has {unknown[0]!r}. Valid names: {', '.join(valid)}.")


def _references() -> Callable[[CheckedStep], Reference]:
    """Returns a function from a step to the results of the user's program, each run once."""
    by_kind: dict[Any, Reference] = {}

    def reference(step: CheckedStep) -> Reference:
        # Only dropout, and what is frozen, make it another program for another pipeline.
        count = step.pipe.num_microbatches if step.pipe.takes_key else 1
        kind = count, step.pipe.frozen is None
        if kind not in by_kind:
            by_kind[kind] = reference_result(step)
        return by_kind[kind]

    return reference


def _pipeline(
    model: Model,
    params: PyTree,
    batch: PyTree,
    engine: str,
    schedule: str | None,
    num_ranks: int,
    options: dict[str, Any],
) -> tuple[PipelinedModel, PyTree] | str:
    """Returns the pipeline and its parameters, with the first M that fits; or why none does."""
    if num_ranks > jax.device_count():
        return (
            f"there are {jax.device_count()} devices; `jaxpipe.emulate_devices({num_ranks})` "
            "emulates more on a CPU"
        )
    reasons = []
    for count in _microbatch_counts(batch, num_ranks)[:_MAX_COUNTS]:
        try:
            pipe = pipeline(
                model,
                schedule=schedule,
                mesh=_mesh(num_ranks),
                microbatches=count,
                engine=engine,
                **options,
            )
            stored = pipe.shard(params)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return pipe, stored
    return reasons[-1]


def _microbatch_counts(batch: PyTree, num_ranks: int) -> list[int]:
    """Returns numbers of microbatches to try: those that divide the rows, best first."""
    rows = jnp.shape(jax.tree.leaves(batch)[0])[0]
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return sorted(divisors, key=lambda n: (n < num_ranks, abs(n - num_ranks)))


def _mesh(num_ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_ranks]), ("stage",))
