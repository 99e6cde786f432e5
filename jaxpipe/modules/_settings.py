"""Reads the settings of a pipeline from a config with MaxText's field names, and checks them.

S ranks, R repeats, L layers per stage, M microbatches. The config is any object with attributes. A
field that is missing or None has the default that `pipeline_settings` documents.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..autodiff import Remat, keep, remat_by_name
from ..autodiff.backward import TENSORS, check_offload
from ..sharding import DEFAULT_RULES
from ..sharding.layout import even_layout
from ..spmd.circular_engine import PipelineShape, check_circular
from ..spmd.ranks import AXIS

AxisRules = tuple[tuple[str, tuple[str, ...]], ...]
"""Pairs (logical axis, mesh axes). The first pair of a logical axis that fits an array applies."""


NAMES = "`num_pipeline_microbatches`", "`pipeline_delay_activation_forwarding`"
"""Names of the config fields that the errors of `check_circular` mention."""


@dataclass(frozen=True)
class PipelineSettings:
    """Settings by which a stack of layers runs as a pipeline.

    Attributes:
        pipeline_shape: S, R, M and the iterations that a hand-over to the next rank takes.
        layers_per_stage: L.
        batch_size: Rows of the batch, or None if any multiple of M is allowed.
        gather: When weights that are sharded over fsdp, context and expert are gathered.
        batch_axes: Mesh axes that shard the rows and are manual in the pipeline: each device calls
            the layers with its own rows.
        scan_ticks: Whether the ticks of a repeat run in a loop. If not, they are unrolled.
        scan_repeats: Whether repeats run in a loop. If not, they are unrolled.
        scan_layers: Whether the layers of a stage run in a loop. If not, each is compiled
            separately.
        remat_iterations: Whether the computation of a tick is wrapped.
        remat_tick: Wraps the computation of a tick, as `jax.checkpoint` does.
        remat_layer: Wraps a layer, as `jax.checkpoint` does.
        policy: The policy of `jax.checkpoint` that the config names.
        rules: The config's `logical_axis_rules`, or None if it has none.
        debug_sharding: Whether to log the sharding of every weight.
    """

    pipeline_shape: PipelineShape
    layers_per_stage: int
    batch_size: int | None
    gather: Literal["tick", "once", "repeat"]
    batch_axes: tuple[str, ...]
    scan_ticks: bool
    scan_repeats: bool
    scan_layers: bool
    remat_iterations: bool
    remat_tick: Callable
    remat_layer: Callable
    policy: Callable
    rules: AxisRules | None
    debug_sharding: bool

    @property
    def dims(self) -> tuple[int, int, int]:
        """Returns (R, S, L), the leading dims of every stacked weight."""
        return self.pipeline_shape.num_repeats, self.pipeline_shape.num_ranks, self.layers_per_stage

    def rules_or(self, in_context: Iterable) -> AxisRules:
        """Returns the config's rules, or else `in_context`, or else `DEFAULT_RULES`."""
        return axis_rules(self.rules or in_context or DEFAULT_RULES)


def pipeline_settings(config: Any, mesh: Mesh | None, remat_policy: Any = None) -> PipelineSettings:
    """Reads the settings of a pipeline from `config` and checks them.

    Args:
        config: Any object. Its fields and their defaults: `ici_pipeline_parallelism` (the size of
            the axis `stage` of `mesh`, or 1), `dcn_pipeline_parallelism` (1), whose product is S;
            `num_layers_per_pipeline_stage` (1); `num_decoder_layers` (unknown);
            `pipeline_parallel_layers` (-1: all layers); `num_pipeline_repeats` (-1: the number that
            fits all layers, or 1 if their number is unknown); `num_pipeline_microbatches` (-1: S,
            or 2 * S with delay); `micro_batch_size_to_train_on`, the rows of the whole batch (any);
            `pipeline_delay_activation_forwarding`, `pipeline_fsdp_ag_once`,
            `pipeline_fsdp_ag_per_repeat`, `set_remat_policy_on_layers_per_stage`, `debug_sharding`
            (False); `scan_pipeline_iterations`, `scan_layers_per_stage`,
            `set_remat_policy_on_pipeline_iterations` (True); `scan_pipeline_repeats` (the value of
            `scan_pipeline_iterations`); `remat_policy` ("full", or another name of
            `autodiff.POLICIES`), and for "custom" the location of each tensor of
            `autodiff.TENSORS` ("remat"); `shard_mode` ("auto"); `logical_axis_rules` (none); and
            `pipeline_batch_axes` (()), which MaxText does not have:
            see `PipelineSettings.batch_axes`.
        mesh: A mesh with an axis `stage` of size S, or None.
        remat_policy: A policy of `jax.checkpoint` that replaces the config's.

    Returns:
        The checked settings.

    Raises:
        ValueError: If a field has an invalid value, or fields contradict each other or `mesh`.
    """
    if isinstance(config, Mapping):
        raise ValueError(
            f"`config` is a {type(config).__name__}, whose keys are no attributes. Give an object "
            "with fields, such as `types.SimpleNamespace(**config)`."
        )
    delay = _flag(config, "pipeline_delay_activation_forwarding", False)
    num_ranks = _ranks(config, mesh)
    layers_per_stage = _count(config, "num_layers_per_pipeline_stage", 1)
    num_repeats = _repeats(config, num_ranks, layers_per_stage)
    microbatches = _count(config, "num_pipeline_microbatches", num_ranks * (2 if delay else 1))
    check_circular(num_ranks, num_repeats, microbatches, delay=delay, names=NAMES)
    scan_ticks = _flag(config, "scan_pipeline_iterations", True)
    batch_axes = _batch_axes(config, mesh)
    _check_shard_mode(_field(config, "shard_mode", "auto"), mesh, batch_axes)
    remat = _remat(config, mesh, remat_policy)
    rules = _field(config, "logical_axis_rules", None)
    on_ticks = _flag(config, "set_remat_policy_on_pipeline_iterations", True)
    on_layers = _flag(config, "set_remat_policy_on_layers_per_stage", False)
    return PipelineSettings(
        pipeline_shape=PipelineShape(num_ranks, num_repeats, microbatches, 2 if delay else 1),
        layers_per_stage=layers_per_stage,
        batch_size=_batch_size(config, microbatches),
        gather=_gather(config),
        batch_axes=batch_axes,
        scan_ticks=scan_ticks,
        scan_repeats=_flag(config, "scan_pipeline_repeats", scan_ticks),
        scan_layers=_flag(config, "scan_layers_per_stage", True),
        remat_iterations=on_ticks,
        remat_tick=remat if on_ticks else keep,
        remat_layer=remat if on_layers else keep,
        policy=_policy(config, remat),
        rules=axis_rules(rules) if rules is not None else None,
        debug_sharding=_flag(config, "debug_sharding", False),
    )


def _field(config: Any, name: str, default: Any) -> Any:
    """Returns a field of the config, or `default` if it is missing or None.

    The field may be an Enum; then its value is returned.
    """
    try:
        value = getattr(config, name, None)
    except (KeyError, ValueError):  # older configs of MaxText raise these for unknown names
        value = None
    value = value.value if isinstance(value, Enum) else value
    return default if value is None else value


def _flag(config: Any, name: str, default: bool) -> bool:
    value = _field(config, name, default)
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` is {value!r}. Give True or False.")
    return bool(value)


def _integer(config: Any, name: str) -> int:
    """Returns a field that must be an integer, or -1 if the field is missing."""
    value = _field(config, name, -1)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"`{name}` is {value!r}. Give a whole number, or -1 for the default.")
    return int(value)


def _count(config: Any, name: str, default: int) -> int:
    """Returns a field that must be a positive integer, or `default` if it is -1 or missing."""
    value = _integer(config, name)
    if value < 1 and value != -1:
        raise ValueError(f"`{name}` is {value!r}. Give at least 1, or -1 for the default.")
    return default if value == -1 else value


def _ranks(config: Any, mesh: Mesh | None) -> int:
    of_mesh = 1 if mesh is None else mesh.shape.get(AXIS, 1)
    if mesh is not None and AXIS not in mesh.shape:
        raise ValueError(
            f"`mesh` has the axes {tuple(mesh.axis_names)}. A pipeline needs one that is named "
            f"{AXIS!r}."
        )
    across = _count(config, "dcn_pipeline_parallelism", 1)
    within = _count(config, "ici_pipeline_parallelism", max(of_mesh // across, 1))
    if mesh is not None and within * across != of_mesh:
        raise ValueError(
            f"`ici_pipeline_parallelism` x `dcn_pipeline_parallelism` is {within} x {across}, but "
            f"the axis {AXIS!r} of `mesh` has {of_mesh}. They must be equal."
        )
    return within * across


def _repeats(config: Any, num_ranks: int, layers_per_stage: int) -> int:
    repeats = _count(config, "num_pipeline_repeats", -1)
    layers, name = _pipelined_layers(config)
    if layers is None:
        return 1 if repeats == -1 else repeats
    counts = {"num_ranks": num_ranks, "layers_per_stage": layers_per_stage}
    return even_layout(layers, **counts, num_repeats=repeats, name=name).num_repeats


def _pipelined_layers(config: Any) -> tuple[int | None, str]:
    """Returns the number of layers in the pipeline and the name of the field that sets it.

    The field is `pipeline_parallel_layers`. If that is -1, the number is `num_decoder_layers`, or
    None if that is missing too.

    Raises:
        ValueError: If the number is below 1 or above the number of layers of the model.
    """
    layers = _integer(config, "pipeline_parallel_layers")
    model = _count(config, "num_decoder_layers", -1)
    if layers == -1:
        return (None if model == -1 else model), "`num_decoder_layers`"
    if layers < 1 or (model != -1 and layers > model):
        of_model = "" if model == -1 else f" of the {model} of `num_decoder_layers`"
        raise ValueError(
            f"`pipeline_parallel_layers` is {layers}. Give at least 1 and at most all{of_model}, "
            "or -1 for all."
        )
    return layers, "`pipeline_parallel_layers`"


def _batch_size(config: Any, num_microbatches: int) -> int | None:
    rows = _count(config, "micro_batch_size_to_train_on", -1)
    if rows == -1:
        return None
    if rows % num_microbatches:
        raise ValueError(
            f"`micro_batch_size_to_train_on` is {rows}, not a multiple of "
            f"`num_pipeline_microbatches` = {num_microbatches}."
        )
    return rows


def _gather(config: Any) -> Literal["tick", "once", "repeat"]:
    once = _flag(config, "pipeline_fsdp_ag_once", False)
    per_repeat = _flag(config, "pipeline_fsdp_ag_per_repeat", False)
    if once and per_repeat:
        raise ValueError(
            "`pipeline_fsdp_ag_once` and `pipeline_fsdp_ag_per_repeat` are both on. Weights are "
            "gathered once a step, once a repeat, or, with both off, in every iteration: turn one "
            "off."
        )
    return "once" if once else "repeat" if per_repeat else "tick"


def _batch_axes(config: Any, mesh: Mesh | None) -> tuple[str, ...]:
    """Returns `pipeline_batch_axes` as a tuple, after a check that they are axes of `mesh`."""
    given = _field(config, "pipeline_batch_axes", ())
    axes = (given,) if isinstance(given, str) else tuple(given)
    if not axes:
        return ()
    if len({*axes}) < len(axes):
        raise ValueError(f"`pipeline_batch_axes` is {axes} and names an axis twice.")
    offered = [axis for axis in (() if mesh is None else mesh.axis_names) if axis != AXIS]
    wrong = [axis for axis in axes if axis not in offered]
    if wrong:
        raise ValueError(
            f"`pipeline_batch_axes` is {axes}, and {wrong} are no axes that `mesh` has beside "
            f"{AXIS!r}. It has {', '.join(offered) or 'none'}."
        )
    return axes


def _remat(config: Any, mesh: Mesh | None, policy: Any) -> Remat:
    if policy is not None:
        return partial(jax.checkpoint, prevent_cse=False, policy=policy)
    name = _field(config, "remat_policy", "full")
    locations = {tensor: x for tensor in TENSORS if (x := _field(config, tensor, None))}
    remat = remat_by_name(name, locations)
    if mesh is not None:
        check_offload(name, locations, mesh.devices.flat)
    return remat


def _policy(config: Any, remat: Remat) -> Callable:
    """Returns the `jax.checkpoint` policy of `remat`.

    Unless the config's policy is "custom", it also saves the inputs that MaxText names.
    """
    policies = jax.checkpoint_policies
    given: Callable = policies.everything_saveable
    if isinstance(remat, partial):
        given = remat.keywords.get("policy") or policies.nothing_saveable
    if _field(config, "remat_policy", "full") == "custom":
        return given
    inputs = policies.save_only_these_names("iteration_input", "decoder_layer_input")

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        saved = inputs(primitive, *arguments, **parameters)
        return saved or given(primitive, *arguments, **parameters)

    return policy


def _check_shard_mode(mode: Any, mesh: Mesh | None, batch_axes: tuple[str, ...]) -> None:
    """Checks that the axis types of `mesh` agree with `shard_mode`.

    Raises:
        ValueError: If `shard_mode` is neither "auto" nor "explicit"; if it is "auto" and an axis is
            not of type Auto; if it is "explicit" and `stage` or a batch axis is not Explicit.
    """
    if mode not in ("auto", "explicit"):
        raise ValueError(f"`shard_mode` is {mode!r}. Give 'auto' or 'explicit'.")
    if mesh is None:
        return
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if mode == "auto":
        others = {axis: kind for axis, kind in types.items() if kind != AxisType.Auto}
        advice = (
            "Make the mesh with `sharding.make_mesh(...)` or `axis_types=(AxisType.Auto,) * "
            f"{len(types)}`, or give `shard_mode` = 'explicit'."
        )
    else:
        needed = (AXIS, *batch_axes)
        others = {axis: types[axis] for axis in needed if types[axis] != AxisType.Explicit}
        advice = (
            "Make the mesh with `sharding.make_mesh(..., explicit=True)` or with "
            f"`AxisType.Explicit` for {', '.join(needed)}, or give `shard_mode` = 'auto'."
        )
    if others:
        found = ", ".join(f"{axis} {kind.name}" for axis, kind in others.items())
        raise ValueError(
            f"`shard_mode` is {mode!r}, but `mesh` has axes of another type: {found}. {advice}"
        )


def axis_rules(rules: Iterable) -> AxisRules:
    """Returns the rules with the mesh axes of each as a tuple.

    In `rules` they may also be one name or None.
    """

    def axes(given: Any) -> tuple[str, ...]:
        return () if given is None else (given,) if isinstance(given, str) else tuple(given)

    return tuple((name, axes(given)) for name, given in rules)
