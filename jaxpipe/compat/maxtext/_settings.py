"""The settings of a pipeline, read and checked from the keys of MaxText's config.

The config is any object with attributes. It is read here, and nowhere else. S ranks, R repeats, M
microbatches.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from types import UnionType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ...autodiff import Remat, keep, remat_by_name
from ...autodiff.backward import TENSORS, check_offload
from ...sharding import DEFAULT_RULES, num_ranks_of
from ...sharding.layout import even_layout
from ...spmd.circular_engine import PipelineShape, check_circular
from ...spmd.ranks import AXIS
from ...spmd.weight_gather import When


@dataclass(frozen=True)
class PipelineKeys:
    """The keys of a pipeline in MaxText's config, and their defaults.

    None stands for a key that is missing, None or -1 and whose default depends on others.

    Attributes:
        ici_pipeline_parallelism: Ranks within a slice. Default: the size of the axis `stage` of the
            mesh, over `dcn_pipeline_parallelism`, or 1.
        dcn_pipeline_parallelism: Slices that the ranks are spread over.
        num_layers_per_pipeline_stage: Layers that the module of a stage has. It sets R; the module
            itself runs its layers.
        num_decoder_layers: Layers of the model. Default: unknown.
        pipeline_parallel_layers: Layers in the pipeline. Default: all.
        num_pipeline_repeats: R. Default: the number that fits all layers, or 1 if their number is
            unknown.
        num_pipeline_microbatches: M. Default: S, or 2 * S with delay.
        micro_batch_size_to_train_on: Rows of the whole batch. Default: any.
        scan_pipeline_repeats: Whether repeats run in a loop. Default: as the iterations.
        pipeline_batch_axes: Mesh axes of rows that are manual in the pipeline, which MaxText does
            not have.
        tensor_locations: For the policy "custom" the location of each tensor of
            `autodiff.TENSORS` that has one. Default of the others: "remat".
    """

    ici_pipeline_parallelism: int | None = None
    dcn_pipeline_parallelism: int = 1
    num_layers_per_pipeline_stage: int = 1
    num_decoder_layers: int | None = None
    pipeline_parallel_layers: int | None = None
    num_pipeline_repeats: int | None = None
    num_pipeline_microbatches: int | None = None
    micro_batch_size_to_train_on: int | None = None
    pipeline_delay_activation_forwarding: bool = False
    pipeline_fsdp_ag_once: bool = False
    pipeline_fsdp_ag_per_repeat: bool = False
    scan_pipeline_iterations: bool = True
    scan_pipeline_repeats: bool | None = None
    set_remat_policy_on_pipeline_iterations: bool = True
    set_remat_policy_on_layers_per_stage: bool = False
    remat_policy: Any = "full"
    shard_mode: Any = "auto"
    logical_axis_rules: Iterable | None = None
    pipeline_batch_axes: Any = ()
    debug_sharding: bool = False
    tensor_locations: Mapping[str, Any] = field(default_factory=dict)


def read_keys(config: Any) -> PipelineKeys:
    """Returns the keys of a pipeline in `config`, with the types that they must have."""
    if isinstance(config, Mapping):
        raise ValueError(
            f"`config` is a {type(config).__name__}, whose keys are no attributes. Give an object "
            "with fields, such as `types.SimpleNamespace(**config)`."
        )

    def read(name: str) -> Any:
        try:
            value = getattr(config, name, None)
        except (KeyError, ValueError):  # older configs of MaxText raise these for unknown names
            return None
        return value.value if isinstance(value, Enum) else value

    parsers = {key.name: _PARSERS.get(key.type, _as_given) for key in fields(PipelineKeys)}
    parsers |= dict.fromkeys(TENSORS, _as_given) | {"pipeline_parallel_layers": _integer}
    parsers.pop("tensor_locations")
    parsed = {name: parse(name, read(name)) for name, parse in parsers.items()}
    values = {name: value for name, value in parsed.items() if value is not None}
    locations = {name: values.pop(name) for name in TENSORS if name in values}
    return PipelineKeys(tensor_locations=locations, **values)


def _flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` is {value!r}. Give True or False.")
    return None if value is None else bool(value)


def _integer(name: str, value: Any) -> int | None:
    """Returns a value that must be an integer, or None for -1, which stands for the default."""
    value = -1 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"`{name}` is {value!r}. Give a whole number, or -1 for the default.")
    return None if value == -1 else int(value)


def _count(name: str, value: Any) -> int | None:
    """Returns a value that must be a positive integer, or None for -1."""
    count = _integer(name, value)
    if count is not None and count < 1:
        raise ValueError(f"`{name}` is {count!r}. Give at least 1, or -1 for the default.")
    return count


def _as_given(name: str, value: Any) -> Any:
    del name
    return value


_PARSERS: dict[type | UnionType | str, Callable[[str, Any], Any]] = {
    bool: _flag,
    bool | None: _flag,
    int: _count,
    int | None: _count,
}
"""Functions that check a key, by the type of its field in `PipelineKeys`."""


AxisRules = tuple[tuple[str, tuple[str, ...]], ...]
"""Pairs (logical axis, mesh axes). The first pair of a logical axis that fits an array applies."""


REPEATS, STAGES = "circular_repeats", "layers"
"""MaxText's logical names of the dims over which a pipeline stacks weights."""


NAMES = "`num_pipeline_microbatches`", "`pipeline_delay_activation_forwarding`"
"""Names of the config fields that the errors of `check_circular` mention."""


@dataclass(frozen=True)
class PipelineSettings:
    """Settings by which a stack of stages runs as a pipeline.

    Attributes:
        pipeline_shape: S, R, M and the iterations that a hand-over to the next rank takes.
        batch_size: Rows of the batch, or None if any multiple of M is allowed.
        batch_axes: Mesh axes that shard the rows and are manual in the pipeline: each device calls
            the stage with its own rows.
        remat_tick: Wraps the computation of a tick, as `jax.checkpoint` does.
        remat_stage: Wraps a stage, as `jax.checkpoint` does.
    """

    pipeline_shape: PipelineShape
    batch_size: int | None
    gather: When
    batch_axes: tuple[str, ...]
    scan_ticks: bool
    scan_repeats: bool
    remat_iterations: bool
    remat_tick: Callable
    remat_stage: Callable
    policy: Callable
    rules: AxisRules | None
    debug_sharding: bool

    @property
    def dims(self) -> tuple[int, int]:
        """Returns (R, S)."""
        return self.pipeline_shape.num_repeats, self.pipeline_shape.num_ranks

    @property
    def stacked(self) -> dict[str, int]:
        """Returns the names and sizes of the dims in front of those of a stage's weight.

        They are MaxText's: [R, S], or [S] if there is one repeat.
        """
        repeats, ranks = self.dims
        return ({REPEATS: repeats} if repeats > 1 else {}) | {STAGES: ranks}

    def rules_or(self, in_context: Iterable) -> AxisRules:
        """Returns the config's rules, or else `in_context`, or else `DEFAULT_RULES`.

        Stages are always sharded over the ranks. In `DEFAULT_RULES`, "layers" are the trainer's
        layers outside of the pipeline, which are not sharded.
        """
        rules = axis_rules(self.rules or in_context or DEFAULT_RULES)
        has_stages = any(name == STAGES and AXIS in axes for name, axes in rules)
        return rules if has_stages else ((STAGES, (AXIS,)), *rules)


def pipeline_settings(config: Any, mesh: Mesh | None, remat_policy: Any = None) -> PipelineSettings:
    """Reads the settings of a pipeline from `config` and checks them.

    Sizes and axes are checked by `mesh`, None for one device. `remat_policy` is a policy of
    `jax.checkpoint` in place of the one that `config` names.
    """
    keys = read_keys(config)
    shape = _shape(keys, mesh)
    batch_axes = _batch_axes(keys.pipeline_batch_axes, mesh)
    _check_shard_mode(keys.shard_mode, mesh, batch_axes)
    remat = _remat(keys.remat_policy, keys.tensor_locations, mesh, remat_policy)
    on_ticks = keys.set_remat_policy_on_pipeline_iterations
    on_layers = keys.set_remat_policy_on_layers_per_stage
    scan_ticks, scan_repeats = keys.scan_pipeline_iterations, keys.scan_pipeline_repeats
    rules = keys.logical_axis_rules
    return PipelineSettings(
        pipeline_shape=shape,
        batch_size=_batch_size(keys.micro_batch_size_to_train_on, shape.num_microbatches),
        gather=_gather(keys.pipeline_fsdp_ag_once, keys.pipeline_fsdp_ag_per_repeat),
        batch_axes=batch_axes,
        scan_ticks=scan_ticks,
        scan_repeats=scan_ticks if scan_repeats is None else scan_repeats,
        remat_iterations=on_ticks,
        remat_tick=remat if on_ticks else keep,
        remat_stage=remat if on_layers else keep,
        policy=_policy(remat, is_custom=keys.remat_policy == "custom"),
        rules=axis_rules(rules) if rules is not None else None,
        debug_sharding=keys.debug_sharding,
    )


def _shape(keys: PipelineKeys, mesh: Mesh | None) -> PipelineShape:
    """Returns S, R, M and d, after a check that a circular pipeline can have them."""
    delay = keys.pipeline_delay_activation_forwarding
    num_ranks = _ranks(keys.ici_pipeline_parallelism, keys.dcn_pipeline_parallelism, mesh)
    num_layers, name = _pipelined_layers(keys.pipeline_parallel_layers, keys.num_decoder_layers)
    repeats = keys.num_pipeline_repeats
    if num_layers is not None:
        repeats = even_layout(
            num_layers,
            num_ranks=num_ranks,
            layers_per_stage=keys.num_layers_per_pipeline_stage,
            num_repeats=-1 if repeats is None else repeats,
            name=name,
        ).num_repeats
    repeats = repeats or 1
    microbatches = keys.num_pipeline_microbatches or num_ranks * (2 if delay else 1)
    check_circular(num_ranks, repeats, microbatches, delay=delay, names=NAMES)
    return PipelineShape(num_ranks, repeats, microbatches, 2 if delay else 1)


def _ranks(within: int | None, across: int, mesh: Mesh | None) -> int:
    """Returns the number of ranks, those within a slice times the slices, as `mesh` has it."""
    of_mesh = 1 if mesh is None else num_ranks_of(mesh)
    size = max(of_mesh // across, 1) if within is None else within
    if mesh is not None and size * across != of_mesh:
        raise ValueError(
            f"`ici_pipeline_parallelism` x `dcn_pipeline_parallelism` is {size} x {across}, but "
            f"the axis {AXIS!r} of `mesh` has {of_mesh}. They must be equal."
        )
    return size * across


def _pipelined_layers(pipelined: int | None, model: int | None) -> tuple[int | None, str]:
    """Returns the number of layers in the pipeline and the name of the key that sets it."""
    if pipelined is None:
        return model, "`num_decoder_layers`"
    if pipelined < 1 or (model is not None and pipelined > model):
        of_model = "" if model is None else f" of the {model} of `num_decoder_layers`"
        raise ValueError(
            f"`pipeline_parallel_layers` is {pipelined}. Give at least 1 and at most all{of_model},"
            " or -1 for all."
        )
    return pipelined, "`pipeline_parallel_layers`"


def _batch_size(rows: int | None, num_microbatches: int) -> int | None:
    if rows is not None and rows % num_microbatches:
        raise ValueError(
            f"`micro_batch_size_to_train_on` is {rows}, not a multiple of "
            f"`num_pipeline_microbatches` = {num_microbatches}."
        )
    return rows


def _gather(once: bool, per_repeat: bool) -> When:
    if once and per_repeat:
        raise ValueError(
            "`pipeline_fsdp_ag_once` and `pipeline_fsdp_ag_per_repeat` are both on. Weights are "
            "gathered once a step, once a repeat, or, with both off, in every iteration: turn one "
            "off."
        )
    return "once" if once else "repeat" if per_repeat else "tick"


def _batch_axes(names: str | Iterable[str], mesh: Mesh | None) -> tuple[str, ...]:
    """Returns `pipeline_batch_axes` as a tuple, after a check that they are axes of `mesh`."""
    axes = (names,) if isinstance(names, str) else tuple(names)
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


def _remat(name: str, locations: Mapping[str, Any], mesh: Mesh | None, policy: Any) -> Remat:
    """Returns the wrapper of the policy of this name, or of `policy`, if one is given."""
    if policy is not None:
        return partial(jax.checkpoint, prevent_cse=False, policy=policy)
    remat = remat_by_name(name, locations)
    if mesh is not None:
        check_offload(name, locations, mesh.devices.flat)
    return remat


def _policy(remat: Remat, *, is_custom: bool) -> Callable:
    """Returns the policy of `remat`; unless custom, it also saves the inputs that MaxText names."""
    policies = jax.checkpoint_policies
    base_policy: Callable = policies.everything_saveable
    if isinstance(remat, partial):
        base_policy = remat.keywords.get("policy") or policies.nothing_saveable
    if is_custom:
        return base_policy
    inputs = policies.save_only_these_names("iteration_input", "decoder_layer_input")

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        saved = inputs(primitive, *arguments, **parameters)
        return saved or base_policy(primitive, *arguments, **parameters)

    return policy


def _check_shard_mode(mode: Any, mesh: Mesh | None, batch_axes: tuple[str, ...]) -> None:
    """Checks that the axis types of `mesh` agree with `shard_mode`."""
    if mode not in ("auto", "explicit"):
        raise ValueError(f"`shard_mode` is {mode!r}. Give 'auto' or 'explicit'.")
    if mesh is None:
        return
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if mode == "auto":
        wrong = {axis: kind for axis, kind in types.items() if kind != AxisType.Auto}
        advice = (
            "Make the mesh with `sharding.make_mesh(...)` or `axis_types=(AxisType.Auto,) * "
            f"{len(types)}`, or give `shard_mode` = 'explicit'."
        )
    else:
        needed = (AXIS, *batch_axes)
        wrong = {axis: types[axis] for axis in needed if types[axis] != AxisType.Explicit}
        advice = (
            "Make the mesh with `sharding.make_mesh(..., explicit=True)` or with "
            f"`AxisType.Explicit` for {', '.join(needed)}, or give `shard_mode` = 'auto'."
        )
    if wrong:
        listed = ", ".join(f"{axis} {kind.name}" for axis, kind in wrong.items())
        raise ValueError(
            f"`shard_mode` is {mode!r}, but `mesh` has axes of another type: {listed}. {advice}"
        )


def axis_rules(rules: Iterable) -> AxisRules:
    """Returns the rules with the mesh axes of each as a tuple; they may be one name or None."""

    def as_tuple(axes: Any) -> tuple[str, ...]:
        return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)

    return tuple((name, as_tuple(axes)) for name, axes in rules)
