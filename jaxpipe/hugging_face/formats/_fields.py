"""The fields of a config.json: each is understood, or named before anything else is read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..._input import short_repr, shorten
from ...models import ModelConfig

ConfigValues = dict[str, Any]
"""Fields of a config.json, or keys of a config of jaxpipe, and their values."""

ALWAYS_IGNORED = frozenset(
    (
        *("_attn_implementation", "_name_or_path", "architectures", "auto_map", "model_type"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
        *("dtype", "torch_dtype", "transformers_version", "initializer_range", "pretraining_tp"),
        *("output_router_logits", "use_cache"),
    )
)
"""Fields that do not change what a model computes from weights and tokens."""

YARN = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
"""Fields of YaRN, and the keys that they give."""

ROPE = ("rope_parameters", "rope_scaling", "rope_theta")


@dataclass(frozen=True)
class ConfigFields:
    """The fields that the config.json of a kind of model may have."""

    sizes: Mapping[str, str]  # from a field to the key of ours that it gives
    defaults: Mapping[str, Any]  # what transformers takes for missing fields; others must exist
    fixed: Mapping[str, tuple[Any, ...]]  # the values that our model supports, the default first
    ignored: Collection[str] = ()  # further fields that do not change what the model computes


def read_fields(config: Mapping[str, Any], fields: ConfigFields) -> ConfigValues:
    """Returns the config keys that the fields give, except those of rotary positions."""
    understood = {*fields.sizes, *fields.fixed, *fields.ignored, *ROPE, *ALWAYS_IGNORED}
    problems = [
        f"`{shorten(name, 80)}` is {short_repr(config[name])}: unknown"
        for name in config
        if name not in understood
    ]
    for name, values in fields.fixed.items():
        actual = config.get(name, values[0])
        if actual not in values:
            can_be = " or ".join(map(repr, values))
            problems.append(f"`{name}` is {short_repr(actual)}: only {can_be} is supported")
    required = [name for name in fields.sizes if name not in fields.defaults]
    problems += [f"`{name}` is missing" for name in required if config.get(name) is None]
    check_no_problems(problems)
    given_values = {name: value for name, value in config.items() if value is not None}
    with_defaults = {**fields.defaults, **given_values}
    return {key: with_defaults[name] for name, key in fields.sizes.items()}


def read_rope(
    config: Mapping[str, Any], *, defaults: Mapping[str, Any], types: Mapping[str, Collection[str]]
) -> ConfigValues:
    """Reads the fields of rotary positions, with `rope_type` and `rope_theta`, into one mapping."""
    # Older files have `rope_theta` and `rope_scaling`; newer ones have all in `rope_parameters`.
    theta = config.get("rope_theta")
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    mapping = config.get(name) or {}
    if not isinstance(mapping, Mapping):
        raise ValueError(f"`{name}` is {short_repr(mapping)}: only an object is supported")
    older = config.get("rope_scaling")
    if isinstance(older, Mapping) and any(
        key != "type" and mapping.get(key) != value for key, value in older.items()
    ):
        raise ValueError(
            f"`rope_scaling` is {short_repr(older)} and `rope_parameters` {short_repr(mapping)}: "
            "only one of them, or equal ones, are supported"
        )
    inner = {key: value for key, value in mapping.items() if value is not None}
    kind = inner.pop("rope_type", inner.pop("type", "default"))
    outer = {} if theta is None else {"rope_theta": theta}
    if not isinstance(kind, str) or kind not in types:
        raise ValueError(
            f"`{name}.rope_type` is {short_repr(kind)}: only {', '.join(types)} are supported"
        )
    inner.pop("type", None)
    takes = {"rope_theta", *types[kind]}
    problems = [
        f"`{name}.{shorten(key, 80)}` is {short_repr(inner[key])}: unknown"
        for key in inner
        if key not in takes
    ]
    settings = {**defaults, **outer, **inner}
    problems += [f"`{name}.{key}` is missing" for key in takes if key not in settings]
    problems += [
        f"`{name}.{key}` is {short_repr(settings[key])}: only numbers above 0 are supported"
        for key in takes
        if key in settings and not _is_positive(settings[key])
    ]
    check_no_problems(problems)
    return {"rope_type": kind, **{key: settings[key] for key in takes}}


def yarn_values(rope: Mapping[str, Any], fields: Mapping[str, str] = YARN) -> ConfigValues:
    """Returns the config keys of rotary positions by YaRN, but for the base of their angles."""
    values: ConfigValues = {key: float(rope[name]) for name, key in fields.items()}
    length = int(rope["original_max_position_embeddings"])
    return values | {"original_max_position_embeddings": length, "rope_type": "yarn"}


def check_no_problems(problems: list[str]) -> None:
    """Raises a ValueError that lists the problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise ValueError("; ".join([*problems[:8], *more]))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < 1e18


def write_fields(sizes: ModelConfig, fields: ConfigFields) -> ConfigValues:
    """Returns the fields of a config.json for the sizes of a model, and the fixed fields."""
    written = {name: getattr(sizes, key) for name, key in fields.sizes.items()}
    return written | {name: fixed[0] for name, fixed in fields.fixed.items()}
