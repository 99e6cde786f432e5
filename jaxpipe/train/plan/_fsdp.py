"""How the trainer's weights are gathered, and where gradients and the optimizer's state lie."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from ... import models, sharding, spmd
from ..config._config import Config
from ._setup import Setup


def weight_gathers(setup: Setup) -> tuple[spmd.Gather, spmd.Gather]:
    """Of the stages, and of embedding and head."""
    ends = {name: setup.abstract_weights[name] for name in ("embed", "head")}
    stage = jax.tree.map(_stage_weight, setup.abstract_weights["stages"], is_leaf=models.is_weight)
    of_stages = (
        _per_layer_gather(setup, stage)
        if gathers_per_layer(setup)
        else _weight_gather(setup, stage)
    )
    return of_stages, _weight_gather(setup, ends)


def gathers_per_layer(setup: Setup) -> bool:
    return setup.config.pipeline_fsdp_ag_per_layer


def layer_gather_wrapper(setup: Setup) -> Callable[[Callable], Callable]:
    """What wraps a layer so that it gathers its own weights, in the forward and in the backward."""
    abstract_unstacked_weights = setup.abstract_unstacked_weights["layer"]
    cast = _cast_to_compute_dtype(setup, abstract_unstacked_weights)
    gather = spmd.layer_gather(
        models.logical_axes(abstract_unstacked_weights),
        setup.rules,
        cast=lambda weights: _name_gathered(cast(weights)),
        batch_axes=batch_axes(setup),
    )

    def wrap(layer: Callable) -> Callable:
        def gathered(weights: PyTree, x: PyTree, *arguments: PyTree) -> PyTree:
            return layer(_name_gathered(gather(weights, x)), x, *arguments)

        return jax.checkpoint(gathered, prevent_cse=False, policy=_is_saveable)

    return wrap


_GATHERED = "gathered_weights"


def _name_gathered(weights: PyTree) -> PyTree:
    return jax.tree.map(lambda w: checkpoint_name(w, _GATHERED), weights)


def _is_saveable(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Everything but gathered weights, which the backward gathers again.

    They are what has the name, and what a call returns that gives the name inside: what the name
    is given to would else be kept in its place. JAX's `save_anything_except_these_names` keeps all.
    """
    del primitive
    call = parameters.get("call_jaxpr")
    inside = () if call is None else (step.params.get("name") for step in call.jaxpr.eqns)
    return _GATHERED not in (parameters.get("name"), *inside)


def boundary_gathers(setup: Setup) -> dict[str, spmd.Gather]:
    """Of embedding and head, each by itself."""
    return {name: _weight_gather(setup, setup.abstract_weights[name]) for name in ("embed", "head")}


def optimizer_rules(setup: Setup) -> sharding.Rules:
    """ZeRO-1 splits the optimizer's state, and the gradients it takes, over data too."""
    if setup.config.shard_optimizer_over_data:
        return sharding.zero_rules(setup.rules)
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
    return spmd.gather_in_layers(
        models.logical_axes(tree),
        setup.rules,
        batch_axes=batch_axes(setup),
        gradient_rules=optimizer_rules(setup),
    )


def _cast_to_compute_dtype(setup: Setup, tree: PyTree) -> Callable[[PyTree], PyTree]:
    """To the dtypes that layers read their weights in."""
    dtypes = models.read_dtypes(tree, jnp.dtype(setup.config.dtype))
    return lambda weights: jax.tree.map(lambda x, dtype: x.astype(dtype), weights, dtypes)


def batch_axes(setup: Setup) -> tuple[str, ...]:
    """Axes that split the batch and nothing else inside a layer: each device has its own rows."""
    batch = dict(setup.rules)["activation_batch"]
    return tuple(axis for axis in ("data", "fsdp") if axis in batch)


def _gather_frequency(config: Config) -> Literal["tick", "repeat", "once"]:
    if config.pipeline_fsdp_ag_per_repeat:
        return "repeat"
    return "once" if config.pipeline_fsdp_ag_once else "tick"


def _stage_weight(weight: Any) -> models.Weight:
    """One stage's part of a weight [R, S, ...]."""
    return dataclasses.replace(weight, shape=weight.shape[2:], axes=weight.axes[2:])
