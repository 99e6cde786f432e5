"""Plans a training step: of a preset, of the keys of a run, or of a model of the user's own."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import PyTree

from ..._input import short_repr
from ...api import Model
from ...models import PRESETS
from ...planner import (
    MakeModel,
    Plans,
    check_positive,
    own_request,
    parse_devices,
    plan_request,
)
from ._request import make_request


def plan(
    model: str | Mapping[str, Any] | Model | MakeModel,
    devices: str,
    batch: int | None = None,
    sequence: int | None = None,
    *,
    num_slices: int = 1,
    memory_gb: float | int | None = None,
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
            layer is traced and counted. Of a model whose layers have a `jax.shard_map` over the
            axis `expert`, a function of a mesh that returns the model and its parameters, or their
            shapes; it is also called with None, for the plain program.
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
            `engine`, `microbatches`, `chunks`, `slices`, `layers_per_stage`, `accumulate`,
            `gather`, `remat` and `layer_remat` ("full" or "none"), `param_specs`, `row_wise`,
            `zero1`, `reduce_dtype`, `forwarding_delay`, `vocab_parallel`, `scan_layers`,
            `scan_repeats` and `scan_ticks`; and `dcn`, by name the axis that lies across slices.
            The settings of a plan, given so, return the plan.

    Returns:
        The plans, the fastest first. They print as a table.

    Raises:
        ValueError: If a value is wrong, or no layout fits; it says what is short by how much.

    Example:
        >>> plans = plan("llama-tiny", "v5p-8", batch=32, sequence=128, num_plans=2)
        >>> plans.best.settings["per_device_batch_size"], len(plans.plans)
        (8.0, 2)
    """
    _check_order(model=model, devices=devices, batch=batch, sequence=sequence)
    sizes = {"batch": batch, "memory_gb": memory_gb, "max_stages": max_stages}
    sizes |= {"num_plans": num_plans, "num_slices": num_slices}
    check_positive(**{name: size for name, size in sizes.items() if size is not None})
    if not isinstance(schedule, str | None):
        raise ValueError(f"`schedule` is {short_repr(schedule)}. Give the name of a schedule.")
    target = parse_devices(devices, num_slices)
    constraints: dict[str, Any] = {"batch": batch, "memory_gb": memory_gb}
    constraints |= {"max_stages": max_stages, "schedule": schedule}
    if isinstance(model, str | Mapping):
        values = {"model_name": model} if isinstance(model, str) else dict(model)
        request = make_request(values | fixed, target, sequence=sequence, **constraints)
    else:
        fixed |= {"sequence": sequence}
        request = own_request(model, params, example, target, fixed, **constraints)
    return plan_request(request, num_plans)


_EXPECTED: dict[str, tuple[Any, str]] = {
    "model": (
        str | Mapping | Model | Callable,
        "the name of a preset, the keys of a run, a `Model` or a function of a mesh",
    ),
    "devices": (str, "a name such as 'v5p-64'"),
    "batch": (int | None, "the number of sequences of a step"),
    "sequence": (int | None, "the number of tokens of a sequence"),
}
"""The positional arguments of `plan` in order: their types, and what each is."""


def _check_order(**values: object) -> None:
    """Checks the types of the positional arguments, as a wrong order would confuse them."""
    order = ", ".join(_EXPECTED)
    for name, (kind, meaning) in _EXPECTED.items():
        if not isinstance(values[name], kind):
            raise ValueError(
                f"`{name}` is {short_repr(values[name])}. Give {meaning}: the arguments are plan("
                f"{order}), and `params` and `example` by name."
            )
    model, devices = values["model"], values["devices"]
    if isinstance(model, str) and model not in PRESETS and devices in PRESETS:
        raise ValueError(
            f"`model` is {short_repr(model)} and `devices` {devices!r}, which is a model. The "
            f"arguments are plan({order}): give the model first."
        )
