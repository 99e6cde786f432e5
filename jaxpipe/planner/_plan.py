"""Plans a training step: from a request to the fastest layouts that fit."""

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..sharding import AXES
from ._answer import Plans, unit_of_bytes
from ._candidates import StepLayout, engine_named, layout_groups
from ._own_request import NOT_CHOSEN
from ._reasons import describe, refusals
from ._request import MANY_SCORES, Request
from ._search import BestPlans, expected_memory, search


def plan_request(request: Request, num_plans: int) -> Plans:
    """Searches the layouts of a request.

    Args:
        request: The model, the devices, and what of a layout is given.
        num_plans: How many plans to return at most.

    Returns:
        The plans, the fastest first.

    Raises:
        ValueError: If no layout fits; it says what is short by how much.
    """
    started = time.perf_counter()
    with _no_collections():
        best = search(request, num_plans)
    if not best.plans:
        raise ValueError(_nothing_fits(request, best))
    return Plans(request, best, time.perf_counter() - started)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pauses the garbage collector, which walks all actions of schedules again and again.

    They have no cycles: nothing is left over, and planning takes a third less time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _nothing_fits(request: Request, best: BestPlans) -> str:
    """Returns the reason that there is no plan."""
    devices = request.devices
    axes = {axis: request.space.fixed.get(axis, 1) for axis in AXES}
    if devices.num_devices % (product := math.prod(axes.values())):
        named = ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        return (
            f"The mesh axes that are given ({named}) multiply to {product}, and there are "
            f"{devices.num_devices} devices. Give sizes that divide them."
        )
    if best.leanest is None:
        return (
            f"No layout of {devices.num_devices} devices divides {request.batch} sequences of "
            f"{request.sequence} tokens and {request.space.num_layers} layers as given"
            f"{_given(request)}. {_in_the_way(request)}{_ruled_out(request)}"
        )
    candidate, needed = best.leanest
    if needed.total > request.limit:
        name, unit = unit_of_bytes(needed.total)
        sizes = sorted(vars(needed).items(), key=lambda pair: -pair[1])
        kinds = ", ".join(
            f"{kind} {size / unit:.1f}" for kind, size in sizes if size > 0.01 * needed.total
        )
        return (
            f"No layout fits: the leanest ({describe(candidate)}) needs {needed.total / unit:.1f} "
            f"{name} on a device of {request.limit / unit:.1f}, "
            f"{(needed.total - request.limit) / unit:.1f} {name} too much: {kinds}. Use more "
            f"devices, or smaller sequences.{_would_fit(request, candidate, unit, name)}"
        )
    if not best.refused:
        return (
            f"In every layout that fits, attention would store {MANY_SCORES}"
            f"{_given(request)}, because no kernel computes it there. Use smaller "
            "sequences, or give `attention=dot_product` to store them."
        )
    reasons = "\n".join(layout.error for layout in refusals(best.refused))
    return f"Layouts fit, but {request.checked_by} refuses them{_given(request)}:\n{reasons}"


def _would_fit(request: Request, candidate: StepLayout, unit: float, name: str) -> str:
    """Returns with which keys a layout would fit that no plan chooses by itself."""
    for keys, model in request.leaner():
        needed = expected_memory(candidate, replace(request, model=model)).total
        if needed <= request.limit:
            return (
                f" It would fit with {keys}, {needed / unit:.1f} {name}: that changes what is "
                "trained, so no plan chooses it."
            )
    return ""


def _ruled_out(request: Request) -> str:
    """Names the engines that a given key rules out, each with its first; "" if none are."""
    engines: dict[str, list[str]] = {}
    for config_name, keys in request.space.unread_by.items():
        if keys:  # one key is reason enough
            name = engine_named(config_name).name if request.source.is_own else config_name
            engines.setdefault(keys[0], []).append(repr(name))
    pairs = engines.items()
    return "".join(f" `{key}` is not read by {', '.join(names)}." for key, names in pairs)


def _in_the_way(request: Request) -> str:
    """Names the given values without one of which there are layouts."""
    space = request.space
    without_one = []
    for name, text in _fixed(request).items():
        axes = AXES if name in AXES else (name,)  # those of a mesh are given together
        fixed = {key: value for key, value in space.fixed.items() if key not in axes}
        if any(layout_groups(replace(space, fixed=fixed))):
            without_one.append("the mesh" if name in AXES else text)
    if not without_one:
        return "Give another batch, or fix fewer keys."
    named = " or ".join(dict.fromkeys(without_one))
    return f"There are layouts without {named}: leave one out, or give another value or batch."


def _fixed(request: Request) -> dict[str, str]:
    """Returns the given values as text, by name."""
    implied = NOT_CHOSEN if request.source.is_own else {}
    words = {"counts": "layers of stages", "across": "slices along"}
    fixed = request.space.fixed.items()
    return {key: f"{words.get(key, key)} {value}" for key, value in fixed if key not in implied}


def _given(request: Request) -> str:
    fixed = ", ".join(_fixed(request).values())
    return f" (given: {fixed})" if fixed else ""
