"""Model families: what `decoder_block` chooses.

A family's sizes are keys of the config. Keys of other families alone must keep their defaults.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ... import models
from ...autodiff import Model
from ..config._config import Config

ModelConfig = models.LlamaConfig | models.DeepseekConfig


@dataclass(frozen=True)
class ModelFamily:
    """What the trainer needs of a kind of model.

    Attributes:
        sizes: Dataclass whose fields are keys of the config.
        weights: `(sizes, dtype, layers_after=...) -> abstract weights`.
        model: `(sizes, experts=..., **options) -> Model`; the options are those of all families.
        more_keys: Keys that this family reads beside its sizes, and not all others.
        more_side: What its stages read of a batch beside positions and segment ids.
    """

    sizes: Callable[..., ModelConfig]
    weights: Callable[..., dict[str, Any]]
    model: Callable[..., Model]
    more_keys: tuple[str, ...] = ()
    more_side: tuple[str, ...] = ()

    @property
    def keys(self) -> set[str]:
        """Keys of the config that this family reads."""
        return {field.name for field in dataclasses.fields(self.sizes)} | {*self.more_keys}  # pyright: ignore[reportArgumentType]


def _llama(sizes: models.LlamaConfig, *, experts: models.Experts, **options: Any) -> Model:
    del experts
    return Model(*models.llama(sizes, **options), tied=sizes.logits_via_embedding)


def _deepseek(sizes: models.DeepseekConfig, *, experts: models.Experts, **options: Any) -> Model:
    return Model(*models.deepseek(sizes, experts=experts, **options))


MODEL_FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(models.LlamaConfig, models.llama_weights, _llama),
    "deepseek": ModelFamily(
        models.DeepseekConfig,
        models.deepseek_weights,
        _deepseek,
        more_keys=("routed_bias_update_rate", "megablox"),
        more_side=("target_weights",),
    ),
}


def model_family(config: Config) -> ModelFamily:
    return MODEL_FAMILIES[config.decoder_block]


def model_config(config: Config) -> ModelConfig:
    """The sizes of the config's model.

    Raises:
        ValueError: If they do not fit together, or a key that this family never reads is set.
    """
    family = model_family(config)
    others = set().union(*(other.keys for other in MODEL_FAMILIES.values())) - family.keys
    for name in sorted(others):
        value, default = getattr(config, name), Config.model_fields[name].default
        if value != default:
            raise ValueError(
                f"`{name}` is {value!r} and `decoder_block` is {config.decoder_block!r}, which "
                f"has no such thing. Leave it at {default!r}."
            )
    fields = dataclasses.fields(family.sizes)  # pyright: ignore[reportArgumentType]
    return family.sizes(**{field.name: getattr(config, field.name) for field in fields})
