"""Fully sharded weights: when they are gathered, and how gradients and moments are sharded."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import models, sharding, spmd
from ...models.weights._abstract import is_weight, read_dtypes
from ...sharding import zero1_rules
from ...spmd.weight_gather import gather_in_layers, gathering_layer, layer_gather, name_gathered
from ..config._config import Config
from ._setup import Setup


def weight_gathers(setup: Setup) -> tuple[spmd.Gather, spmd.Gather]:
    """Returns the weight gathers of the stages, and of embedding and head together.

    Args:
        setup: The run.

    Returns:
        The gather of one stage's weights, and that of `{"embed": ..., "head": ...}`.
    """
    boundary = {name: setup.abstract_weights[name] for name in ("embed", "head")}
    stage = jax.tree.map(_stage_weight, setup.abstract_weights["stages"], is_leaf=is_weight)
    stage_gather = (
        _per_layer_gather(setup, stage)
        if gathers_per_layer(setup)
        else _weight_gather(setup, stage)
    )
    return stage_gather, _weight_gather(setup, boundary)


def gathers_per_layer(setup: Setup) -> bool:
    """Returns whether every layer gathers its own weights."""
    return setup.config.pipeline_fsdp_ag_per_layer


def layer_gather_wrapper(setup: Setup) -> Callable[[Callable], Callable]:
    """Returns a wrapper that makes a layer gather its own weights, in the forward and the backward.

    Args:
        setup: The run.

    Returns:
        From `layer(weights, x, *arguments)` to the same function of sharded weights.
    """
    abstract_unstacked_weights = setup.abstract_unstacked_weights["layer"]
    cast = _cast_to_compute_dtype(setup, abstract_unstacked_weights)
    gather = layer_gather(
        models.logical_axes(abstract_unstacked_weights),
        setup.rules,
        cast=lambda weights: name_gathered(cast(weights)),
        batch_axes=batch_axes(setup),
    )

    return lambda layer: gathering_layer(layer, gather)


def boundary_gathers(setup: Setup) -> dict[str, spmd.Gather]:
    """Returns the weight gathers of embedding and head, each by itself.

    Args:
        setup: The run.

    Returns:
        The gathers by `embed` and `head`.
    """
    return {name: _weight_gather(setup, setup.abstract_weights[name]) for name in ("embed", "head")}


def optimizer_rules(setup: Setup) -> sharding.Rules:
    """Returns the logical axis rules of the optimizer's state, and of the gradients that it takes.

    Args:
        setup: The run.

    Returns:
        With ZeRO-1 (`shard_optimizer_over_data`), rules that split over the axis `data` too.
    """
    if setup.config.shard_optimizer_over_data:
        return zero1_rules(setup.rules)
    return setup.rules


def _weight_gather(setup: Setup, tree: PyTree) -> spmd.Gather:
    return spmd.gather_weights(
        models.logical_axes(tree),
        setup.rules,
        when=_gather_frequency(setup.config),
        cast=_cast_to_compute_dtype(setup, tree),
        batch_axes=batch_axes(setup),
        gradient_rules=optimizer_rules(setup),
    )


def _per_layer_gather(setup: Setup, tree: PyTree) -> spmd.Gather:
    return gather_in_layers(
        models.logical_axes(tree),
        setup.rules,
        batch_axes=batch_axes(setup),
        gradient_rules=optimizer_rules(setup),
    )


def _cast_to_compute_dtype(setup: Setup, tree: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns a function that casts weights to the dtypes that layers read them in."""
    dtypes = read_dtypes(tree, jnp.dtype(setup.config.dtype))
    return lambda weights: jax.tree.map(lambda x, dtype: x.astype(dtype), weights, dtypes)


def batch_axes(setup: Setup) -> tuple[str, ...]:
    """Returns the mesh axes that split the batch and nothing else inside a layer.

    Args:
        setup: The run.

    Returns:
        `data`, `fsdp`, both or neither: along them every device has rows of its own.
    """
    batch = dict(setup.rules)["activation_batch"]
    return tuple(axis for axis in ("data", "fsdp") if axis in batch)


def _gather_frequency(config: Config) -> Literal["tick", "repeat", "once"]:
    if config.pipeline_fsdp_ag_per_repeat:
        return "repeat"
    return "once" if config.pipeline_fsdp_ag_once else "tick"


def _stage_weight(weight: Any) -> models.Weight:
    """Returns the abstract weight of one stage, from one whose dims are [R, S, ...]."""
    return dataclasses.replace(weight, shape=weight.shape[2:], axes=weight.axes[2:])
