"""Builds the model of a run: its sizes, and the three functions that every engine runs."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import PyTree

from ... import autodiff, models, sharding
from ...api import Model
from ...api.cut import ModelFunction
from ...autodiff.backward import TENSORS, saved_names
from ...autodiff.staged_model import Past
from ...kernels import AttentionPlan, traced_widest_head
from ...models import MODEL_FAMILIES, ModelConfig
from ...models.layers import (
    PROJECTIONS,
    GroupedMatmul,
    megablox,
    pallas_gpu_grouped_matmul,
    ragged_dot,
    rope,
    rope_by_product,
    routed_experts,
)
from ..config._config import Config, changed_keys
from ._weight_plan import WeightPlan

CHUNK_ROWS = 512
"""Rows of an expert in a chunk of tokens, on average: those of a tile of Megablox's kernel."""


@dataclass(frozen=True)
class RematPlan:
    """What forwards store for backwards, and what is computed again.

    Attributes:
        policy: The name of the policy, as `autodiff.remat_by_name` takes it.
        locations: The location of each tensor, for the policy `custom`.
        on_ticks: Whether the policy is applied to the stage that a tick runs.
        on_layers: Whether it is applied to every layer.
    """

    policy: str
    locations: Mapping[str, str]
    on_ticks: bool
    on_layers: bool

    @property
    def recomputes(self) -> bool:
        """Returns whether backwards compute anything again."""
        return self.policy != "none"

    @property
    def recomputes_experts(self) -> bool:
        """Returns whether backwards compute all results of routed experts again."""
        if not self.recomputes or not (self.on_ticks or self.on_layers):
            return False
        kept = {name for names in saved_names(self.policy, self.locations) for name in names}
        return kept.isdisjoint(("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"))

    @property
    def tick(self) -> autodiff.Remat:
        """Returns the rematerialisation of the stage that a tick runs."""
        return self.outer_layer if self.on_ticks else autodiff.keep

    @property
    def layer(self) -> autodiff.Remat:
        """Returns the rematerialisation of a layer of a stage."""
        return self.outer_layer if self.on_layers else autodiff.keep

    @property
    def outer_layer(self) -> autodiff.Remat:
        """Returns that of layers outside of stages, which engines never recompute."""
        return autodiff.remat_by_name(self.policy, self.locations)


@dataclass(frozen=True)
class ModelPlan:
    """How the functions of a model compute, whatever its weights.

    Attributes:
        config: The keys of the run.
        attentions: The facts by which the kernel of each kind of layers is selected.
        grouped_matmul: Multiplies rows with the weights of their experts.
        remat: The residuals that forwards store.
    """

    config: Config
    attentions: tuple[AttentionPlan, ...]
    grouped_matmul: GroupedMatmul
    remat: RematPlan

    @property
    def attention(self) -> AttentionPlan:
        """Returns the attention that needs most memory: of layers that store scores, if any do."""
        return max(self.attentions, key=lambda plan: plan.kernel == "dot_product")


def model_plan(
    config: Config,
    sizes: ModelConfig,
    platform: str,
    context_size: int = 1,
) -> ModelPlan:
    """Returns the choices by which a run's model computes on a platform such as "tpu"."""
    return ModelPlan(
        config=config,
        attentions=tuple(
            AttentionPlan(
                config.attention,
                platform,
                config.max_target_length,
                # Chunks are told apart as documents are.
                packed=(config.packing and config.dataset_type != "synthetic")
                or 0 < sizes.chunk < config.max_target_length,
                dtype=config.dtype,
                head_dim=sizes.attention.head_dim,
                context_size=context_size,
                scores=scores,
                has_sinks=sizes.has_biases_and_sinks,
                widest_head=traced_widest_head(),
            )
            for scores in sizes.attention_scores
        ),
        grouped_matmul=select_grouped_matmul(config.megablox, platform),
        remat=RematPlan(
            config.remat_policy,
            {tensor: getattr(config, tensor) for tensor in TENSORS},
            # Without a pipeline there is no tick.
            on_ticks=config.engine.pipelines and config.set_remat_policy_on_pipeline_iterations,
            on_layers=config.set_remat_policy_on_layers_per_stage or not config.engine.pipelines,
        ),
    )


def build_model(plan: ModelPlan, weights: WeightPlan) -> Model:
    """Builds the model of a run for the front door, of functions that return contributions."""
    embed, layer, loss = build_functions(plan, weights)
    is_nnx = plan.config.enable_nnx  # None: a plain function
    if is_nnx is not None:
        module = import_flax_layer()
        layer = module.flax_layer(layer, weights.abstract_unstacked["layer"], is_nnx=is_nnx)

    def run(weights: PyTree, x: PyTree, batch: PyTree, key: Any, past: Past | None = None) -> Any:
        if past is None:
            return layer(weights, x, batch, key)
        y, (aux, past) = layer(weights, x, batch, key, past)
        return (y, aux), past

    return Model(
        embed=embed,
        # By its signature a whole sequence would be a slice, without a kernel.
        layer=ModelFunction(run, bool(plan.config.active_dropout_rate), weights.family.has_slices),
        loss=loss if weights.tied else lambda head, x, batch: loss({"head": head}, x, batch),
        tied=weights.tied,
        vocab_parallel_loss=models.vocab_parallel_next_token_loss(
            weights.sizes.normalization_layer_epsilon,
            plan.config.z_loss_multiplier,
            norm_offset=weights.sizes.norm_offset,
        ),
        contributions=True,
        layer_constants=weights.layer_kinds,
        # Layers behind the pipeline are a part of the loss, and mix tokens.
        sequence_dim=None if weights.num_layers_after else 1,
    )


def import_flax_layer() -> Any:
    """Imports the module `_flax_layer`, which needs Flax."""
    try:
        from . import _flax_layer
    except ImportError as error:
        raise ValueError(
            "`enable_nnx` is set, which needs Flax, and it cannot be imported "
            f'({error}). `pip install "jaxpipe[flax]"`, or leave `enable_nnx` at null.'
        ) from error
    return _flax_layer


def build_functions(plan: ModelPlan, weights: WeightPlan) -> tuple[Callable, Callable, Callable]:
    """Returns `(embed, layer, loss)` of a run's model."""
    rules = weights.devices.rules
    attentions = [each.function(rules) for each in plan.attentions]
    return weights.family.model(
        weights.sizes,
        attention=attentions[0] if len(attentions) == 1 else tuple(attentions),
        experts=routed_experts(
            rules,
            plan.grouped_matmul,
            chunk_rows=CHUNK_ROWS if plan.remat.recomputes_experts else None,
        ),
        constrain=sharding.Constrain(rules),
        dtype=jnp.dtype(plan.config.dtype),
        dropout_rate=plan.config.active_dropout_rate,
        project=PROJECTIONS[plan.config.quantization],
        rotate=rope_by_product if plan.attention.platform == "tpu" else rope,
        num_vocab_tiling=plan.config.num_vocab_tiling,
        outside_remat=plan.remat.outer_layer,
        z_loss_multiplier=plan.config.z_loss_multiplier,
    )


def select_grouped_matmul(wanted: bool | str, platform: str) -> GroupedMatmul:
    """Selects the experts' grouped matmul: a Pallas kernel on TPUs and GPUs, unless refused."""
    if wanted is True and platform not in _KERNELS:
        raise ValueError(
            f"`megablox` is true, but the devices are {platform}s, neither TPUs nor GPUs. Give "
            "'auto' or false."
        )
    return _KERNELS[platform]() if platform in _KERNELS and wanted else ragged_dot


_KERNELS: Mapping[str, Callable[[], GroupedMatmul]] = {
    "tpu": megablox,
    "gpu": pallas_gpu_grouped_matmul,
}

_OF_YARN = {
    *("rope_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
}
"""Keys that a family reads with `rope_type=yarn` alone."""


def model_config(config: Config) -> ModelConfig:
    """Returns the sizes of the config's model."""
    family = MODEL_FAMILIES[config.decoder_block]
    others = set().union(*(other.keys for other in MODEL_FAMILIES.values())) - family.keys
    for name, value, default in changed_keys(config, sorted(others)):
        raise ValueError(
            f"`{name}` is {value!r} and `decoder_block` is {config.decoder_block!r}, which "
            f"has no such thing. Leave it at {default!r}."
        )
    for name, value in family.fixed.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"`{name}` is {getattr(config, name)!r} and `decoder_block` is "
                f"{config.decoder_block!r}, where it is {value!r} in every model. Give "
                f"`{name}={str(value).lower()}`, or another `decoder_block`."
            )
    unread = set() if config.rope_type == "yarn" else _OF_YARN & family.keys
    for name, value, default in changed_keys(config, sorted(unread)):
        raise ValueError(
            f"`{name}` is {value!r} and `rope_type` is {config.rope_type!r}, so nothing reads it. "
            f"Leave it at {default!r}, or give `rope_type=yarn`."
        )
    fields = dataclasses.fields(family.sizes)  # pyright: ignore[reportArgumentType]
    return family.sizes(**{field.name: getattr(config, field.name) for field in fields})


def layer_bytes(config: Config) -> int:
    """Returns the bytes of the weights of one layer of the pipeline in the dtype of computation."""
    dtype = jnp.dtype(config.dtype)
    weights = MODEL_FAMILIES[config.decoder_block].weights(model_config(config), dtype)
    return models.num_parameters(weights["layer"]) * dtype.itemsize
