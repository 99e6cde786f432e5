"""Plans a training step: from a model, devices and a batch to the fastest layouts that fit."""

import time
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from ._answer import Plans, describe, unit_of_bytes
from ._devices import parse_devices
from ._own_model import NOT_CHOSEN, fix_space, own_request
from ._request import OwnModel, Request, make_request, usable_bytes
from ._search import BestPlans, search
from .memory import PeakMemory

_GB = 1e9


def plan(
    model: str | Mapping[str, Any] | OwnModel,
    devices: str,
    batch: int | None = None,
    sequence: int | None = None,
    *,
    num_slices: int = 1,
    memory_gb: float | None = None,
    max_stages: int | None = None,
    schedule: str | None = None,
    num_plans: int = 5,
    params: PyTree = None,
    example: PyTree = None,
    **fixed: Any,
) -> Plans:
    """Plans a training step: how to spread it over devices so that it fits and takes least time.

    Nothing is compiled or allocated, and no device is needed. Mesh, engine, schedule, microbatches,
    layers per stage, rematerialization and the gathers of weights are chosen; what is given is
    kept.

    Args:
        model: The name of a preset, the values of keys of a run, or a `Model` of your own, whose
            layer is traced and counted.
        devices: The devices: `v5p-64`, `v6e:4x4`, `h100:2x8`, or `here`.
        batch: Sequences of a step. Default: `per_device_batch_size` times the devices.
        sequence: Tokens of a sequence. Default: `max_target_length`.
        num_slices: The number of slices of TPUs.
        memory_gb: The memory of a device that may be used, in 1e9 bytes. Default: 95% of it.
        max_stages: The most ranks of a pipeline.
        schedule: The schedule that plans must have.
        num_plans: How many plans to return at most.
        params: The parameters of a model of your own, or their shapes.
        example: A batch of it, of any number of rows, or its shapes.
        **fixed: Values of other keys of a run, such as `ici_pipeline_parallelism=4`. For a model
            of your own those of `jaxpipe.pipeline`: `mesh`, the sizes of its axes by name,
            `microbatches` and `chunks`.

    Returns:
        The plans, the fastest first. They print as a table.

    Raises:
        ValueError: If a value is wrong, or no layout fits; it says what is short by how much.

    Example:
        >>> plans = plan("llama-tiny", "v5p-8", batch=32, sequence=128, num_plans=2)
        >>> plans.best.settings["per_device_batch_size"], len(plans.plans)
        (8.0, 2)
    """
    started = time.perf_counter()
    spread = parse_devices(devices, num_slices)
    if isinstance(model, str | Mapping):
        values = {"model_name": model} if isinstance(model, str) else dict(model)
        request = make_request(
            values | fixed,
            spread,
            batch=batch,
            sequence=sequence,
            memory_gb=memory_gb,
            max_stages=max_stages,
            schedule=schedule,
        )
    else:
        own = {name: fixed.pop(name) for name in ("microbatches", "chunks") if name in fixed}
        sizes = fixed.pop("mesh", None)
        _check_own(params, example, sequence=sequence, **fixed)
        rows = batch or jax.tree.leaves(example)[0].shape[0]
        limit = usable_bytes(spread, memory_gb)
        request = own_request(model, params, example, spread, rows, limit)
        request = fix_space(
            request, max_stages=max_stages, schedule=schedule, mesh=sizes, counts=own
        )
    best = search(request, num_plans)
    if not best.plans:
        raise ValueError(_nothing_fits(request, best))
    return Plans(request, best, time.perf_counter() - started)


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
    implied = NOT_CHOSEN if request.own is not None else {}
    fixed_fields = {key: value for key, value in request.space.fixed.items() if key not in implied}
    fixed = ", ".join(f"{name} {value}" for name, value in fixed_fields.items())
    return f" (given: {fixed})" if fixed else ""


def _kinds(needed: PeakMemory, unit: float) -> list[str]:
    sizes = sorted(vars(needed).items(), key=lambda pair: -pair[1])
    return [f"{kind} {size / unit:.1f}" for kind, size in sizes if size > 0.01 * needed.total]
