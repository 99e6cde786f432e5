"""Reads the keys of a pipeline from a config of MaxText into a record, and checks their types.

The config is any object with attributes. It is read here, and nowhere else.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import UnionType
from typing import Any

import numpy as np

from ..autodiff.backward import TENSORS


@dataclass(frozen=True)
class PipelineKeys:
    """The keys of a pipeline in MaxText's config, and their defaults.

    None stands for a key that is missing, None or -1 and whose default depends on others.

    Attributes:
        ici_pipeline_parallelism: Ranks within a slice. Default: the size of the axis `stage` of the
            mesh, over `dcn_pipeline_parallelism`, or 1.
        dcn_pipeline_parallelism: Slices that the ranks are spread over.
        num_layers_per_pipeline_stage: L.
        num_decoder_layers: Layers of the model. Default: unknown.
        pipeline_parallel_layers: Layers in the pipeline. Default: all.
        num_pipeline_repeats: R. Default: the number that fits all layers, or 1 if their number is
            unknown.
        num_pipeline_microbatches: M. Default: S, or 2 * S with delay.
        micro_batch_size_to_train_on: Rows of the whole batch. Default: any.
        pipeline_delay_activation_forwarding: Whether a hand-over takes two iterations.
        pipeline_fsdp_ag_once: Whether weights are gathered once per step.
        pipeline_fsdp_ag_per_repeat: Whether weights are gathered once per repeat.
        scan_pipeline_iterations: Whether the iterations of a repeat run in a loop.
        scan_pipeline_repeats: Whether repeats run in a loop. Default: as the iterations.
        scan_layers_per_stage: Whether the layers of a stage run in a loop.
        set_remat_policy_on_pipeline_iterations: Whether the policy wraps iterations.
        set_remat_policy_on_layers_per_stage: Whether the policy wraps layers.
        remat_policy: A name of `autodiff.POLICIES`.
        shard_mode: "auto" or "explicit".
        logical_axis_rules: Pairs (logical axis, mesh axes). Default: none.
        pipeline_batch_axes: Mesh axes of rows that are manual in the pipeline, which MaxText does
            not have.
        debug_sharding: Whether to log the sharding of every weight.
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
    scan_layers_per_stage: bool = True
    set_remat_policy_on_pipeline_iterations: bool = True
    set_remat_policy_on_layers_per_stage: bool = False
    remat_policy: Any = "full"
    shard_mode: Any = "auto"
    logical_axis_rules: Iterable | None = None
    pipeline_batch_axes: Any = ()
    debug_sharding: bool = False
    tensor_locations: Mapping[str, Any] = field(default_factory=dict)


def read_keys(config: Any) -> PipelineKeys:
    """Returns the keys of a pipeline in `config`, with the types that they must have.

    Args:
        config: Any object whose attributes are the fields of `PipelineKeys`, and for the policy
            "custom" the tensors of `autodiff.TENSORS`. Values may be Enums.

    Raises:
        ValueError: If `config` is a mapping, or a flag or a number has another type.
    """
    if isinstance(config, Mapping):
        raise ValueError(
            f"`config` is a {type(config).__name__}, whose keys are no attributes. Give an object "
            "with fields, such as `types.SimpleNamespace(**config)`."
        )

    def read(name: str) -> Any:
        try:
            found = getattr(config, name, None)
        except (KeyError, ValueError):  # older configs of MaxText raise these for unknown names
            return None
        return found.value if isinstance(found, Enum) else found

    parsers = {key.name: _PARSERS.get(key.type, _as_given) for key in fields(PipelineKeys)}
    parsers |= dict.fromkeys(TENSORS, _as_given) | {"pipeline_parallel_layers": _integer}
    parsers.pop("tensor_locations")
    found = {name: parse(name, read(name)) for name, parse in parsers.items()}
    given = {name: value for name, value in found.items() if value is not None}
    locations = {name: given.pop(name) for name in TENSORS if name in given}
    return PipelineKeys(tensor_locations=locations, **given)


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
