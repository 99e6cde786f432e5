"""Fully sharded weights: when they are gathered, and in which dtype they are read."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import models, spmd
from ...models.weights._abstract import is_weight, read_dtypes
from ...sharding._rules import gathered_rules
from ...spmd.weight_gather import (
    as_stored_on_gpus,
    gather_in_layers,
    gathering_layer,
    layer_gather,
    specs_of,
)
from ._devices import DeviceLayout
from ._weight_plan import WeightPlan


@dataclass(frozen=True)
class GatherPlan:
    """When weights that are sharded over `fsdp` are gathered.

    Attributes:
        when: In every "tick", "once", or once per "repeat", ahead of it; None without a pipeline.
        per_layer: Whether every layer gathers its own weights.
        dtype: The dtype in which layers read them.
    """

    when: Literal["tick", "repeat", "once"] | None
    per_layer: bool
    dtype: str


def weight_gathers(weights: WeightPlan, gather: GatherPlan) -> tuple[spmd.Gather, spmd.Gather]:
    """Returns the weight gathers of the stages, and of embedding and head together.

    Returns:
        The gather of one stage's weights, and that of `{"embed": ..., "head": ...}`.
    """
    tree = weights.abstract
    boundary = {name: tree[name] for name in ("embed", "head")}
    stage = jax.tree.map(_stage_weight, tree["stages"], is_leaf=is_weight)
    stage_gather = (
        _per_layer_gather(weights.devices, stage)
        if gather.per_layer
        else _weight_gather(weights.devices, gather, stage)
    )
    return stage_gather, _weight_gather(weights.devices, gather, boundary)


def layer_gather_wrapper(weights: WeightPlan, gather: GatherPlan) -> Callable[[Callable], Callable]:
    """Returns a wrapper that makes a layer gather its own weights, in the forward and the backward.

    Returns:
        From `layer(weights, x, *arguments)` to the same function of sharded weights.
    """
    layer = weights.abstract_unstacked["layer"]
    cast = _cast_to_compute_dtype(gather, layer)
    logical, rules = models.logical_axes(layer), weights.devices.rules
    gather_weights = layer_gather(
        specs_of(logical, rules),
        specs_of(logical, gathered_rules(rules)),
        cast=cast,
        batch_axes=weights.devices.batch_axes,
    )

    return lambda layer: gathering_layer(layer, gather_weights)


def stored_layout_wrapper(weights: WeightPlan) -> Callable[[Callable], Callable]:
    """Returns a wrapper that makes a layer on GPUs read weights in the layout of stored ones.

    Returns:
        From `layer(weights, x, *arguments)` to the same function.
    """
    logical = models.logical_axes(weights.abstract_unstacked["layer"])
    specs = specs_of(logical, weights.devices.rules)

    def wrap(layer: Callable) -> Callable:
        return lambda weights, *arguments: layer(as_stored_on_gpus(weights, specs), *arguments)

    return wrap


def boundary_gathers(weights: WeightPlan, gather: GatherPlan) -> dict[str, spmd.Gather]:
    """Returns the weight gathers of embedding and head, each by itself.

    Returns:
        The gathers by `embed` and `head`.
    """
    tree = weights.abstract
    return {name: _weight_gather(weights.devices, gather, tree[name]) for name in ("embed", "head")}


def _weight_gather(devices: DeviceLayout, gather: GatherPlan, tree: PyTree) -> spmd.Gather:
    assert gather.when is not None, "pipelines gather weights"
    return spmd.gather_weights(
        models.logical_axes(tree),
        devices.rules,
        when=gather.when,
        cast=_cast_to_compute_dtype(gather, tree),
        batch_axes=devices.batch_axes,
        gradient_rules=devices.optimizer_rules,
    )


def _per_layer_gather(devices: DeviceLayout, tree: PyTree) -> spmd.Gather:
    rules = devices.rules, gathered_rules(devices.rules), devices.optimizer_rules
    specs = (specs_of(models.logical_axes(tree), of_part) for of_part in rules)
    return gather_in_layers(*specs, batch_axes=devices.batch_axes)


def _cast_to_compute_dtype(gather: GatherPlan, tree: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns a function that casts weights to the dtypes that layers read them in."""
    dtypes = read_dtypes(tree, jnp.dtype(gather.dtype))
    return lambda weights: jax.tree.map(lambda x, dtype: x.astype(dtype), weights, dtypes)


def _stage_weight(weight: Any) -> models.Weight:
    """Returns the abstract weight of one stage, from one whose dims are [R, S, ...]."""
    return dataclasses.replace(weight, shape=weight.shape[2:], axes=weight.axes[2:])
