"""A request for a model of plain functions: what is given of a layout, and what is traced."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from .. import sharding
from ..api import Model, layer_flops
from ..api.inspection import check_groups, param_specs
from ..cost.work import ModelWork
from ..engines import (
    CONFIG_ENGINES,
    EngineOptions,
    check_gather,
    check_reduce_dtype,
    select_engine,
    usual_engine,
)
from ..kernels import trace_for
from ..schedules.builders import get_family
from ..sharding.layout import layers_of_stages
from ..sharding.specs import axes_of
from ._candidates import Space
from ._devices import Devices, absent_devices, device_hardware
from ._own_model import MakeModel, OwnSource, Specs, made_model, num_layers, planned_model
from ._request import Request, Values, check_positive

_AXES = ("data", "stage", "fsdp", "tensor", "expert")

NOT_CHOSEN: Values = {"tensor": 1, "expert": 1, "context": 1, "vocab_tiling": 1}
"""Choices that are the same in every plan of an own model; errors leave them out."""

_POLICIES = ("full", "none")
"""Policies of rematerialization: others save tensors by names, which no trace of a layer tells."""

_COUNTS = {"microbatches": "microbatches", "chunks": "chunks", "accumulate": "accumulation"}
"""Arguments of `jaxpipe.pipeline` that fix a number of candidates, and the field that has it."""

_PASSED_ON = ("slices", "param_specs", "row_wise", "scan_layers")
"""Arguments of `jaxpipe.pipeline` that are the same in every plan."""


def own_request(
    model: Model | MakeModel,
    params: PyTree,
    example: PyTree,
    devices: Devices,
    fixed: Mapping[str, Any],
    *,
    batch: int | None = None,
    memory_gb: float | None = None,
    max_stages: int | None = None,
    schedule: str | None = None,
) -> Request:
    """Returns a request for a model of plain functions.

    Args:
        model: The model, or what makes it for a mesh.
        params: Its parameters, or their shapes; None if they are made with the model.
        example: A batch of it, of any number of rows, or its shapes.
        devices: The devices of the step.
        fixed: Arguments of `jaxpipe.pipeline` that plans must have: `mesh`, the sizes of its axes,
            `engine`, `gather`, `layers_per_stage`, `remat` and `layer_remat` by name, those of
            `_COUNTS` and `_PASSED_ON`, and the fields of `EngineOptions`; and `dcn`, the size of
            the axis along which slices lie.
        batch: Rows of a step. Default: those of `example`.
        memory_gb: The memory of a device that may be used, in 1e9 bytes.
        max_stages: The most ranks of a pipeline.
        schedule: The schedule that plans must have.

    Returns:
        The request.

    Raises:
        ValueError: If an argument is missing or is none of a model of one's own, or the mesh has
            other devices or axes.
    """
    fixed = dict(fixed)
    axes = _fixed_axes(fixed.pop("mesh", None), devices)
    chosen = _pop_choices(fixed, schedule, devices.num_slices)
    options = {name: fixed.pop(name) for name in _PASSED_ON if fixed.get(name) is not None}
    own_options = _pop_options(fixed)
    make = None if isinstance(model, Model) else model
    shards = axes.get("expert", 1)
    _check_experts(make, shards, "param_specs" in options)
    if make is not None:
        model, params = _made_for_trace(make, params, shards, devices)
    assert isinstance(model, Model)
    _check_own(model, params, example, **fixed)
    check_groups(jax.eval_shape(model.to_groups, params), model.shared)
    specs = _specs(model, params, options.get("param_specs"), axes, devices)
    if model.has_kinds and model.layer_costs is None:
        model = replace(model, layer_costs=layer_flops(model, params, example))
    with trace_for(devices.platform, device_hardware(devices).widest_cudnn_head):
        plain = (model, params) if make is None else made_model(make(None))
        planned, work, tokens = planned_model(model, params, example, devices, specs, axes, plain)
    rows = batch or jax.tree.leaves(example)[0].shape[0]
    engine_options = EngineOptions(**own_options)
    named = {"gather"} & chosen.keys() | engine_options.changed.keys()
    free = {"zero1"} if model.vocab_parallel_loss is None else {"zero1", "vocab_parallel"}
    space = Space(
        devices=devices,
        batch=rows,
        sequence=tokens,
        num_layers=planned.num_layers,
        vocab=planned.vocab,
        max_stages=max_stages or devices.num_devices,
        fixed=NOT_CHOSEN | chosen | axes,
        policies=_POLICIES,
        unread_by={
            name: tuple(sorted(named - engine.options)) for name, engine in CONFIG_ENGINES.items()
        },
        options=engine_options,
        free_options=frozenset(free - own_options.keys()),
        costs=_costs(model, work),
        gathered_axes=("fsdp",),
        hidden=planned.hidden,
        scan_layers=lambda _: options.get("scan_layers"),
    )
    source = OwnSource(
        model=model,
        params=params,
        example=example,
        num_layers=num_layers(model, work),
        options=options,
        num_slices=devices.num_slices,
        make=make,
    )
    return Request(
        devices=devices,
        batch=rows,
        sequence=tokens,
        limit=devices.usable_bytes(memory_gb),
        model=planned,
        work=work,
        source=source,
        space=space,
    )


def _costs(model: Model, work: ModelWork) -> tuple[float, ...] | None:
    """Returns the cost of each layer; None if all cost the same."""
    costs = model.layer_costs
    return None if costs is None else tuple(float(costs[layer.name]) for layer in work.kinds())


def _made_for_trace(
    make: MakeModel, params: PyTree, shards: int, devices: Devices
) -> tuple[Model, PyTree]:
    """Returns the model that a function makes for a mesh of the shards of its experts."""
    if params is not None:
        raise ValueError(
            "`params` is given, and `model` is a function, which makes them for a mesh. Leave them "
            "out."
        )
    mesh = sharding.make_mesh({"expert": shards}, devices=absent_devices(devices)[:shards])
    return made_model(make(mesh))


def _pop_choices(fixed: dict[str, Any], schedule: str | None, num_slices: int) -> Values:
    """Removes the choices of a layout from arguments, and returns them as fields of candidates."""
    choices = _engine_choices(fixed.pop("engine", None) or "auto", schedule)
    counts = {name: fixed.pop(name) for name in _COUNTS if fixed.get(name) is not None}
    check_positive(**counts)
    choices |= {_COUNTS[name]: count for name, count in counts.items()}
    if (gather := check_gather(fixed.pop("gather", None))) is not None:
        choices["gather"] = gather
    for name in ("remat", "layer_remat"):
        policy = fixed.pop(name, None)
        if policy not in (None, *_POLICIES):
            raise ValueError(
                f"`{name}` is {policy!r}. Of a model of your own the planner knows what 'full' and "
                "'none' store: give one of them, or compare layouts by `PipelinedModel.compile`."
            )
        if policy is not None:
            choices[name] = policy
    if (layers := fixed.pop("layers_per_stage", None)) is not None:
        choices["counts"] = layers_of_stages(layers)
    dcn = fixed.pop("dcn", None) or {}
    dcn = {dcn: num_slices} if isinstance(dcn, str) else dcn
    if not isinstance(dcn, Mapping):
        raise ValueError(f"`dcn` is {dcn!r}. Give a size by the name of an axis.")
    for axis, size in dcn.items():
        if size != num_slices or "across" in choices:
            raise ValueError(
                f"`dcn` has {size} along {axis!r}, and `num_slices` is {num_slices}. Give one axis "
                "that is divided over all slices."
            )
        choices["across"] = axis
    return choices


def _engine_choices(name: str, schedule: str | None) -> Values:
    """Returns the engine and the schedule that candidates must have, of those that are given."""
    if schedule is not None:
        get_family(schedule)  # an unknown name is told before layouts are tried
    if name == "auto":
        if schedule is None:
            return {}
        usual = usual_engine(schedule)  # another engine may run it too, but not if it is its own
        return {"schedule": schedule} if usual.runs_schedules else {"engine": usual.config_name}
    engine = select_engine(name, schedule)
    choices: Values = {"engine": engine.config_name}
    if schedule is None or (engine is usual_engine(schedule) and not engine.runs_schedules):
        return choices
    if not engine.runs_schedules:
        raise ValueError(
            f"`schedule` is {schedule!r}, and `engine` is {name!r}, which does not run it. "
            "Leave one of them out."
        )
    return choices | {"schedule": schedule}


def _pop_options(fixed: dict[str, Any]) -> Values:
    """Removes the options of engines from arguments, and returns those that are given."""
    options = {name: fixed.pop(name, None) for name in EngineOptions._fields}
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if name != "reduce_dtype" and not isinstance(value, bool):
            raise ValueError(f"`{name}` is {value!r}. Give True or False.")
    if dtype := check_reduce_dtype(options.get("reduce_dtype")):
        options["reduce_dtype"] = dtype.name  # a name: settings are plain data
    return options


def _check_experts(make: MakeModel | None, shards: int, has_specs: bool) -> None:
    """Checks that a layer can be traced for the devices that share its experts."""
    if shards > 1 and (make is None or not has_specs):
        raise ValueError(
            f"`mesh` has {shards} shards of experts, which a layer divides by a `jax.shard_map` of "
            "its own. Give as `model` a function of a mesh, `make(mesh) -> (model, params)`, which "
            "makes the plain program if `mesh` is None, and `param_specs`."
        )


def _specs(
    model: Model, params: PyTree, rule: Any, axes: Mapping[str, int], devices: Devices
) -> Specs:
    """Returns the specs of the parameters that have one, by their paths in groups."""
    specs: Specs = {}
    if rule is not None:
        if model.has_kinds:
            raise ValueError("`param_specs` is given, and layers differ. Plan them without it.")
        sizes = [axes.get(axis, 1) for axis in sharding.AXES]
        few = absent_devices(devices)[: math.prod(sizes)]
        mesh = Mesh(np.array(few).reshape(sizes), sharding.AXES)
        specs = dict(param_specs(rule, params, model.to_groups, mesh, shared=model.shared))
    of_layers = (axes_of(spec) for path, spec in specs.items() if path.startswith("['stages']"))
    if (size := axes.get("tensor", 1)) > 1 and not any("tensor" in each for each in of_layers):
        raise ValueError(
            f"`mesh` has {size} devices along 'tensor', and `param_specs` divides no weight of a "
            "layer over them. Give specs that name 'tensor'."
        )
    return specs


def _check_own(model: Model, params: PyTree, example: PyTree, **others: Any) -> None:
    """Checks the arguments that a model of the user's own needs, and those that it has not."""
    if params is None or example is None:
        raise ValueError("`model` is your own. Give its `params` and an `example` batch.")
    unread = [f"`{name}`" for name, value in others.items() if value is not None]
    if unread:
        names = *_COUNTS, *_PASSED_ON, *EngineOptions._fields
        raise ValueError(
            f"`model` is your own, which has no {', '.join(unread)}. The batch has the length of "
            "sequences, and `schedule`, `max_stages`, `mesh`, `dcn`, `engine`, `gather`, `remat`, "
            f"`layer_remat`, `layers_per_stage`, {', '.join(f'`{name}`' for name in names)} can be "
            "given."
        )


def _fixed_axes(mesh: Mapping[str, int] | Mesh | None, devices: Devices) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh, of which those left out have one device."""
    if mesh is None:
        return {}
    mesh = mesh.shape if isinstance(mesh, Mesh) else mesh
    if not isinstance(mesh, Mapping):
        raise ValueError(f"`mesh` is {mesh!r}. Give the sizes of its axes by name.")
    unknown = {name: size for name, size in mesh.items() if name not in _AXES and size != 1}
    if unknown:
        raise ValueError(
            f"`mesh` is {dict(mesh)}, and for a model of your own the planner knows the axes "
            f"{', '.join(_AXES)}: what the compiler divides over {' and '.join(unknown)}, and "
            "sends for that, no trace of a layer says. Leave it out, or compare layouts by "
            "`PipelinedModel.compile`."
        )
    if (size := math.prod(mesh.values())) != devices.num_devices:
        raise ValueError(
            f"`mesh` is {dict(mesh)}, of {size} devices, and {devices.name} has "
            f"{devices.num_devices}. Give sizes whose product is that."
        )
    return {axis: mesh.get(axis, 1) for axis in _AXES}
