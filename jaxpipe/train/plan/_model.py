"""Builds the model of a config from the three functions that every engine runs."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from ... import models, sharding
from ...autodiff import StagedModel, keep
from ...models.layers._attention import dot_product_attention
from ...models.layers._flash_attention import splash_attention
from ...models.layers._projection import PROJECTIONS
from ...models.layers._routed_experts import routed_experts
from ...spmd.ranks import masked_layer
from ._family import model_family
from ._fsdp import gathers_per_layer, layer_gather_wrapper
from ._rematerialization import layer_remat, outer_layer_remat
from ._setup import Setup, select_attention_kernel, select_grouped_matmul


def build_model(setup: Setup) -> StagedModel:
    """Builds the model: embedding, stage and loss, each a function of one microbatch.

    Args:
        setup: The run.

    Returns:
        The model, with every layer wrapped in its layer mask, rematerialisation and weight gather.
    """
    model = _build_base_model(setup)
    if not setup.config.pipeline_vocab_parallel:
        return model
    config = setup.config
    vocab_parallel_loss = models.vocab_parallel_next_token_loss(
        config.normalization_layer_epsilon, config.z_loss_multiplier
    )
    return dataclasses.replace(model, vocab_parallel_loss=vocab_parallel_loss)


def _build_base_model(setup: Setup) -> StagedModel:
    config = setup.config
    attention = dot_product_attention
    if select_attention_kernel(setup) == "splash":
        attention = splash_attention(setup.rules)
    return model_family(config).model(
        setup.model_config,
        attention=attention,
        experts=routed_experts(setup.rules, select_grouped_matmul(setup)),
        constrain=sharding.constrain_with(setup.rules),
        dtype=jnp.dtype(config.dtype),
        dropout_rate=config.dropout_rate if config.enable_dropout else 0.0,
        project=PROJECTIONS[config.quantization],
        num_vocab_tiling=config.num_vocab_tiling,
        scan_layers=config.scan_layers_per_stage,
        layer_remat=_layer_wrapper(setup),
        outside_remat=outer_layer_remat(config),
        z_loss_multiplier=config.z_loss_multiplier,
    )


def _layer_wrapper(setup: Setup) -> Callable[[Callable], Callable]:
    """Returns a wrapper of layers; from outside in: layer mask, remat, weight gather."""
    has_padding = setup.layout.counts and not setup.per_stage_state
    mask = masked_layer if has_padding else keep
    remat = layer_remat(setup.config)
    gather = layer_gather_wrapper(setup) if gathers_per_layer(setup) else keep
    return lambda layer: mask(remat(gather(layer)))
