"""The model that a config describes, as the three functions that engines run."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from ... import models, sharding, spmd
from ...autodiff import Model, keep
from ._family import family_of
from ._fsdp import gathers_in_layers, with_gather
from ._rematerialization import remat_of_layers, remat_outside
from ._setup import Setup, attention_kernel, grouped_matmul


def build_model(setup: Setup) -> Model:
    """Embedding, stage and loss, each of one microbatch."""
    model = _build_model(setup)
    if not setup.config.pipeline_share_head:
        return model
    config = setup.config
    shared_loss = models.shared_next_token_loss(
        config.normalization_layer_epsilon, config.z_loss_multiplier
    )
    return dataclasses.replace(model, shared_loss=shared_loss)


def _build_model(setup: Setup) -> Model:
    config = setup.config
    attention = models.dot_product_attention
    if attention_kernel(setup) == "splash":
        attention = models.splash_attention(setup.rules)
    return family_of(config).model(
        setup.model,
        attention=attention,
        experts=models.routed_experts(setup.rules, grouped_matmul(setup)),
        constrain=sharding.constrain_with(setup.rules),
        dtype=jnp.dtype(config.dtype),
        dropout_rate=config.dropout_rate if config.enable_dropout else 0.0,
        project=models.PROJECTIONS[config.quantization],
        num_vocab_tiling=config.num_vocab_tiling,
        scan_layers=config.scan_layers_per_stage,
        layer_remat=_of_layers(setup),
        outside_remat=remat_outside(config),
        z_loss_multiplier=config.z_loss_multiplier,
    )


def _of_layers(setup: Setup) -> Callable[[Callable], Callable]:
    """What wraps a layer, from outside: whether it is there, rematerialisation, its gather."""
    somewhere = setup.layout.counts and not setup.stages_apart
    present = spmd.if_present if somewhere else keep
    remat = remat_of_layers(setup.config)
    gather = with_gather(setup) if gathers_in_layers(setup) else keep
    return lambda layer: present(remat(gather(layer)))
