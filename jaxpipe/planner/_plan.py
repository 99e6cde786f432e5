"""Plans a training step: from a request, or a model of plain functions, to the fastest layouts."""

import time
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from ..api import Model
from ..engines import PeakMemory
from ._answer import Plans, describe, unit_of_bytes
from ._devices import parse_devices
from ._own_model import NOT_CHOSEN, fix_space, own_request
from ._request import Request, usable_bytes
from ._search import BestPlans, search

_GB = 1e9


def plan_request(request: Request, num_plans: int) -> Plans:
    """Returns the fastest plans of a request; raises a `ValueError` if no layout fits."""
    started = time.perf_counter()
    best = search(request, num_plans)
    if not best.plans:
        raise ValueError(_nothing_fits(request, best))
    return Plans(request, best, time.perf_counter() - started)


def plan_own(
    model: Model,
    devices: str,
    params: PyTree,
    example: PyTree,
    *,
    batch: int | None = None,
    num_slices: int = 1,
    memory_gb: float | None = None,
    max_stages: int | None = None,
    schedule: str | None = None,
    num_plans: int = 5,
    mesh: Mapping[str, int] | None = None,
    **fixed: Any,
) -> Plans:
    """Returns the fastest plans of a model of plain functions, as `jaxpipe.plan` does.

    Raises:
        ValueError: If a value is wrong, or no layout fits.
    """
    spread = parse_devices(devices, num_slices)
    counts = {name: fixed.pop(name) for name in ("microbatches", "chunks") if name in fixed}
    _check_own(params, example, **fixed)
    rows = batch or jax.tree.leaves(example)[0].shape[0]
    limit = usable_bytes(spread, memory_gb)
    request = own_request(model, params, example, spread, rows, limit)
    request = fix_space(request, max_stages=max_stages, schedule=schedule, mesh=mesh, counts=counts)
    return plan_request(request, num_plans)


def _check_own(params: PyTree, example: PyTree, **others: Any) -> None:
    """Checks the arguments that a model of the user's own needs, and those that it has not."""
    if params is None or example is None:
        raise ValueError("`model` is your own. Give its `params` and an `example` batch.")
    unread = [f"`{name}`" for name, value in others.items() if value is not None]
    if unread:
        raise ValueError(
            f"`model` is your own, which has no {', '.join(unread)}. The batch has the length of "
            "sequences, and `schedule`, `max_stages`, `mesh`, `microbatches` and `chunks` can be "
            "given."
        )


def _nothing_fits(request: Request, best: BestPlans) -> str:
    """Returns the reason that there is no plan."""
    devices = request.devices
    if best.leanest is None:
        return (
            f"No layout of {devices.num_devices} devices divides {request.batch} sequences of "
            f"{request.sequence} tokens and {request.space.num_layers} layers as given"
            f"{_given(request)}. Give another batch, or fix fewer keys."
        )
    candidate, needed = best.leanest
    if needed.total > request.limit:
        name, unit = unit_of_bytes(needed.total)
        kinds = ", ".join(_kinds(needed, unit))
        return (
            f"No layout fits: the leanest ({describe(candidate)}) needs {needed.total / unit:.1f} "
            f"{name} on a device of {request.limit / unit:.1f}, "
            f"{(needed.total - request.limit) / unit:.1f} {name} too much: {kinds}. Use more "
            "devices, or smaller sequences."
        )
    reasons = "\n".join(dict.fromkeys(best.refused[:3]))
    return f"Layouts fit, but the trainer refuses them{_given(request)}:\n{reasons}"


def _given(request: Request) -> str:
    implied = NOT_CHOSEN if request.source.is_own else {}
    fixed_fields = {key: value for key, value in request.space.fixed.items() if key not in implied}
    fixed = ", ".join(f"{name} {value}" for name, value in fixed_fields.items())
    return f" (given: {fixed})" if fixed else ""


def _kinds(needed: PeakMemory, unit: float) -> list[str]:
    sizes = sorted(vars(needed).items(), key=lambda pair: -pair[1])
    return [f"{kind} {size / unit:.1f}" for kind, size in sizes if size > 0.01 * needed.total]
