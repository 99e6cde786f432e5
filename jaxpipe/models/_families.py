"""The families of models that the trainer has, one for each value of `decoder_block`.

The fields of a family's dataclass of sizes are keys of the config. Keys that only other families
read must keep their defaults.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ._deepseek import DeepseekConfig, deepseek, deepseek_weights
from ._gemma import GemmaConfig
from ._gpt_oss import GptOssConfig
from ._llama import LlamaConfig, MixtureConfig, llama, llama_weights
from ._llama4 import Llama4Config

ModelConfig = LlamaConfig | DeepseekConfig


@dataclass(frozen=True)
class ModelFamily:
    """The functions and keys that the trainer needs of a model family.

    Attributes:
        sizes: Dataclass whose fields are keys of the config.
        weights: `(sizes, dtype, layers_after=...) -> abstract weights`.
        model: `(sizes, experts=..., **options) -> (embed, layer, loss)`, functions of a microbatch;
            all families take the same options.
        extra_keys: Keys beside the sizes that this family reads and some others do not.
        tied: `sizes -> whether` the loss reads the weights of the embedding.
        has_slices: Whether it is trained on slices of sequences.
        fixed: Sizes that every model of the family has.
    """

    sizes: Callable[..., ModelConfig]
    weights: Callable[..., dict[str, Any]]
    model: Callable[..., tuple[Callable, Callable, Callable]]
    extra_keys: tuple[str, ...] = ()
    tied: Callable[..., bool] = lambda sizes: False
    has_slices: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """Keys of the config that this family reads."""
        return {field.name for field in dataclasses.fields(self.sizes)} | {*self.extra_keys}  # pyright: ignore[reportArgumentType]


_OF_MLPS = ("mlpwi_0", "mlpwi_1", "mlpwo")
_OF_EXPERTS = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "megablox", "shard_exp_on_fsdp")
"""Keys of families with MLPs, and of those with experts; tensors are among `autodiff.TENSORS`."""


def _llama(sizes: type[LlamaConfig], extra_keys: tuple[str, ...], **fixed: Any) -> ModelFamily:
    """Returns a family of llamas."""
    return ModelFamily(
        sizes,
        llama_weights,
        llama,
        extra_keys=extra_keys,
        tied=attrgetter("logits_via_embedding"),
        has_slices=not issubclass(sizes, MixtureConfig),
        fixed=fixed,
    )


MODEL_FAMILIES: dict[str, ModelFamily] = {
    "llama": _llama(LlamaConfig, _OF_MLPS, use_qk_norm=False),
    "mistral": _llama(LlamaConfig, _OF_MLPS, use_qk_norm=False),
    "qwen3": _llama(LlamaConfig, _OF_MLPS, use_qk_norm=True),
    "gemma3": _llama(GemmaConfig, _OF_MLPS, use_qk_norm=True, rope_type="default"),
    "mixtral": _llama(MixtureConfig, _OF_EXPERTS, use_qk_norm=False, norm_topk_prob=True),
    "qwen3_moe": _llama(MixtureConfig, _OF_EXPERTS, use_qk_norm=True),
    "gpt_oss": _llama(
        GptOssConfig, _OF_EXPERTS, use_qk_norm=False, norm_topk_prob=True, rope_type="yarn"
    ),
    "llama4": _llama(
        Llama4Config, (*_OF_MLPS, *_OF_EXPERTS), norm_topk_prob=False, rope_type="default"
    ),
    "deepseek": ModelFamily(
        DeepseekConfig,
        deepseek_weights,
        deepseek,
        extra_keys=("routed_bias_update_rate", "mla_q", "mla_kv", *_OF_MLPS, *_OF_EXPERTS),
    ),
}
