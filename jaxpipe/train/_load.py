"""One config from many sources, weakest first: base.yml, the model's preset, files, overrides."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ._config import Config

Values = dict[str, Any]


def load_config(
    files: Sequence[str | PathLike[str]] = (),
    overrides: Sequence[str] = (),
    *,
    presets: Mapping[str, Mapping[str, Any]],
) -> Config:
    """Reads a config.

    From weak to strong: base.yml, the preset that `model_name` names (which may itself come from a
    file or an override), the files in order, the overrides in order.

    Args:
        files: YAML files, each a mapping from keys to values.
        overrides: `key=value` strings; the value is YAML.
        presets: Values of each model by its name.

    Raises:
        ValueError: If a file is not a YAML mapping, a key or model is unknown, or a value has the
            wrong type or range; all wrong values at once, each with where it came from.
    """
    base = parse_yaml(base_yaml(), "base.yml")
    given = [(fspath(file), _read(Path(file))) for file in files]
    given += [("the command line", parse_override(text)) for text in overrides]

    name = _merged([("base.yml", base), *given])["model_name"]
    preset = _preset(name, presets)
    return _checked([("base.yml", base), (f"the preset {name!r}", preset), *given])


def base_yaml() -> str:
    """The text of base.yml: every key, its default and what it means."""
    return resources.files("jaxpipe.train").joinpath("base.yml").read_text(encoding="utf-8")


def parse_override(text: str) -> Values:
    """`key=value` as a mapping with one key. No value at all is the empty string."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"The override {text!r} is not `key=value`, such as `steps=10`.")
    return {key: _load(value, f"the override {text!r}") if value.strip() else ""}


def parse_yaml(text: str, source: str) -> Values:
    """A YAML mapping. `source` names it in errors."""
    values = _load(text, source)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{source} holds a {type(values).__name__}. Write `key: value` lines.")
    return {str(key): value for key, value in values.items()}


def _read(file: Path) -> Values:
    if not file.is_file():
        raise ValueError(f"`files` names {fspath(file)!r}, which is not a file.")
    return parse_yaml(file.read_text(encoding="utf-8"), fspath(file))


def _preset(name: Any, presets: Mapping[str, Mapping[str, Any]]) -> Values:
    if not isinstance(name, str) or name not in presets:
        valid = ", ".join(sorted(presets))
        raise ValueError(
            f"`model_name` is {name!r}.{_nearest(str(name), presets)} Models: {valid}."
        )
    return dict(presets[name])


def check_values(values: Values, source: str) -> None:
    """Raises ValueError if some keys' values are wrong, or do not fit together."""
    _checked([(source, values)])


def _merged(sources: Sequence[tuple[str, Values]]) -> Values:
    return {key: value for _, values in sources for key, value in values.items()}


def _checked(sources: Sequence[tuple[str, Values]]) -> Config:
    for source, values in sources:
        for key in values:
            if key not in Config.model_fields:
                raise ValueError(
                    f"{source} sets `{key}`, which is no key.{_nearest(key, Config.model_fields)} "
                    "`jaxpipe train --keys` lists them all."
                )
    merged = _merged(sources)
    try:
        return Config(**merged)
    except ValidationError as error:
        origin = {key: source for source, values in sources for key in values}
        raise ValueError(_message(error, merged, origin)) from None


def _nearest(name: str, valid: Mapping[str, Any]) -> str:
    near = get_close_matches(name, valid, n=1)
    return f" Did you mean `{near[0]}`?" if near else ""


def _message(error: ValidationError, values: Values, origin: Mapping[str, str]) -> str:
    """One line for each wrong key, or for what does not fit together."""
    lines: dict[str, list[str]] = {}
    for detail in error.errors():
        key = str(detail["loc"][0]) if detail["loc"] else ""
        start = f"`{key}` is {values[key]!r} (from {origin[key]}). " if key else ""
        inside = _inside(detail["loc"][1:]) if key.endswith("data_sources") else ""
        lines.setdefault(start + inside, []).append(detail["msg"].removeprefix("Value error, "))
    return "\n".join(start + _wish(messages) for start, messages in lines.items())


def _inside(path: tuple[int | str, ...]) -> str:
    """Where in a list of sources something is wrong: "`[0].files`: "."""
    names = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"`{names}`: " if names else ""


def _wish(messages: Sequence[str]) -> str:
    """Pydantic's "Input should be 'auto'", "Input should be a bool" as one sentence."""
    start = "Input should be "
    first, *others = messages
    expected = " or ".join([first, *(message.removeprefix(start) for message in others)])
    return expected.replace(start, "It should be ").removesuffix(".") + "."


class _Loader(yaml.SafeLoader):
    """Safe YAML with two changes: 1e-3 is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key}` stands there twice; keep one", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 wants a dot and a sign in a float's exponent and reads 1e-3 and 2.5e4 as strings.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _load(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain data only
    except yaml.constructor.ConstructorError as error:
        raise ValueError(f"{source}: {_refusal(error)}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from None


def _refusal(error: yaml.constructor.ConstructorError) -> str:
    if "determine a constructor" in (error.problem or ""):
        return (
            f"{error.problem}. A config is plain data; tags that would make Python objects are "
            "refused. Remove the tag."
        )
    line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
    return f"{error.problem}{line}."
