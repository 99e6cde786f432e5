"""Builds the model of a run from the three functions that every engine runs."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ... import models, sharding
from ..._compat import splash_aborts_in_pipelines
from ...autodiff import StagedModel, keep
from ...models.layers._attention import dot_product_attention
from ...models.layers._flash_attention import splash_attention
from ...models.layers._grouped_matmul import GroupedMatmul, megablox, ragged_dot
from ...models.layers._projection import PROJECTIONS
from ...models.layers._routed_experts import routed_experts
from ...spmd.ranks import masked_layer
from ._devices import DeviceLayout
from ._fsdp import GatherPlan, layer_gather_wrapper
from ._rematerialization import RematPlan
from ._weight_plan import WeightPlan


@dataclass(frozen=True)
class ModelPlan:
    """How the functions of a model compute, whatever its weights.

    Attributes:
        dtype: The dtype of activations.
        attention: The attention kernel, `splash` or `dot_product`.
        grouped_matmul: Multiplies rows with the weights of their experts.
        quantization: The name of the projections, a key of `PROJECTIONS`.
        dropout_rate: The share of activations that dropout sets to 0.
        num_vocab_tiling: Number of parts in which logits are computed.
        z_loss_multiplier: Factor of the z-loss.
        scan_layers: Whether the layers of a stage run in a `lax.scan`.
        vocab_parallel: Whether all ranks compute the loss together.
        remat: What forwards store for backwards.
    """

    dtype: str
    attention: str
    grouped_matmul: GroupedMatmul
    quantization: str
    dropout_rate: float
    num_vocab_tiling: int
    z_loss_multiplier: float
    scan_layers: bool
    vocab_parallel: bool
    remat: RematPlan


def build_model(plan: ModelPlan, weights: WeightPlan, gather: GatherPlan) -> StagedModel:
    """Builds the model: embedding, stage and loss, each a function of one microbatch.

    Args:
        plan: How the model computes.
        weights: Its weights.
        gather: When they are gathered.

    Returns:
        The model, with every layer wrapped in its layer mask, rematerialisation and weight gather.
    """
    model = _build_base_model(plan, weights, gather)
    if not plan.vocab_parallel:
        return model
    vocab_parallel_loss = models.vocab_parallel_next_token_loss(
        weights.sizes.normalization_layer_epsilon, plan.z_loss_multiplier
    )
    return dataclasses.replace(model, vocab_parallel_loss=vocab_parallel_loss)


def _build_base_model(plan: ModelPlan, weights: WeightPlan, gather: GatherPlan) -> StagedModel:
    rules = weights.devices.rules
    attention = splash_attention(rules) if plan.attention == "splash" else dot_product_attention
    return weights.family.model(
        weights.sizes,
        attention=attention,
        experts=routed_experts(rules, plan.grouped_matmul),
        constrain=sharding.constrain_with(rules),
        dtype=jnp.dtype(plan.dtype),
        dropout_rate=plan.dropout_rate,
        project=PROJECTIONS[plan.quantization],
        num_vocab_tiling=plan.num_vocab_tiling,
        scan_layers=plan.scan_layers,
        layer_remat=_layer_wrapper(plan.remat, weights, gather),
        outside_remat=plan.remat.outer_layer,
        z_loss_multiplier=plan.z_loss_multiplier,
    )


def _layer_wrapper(
    remat: RematPlan, weights: WeightPlan, gather: GatherPlan
) -> Callable[[Callable], Callable]:
    """Returns a wrapper of layers; from outside in: layer mask, remat, weight gather."""
    mask = masked_layer if weights.has_padding else keep
    rematerialized = remat.layer
    gathered = layer_gather_wrapper(weights, gather) if gather.per_layer else keep
    return lambda layer: mask(rematerialized(gathered(layer)))


def select_attention_kernel(wanted: str, length: int, devices: DeviceLayout) -> str:
    """Selects the attention kernel that a run wants, or for `auto` splash where it can run.

    Args:
        wanted: The value of `attention`.
        length: T, the number of tokens per row.
        devices: The devices of the run.

    Returns:
        `splash` or `dot_product`.

    Raises:
        ValueError: If splash is wanted and it cannot run.
    """
    if wanted == "dot_product":
        return "dot_product"
    platform = devices.platform
    problems = {
        f"the devices are {platform}s, not TPUs": platform != "tpu",
        f"`max_target_length` is {length}, not a multiple of 128": length % 128 != 0,
        "sequences are split over the axis 'context'": devices.mesh.shape["context"] > 1,
        f"jax {jax.__version__} cannot compile it in a pipeline (take 0.11 or newer, or set "
        "JAX_USE_SHARDY_PARTITIONER=false)": splash_aborts_in_pipelines(),
    }
    found = "; ".join(problem for problem, applies in problems.items() if applies)
    if wanted == "splash" and found:
        raise ValueError(f"`attention` is 'splash', but {found}. Give 'auto' or 'dot_product'.")
    return "dot_product" if found else "splash"


def select_grouped_matmul(wanted: bool | str, platform: str) -> GroupedMatmul:
    """Selects the experts' grouped matmul: Megablox's kernel on TPUs unless a run refuses it.

    Args:
        wanted: The value of `megablox`: true, false or "auto".
        platform: The platform of the devices.

    Returns:
        The function that multiplies rows with the weights of their experts.

    Raises:
        ValueError: If the kernel is wanted and the devices are not TPUs.
    """
    if wanted is True and platform != "tpu":
        raise ValueError(
            f"`megablox` is true, but the devices are {platform}s, not TPUs. Give 'auto' or false."
        )
    return megablox() if platform == "tpu" and wanted else ragged_dot
