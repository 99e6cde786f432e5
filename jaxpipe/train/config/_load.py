"""Merges a config from many sources; from weak to strong: defaults, preset, files, overrides."""

import copy
import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from os import PathLike, fspath
from typing import Any

from pydantic import ValidationError

from ..._input import read_text, short_repr, shorten
from ._config import Config
from ._keys import SECTIONS
from ._maxtext_keys import SAME_KEYS, maxtext_advice
from ._yaml import MAX_YAML_BYTES, load_yaml, to_yaml

ConfigValues = dict[str, Any]

_TEXT_KEYS = {name for name, field in Config.model_fields.items() if field.annotation is str}
"""Keys whose value is text even if it looks like a number, as in `run_name=7`."""

_HEAD = """\
# Every key of a training run with its default. Override keys in a YAML file of your own or as
# `key=value` on the command line. From weak to strong: the defaults, the preset that `model_name`
# names, your files in the order given, the command line. Copy single lines: a copy of all of them
# would override the preset too."""

_WIDTH = 100

_MAX_PROBLEMS = 8
"""The most problems that one error lists, one line each."""


def load_config(
    files: Sequence[str | PathLike[str]] = (),
    overrides: Sequence[str] = (),
    *,
    presets: Mapping[str, Mapping[str, Any]],
) -> Config:
    """Loads a config from the defaults, a model's preset, files and overrides.

    From weak to strong: the defaults, the preset that `model_name` names (which may itself come
    from a file or an override), the files in order, the overrides in order.

    Args:
        files: YAML files, each a mapping from keys to values.
        overrides: `key=value` strings; the value is YAML.
        presets: Values of the keys of each model, by its name.

    Returns:
        The config, checked.

    Raises:
        ValueError: If a file is not a YAML mapping, a key or model is unknown, or a value has the
            wrong type or range; it lists all wrong values, each with its source.

    Example:
        >>> load_config([], ["steps=3"], presets={"llama-tiny": {}}).steps
        3
    """
    sources = [
        (file, parse_yaml(read_text(file, most_bytes=MAX_YAML_BYTES), file))
        for file in (fspath(each) for each in files)
    ]
    sources += [("the command line", parse_override(text)) for text in overrides]

    name = _merged(sources).get("model_name", Config.model_fields["model_name"].default)
    preset = _preset(name, presets)
    return _validated([(f"the preset {name!r}", preset), *sources])


def key_defaults() -> ConfigValues:
    """Returns the default of every key as plain data, as `parse_yaml` would read it."""
    return copy.deepcopy(_defaults())


@cache
def _defaults() -> ConfigValues:
    return Config().model_dump(mode="json")


def key_meanings() -> dict[str, str]:
    """Returns one line for every key that says what it means."""
    # Pydantic reads docstrings of attributes from the source; without it there are none.
    fields = Config.model_fields.items()
    return {key: " ".join((field.description or "").split()) for key, field in fields}


def defaults_yaml() -> str:
    """Returns a YAML file of every key with its default and its meaning, in sections."""
    defaults, meanings = key_defaults(), key_meanings()
    lines = [_HEAD]
    for section in SECTIONS:
        title = (section.__doc__ or section.__name__).rstrip(".")
        lines += ["", f"# --- {title} ---"]
        for key in section.model_fields:
            setting, meaning = f"{key}: {to_yaml(defaults[key])}", meanings[key]
            line = f"{setting}  # {meaning}"
            if len(line) <= _WIDTH:
                lines.append(line)
            else:
                above = textwrap.wrap(meaning, _WIDTH - 2, break_on_hyphens=False)
                lines += [*(f"# {line}" for line in above), setting]
    return "\n".join(lines) + "\n"


def parse_override(text: str) -> ConfigValues:
    """Parses an override; without a value, the value is the empty string."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"The override {short_repr(text)} is not `key=value`, such as `steps=10`.")
    parsed = load_yaml(value, f"The override {short_repr(text)}") if value.strip() else ""
    is_number = isinstance(parsed, int | float) and not isinstance(parsed, bool)
    key = SAME_KEYS.get(key, key)
    return {key: value.strip() if is_number and key in _TEXT_KEYS else parsed}


def parse_yaml(text: str, source: str) -> ConfigValues:
    """Parses a YAML text of a config."""
    values = load_yaml(text, source, text_keys=_TEXT_KEYS)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{source} holds a {type(values).__name__}. Write `key: value` lines.")
    named = {key if isinstance(key, str) else short_repr(key): x for key, x in values.items()}
    return {SAME_KEYS.get(key, key): value for key, value in named.items()}


def _preset(name: Any, presets: Mapping[str, Mapping[str, Any]]) -> ConfigValues:
    if not isinstance(name, str) or name not in presets:
        valid = ", ".join(sorted(presets))
        raise ValueError(
            f"`model_name` is {short_repr(name)}.{_did_you_mean(str(name), presets)} "
            f"Models: {valid}."
        )
    return dict(presets[name])


def check_values(values: ConfigValues, source: str) -> None:
    """Checks that the values of some keys are valid, each and together."""
    _validated([(source, values)])


def _merged(sources: Sequence[tuple[str, ConfigValues]]) -> ConfigValues:
    return {key: value for _, values in sources for key, value in values.items()}


def _validated(sources: Sequence[tuple[str, ConfigValues]]) -> Config:
    for source, values in sources:
        for key in values:
            if key not in Config.model_fields:
                advice = _unknown_key_advice(key)
                raise ValueError(f"{source} sets `{shorten(key, 80)}`, which is no key.{advice}")
    merged = _merged(sources)
    try:
        return Config(**merged)
    except ValidationError as error:
        origin = {key: source for source, values in sources for key in values}
        raise ValueError(_validation_message(error, merged, origin)) from None


def _unknown_key_advice(key: str) -> str:
    """Returns advice for an unknown key."""
    text = maxtext_advice(key)
    if text is not None:
        return f" MaxText has it. {text}"
    return f"{_did_you_mean(key, Config.model_fields)} `jaxpipe train --keys` lists them all."


def _did_you_mean(name: str, valid: Mapping[str, Any]) -> str:
    near = get_close_matches(name[:80], valid, n=1)
    return f" Did you mean `{near[0]}`?" if near else ""


def _validation_message(
    error: ValidationError, values: ConfigValues, origin: Mapping[str, str]
) -> str:
    """Formats a validation error with one line for each wrong key or failed check across keys."""
    lines: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        key = str(detail["loc"][0]) if detail["loc"] else ""
        start = f"`{key}` is {short_repr(values[key])} (from {origin[key]}). " if key else ""
        inside = _source_path(detail["loc"][1:]) if key.endswith("data_sources") else ""
        lines.setdefault(start + inside, []).append(detail["msg"].removeprefix("Value error, "))
    problems = [start + _expected_value(messages) for start, messages in lines.items()]
    rest = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
    return "\n".join([*problems[:_MAX_PROBLEMS], *rest])


def _source_path(path: tuple[int | str, ...]) -> str:
    """Formats the path of a wrong value in a list of sources: "`[0].files`: "."""
    names = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"`{names}`: " if names else ""


def _expected_value(messages: Sequence[str]) -> str:
    """Joins Pydantic's "Input should be 'auto'", "Input should be a bool" into one sentence."""
    start = "Input should be "
    first, *rest = dict.fromkeys(messages[:_MAX_PROBLEMS])
    expected = " or ".join([first, *(message.removeprefix(start) for message in rest)])
    return expected.replace(start, "It should be ").removesuffix(".") + "."
