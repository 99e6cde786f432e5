"""Reads YAML as plain data, within bounds.

It follows YAML 1.1 where common configs rely on it (`yes`, `1_000`), and not where that surprises:
`10:12` is text and not 612, `010` is ten and not eight, `2026-01-01` is text, `1e-3` is a number,
and a key that is given twice is an error.
"""

import json
import re
from collections.abc import Collection
from typing import Any

import yaml

from ..._input import MEGABYTE, short_repr

MAX_YAML_BYTES = MEGABYTE
"""The most bytes of one text. The parser needs some 15 seconds for a text of that size."""

_MAX_NODES = 500_000
"""The most scalars, lists and mappings of one text, counted again wherever an alias repeats one."""

_NULL, _BOOL, _INT, _FLOAT, _TEXT, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "merge")
)


def load_yaml(text: str, source: str, *, text_keys: Collection[str] = ()) -> Any:
    """Parses YAML as plain data: None for the empty text, else a scalar, a list or a dict."""
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"{source} has {len(text):,} characters. Give at most {MAX_YAML_BYTES:,}.")
    try:
        loader = _Loader(text)  # a SafeLoader: plain data only
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_nodes(node, {}, frozenset()) > _MAX_NODES:
            raise ValueError(
                f"{source} repeats itself by aliases more than {_MAX_NODES:,} times. Write less."
            )
        _tag_numbers_as_text(node, text_keys)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply. A config has a few levels.") from None
    except yaml.constructor.ConstructorError as error:
        raise ValueError(f"{source}: {_describe_constructor_error(error)}") from None
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {_describe_syntax_error(error)}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from None


def to_yaml(value: Any) -> str:
    """Formats plain data as one line that `load_yaml` reads back.

    Example:
        >>> to_yaml("auto"), to_yaml("1"), to_yaml([1e-5, None])
        ('auto', '"1"', '[1e-05, null]')
    """
    is_word = isinstance(value, str) and re.fullmatch(r"\w[\w./:-]*", value)
    if is_word and load_yaml(value, "a value") == value:
        return value
    return json.dumps(value, ensure_ascii=False)


class _Loader(yaml.SafeLoader):
    """A loader of safe YAML that reads numbers as people write them."""

    yaml_implicit_resolvers = {  # noqa: RUF012, as its parent has it
        first: [(tag, regexp) for tag, regexp in resolvers if tag in (_NULL, _BOOL, _MERGE)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"{short_repr(key.value)} is given twice; keep one",
                        key.start_mark,
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_number_or_bool(self, node: yaml.ScalarNode) -> int | float | bool:
        """Returns the value of a scalar with one of these tags, which may still not fit its tag."""
        try:
            if node.tag == _BOOL:
                return self.construct_yaml_bool(node)
            if node.tag == _FLOAT:
                return self.construct_yaml_float(node)
            digits = str(node.value).replace("_", "")
            return int(digits, 0 if digits.lstrip("+-")[:2] in ("0x", "0b", "0o") else 10)
        except (ValueError, KeyError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{short_repr(node.value)} cannot be read as {kind}", node.start_mark
            ) from None


_Loader.add_implicit_resolver(
    _INT,
    re.compile(r"[-+]?(0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"([-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
        r"|\.(nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)
# No dates, bytes and sets: no key takes one.
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "str", "seq", "map")
} | dict.fromkeys((_INT, _FLOAT, _BOOL), _Loader.construct_number_or_bool)


def _count_nodes(node: yaml.Node, counts: dict[int, int], ancestors: frozenset[int]) -> int:
    """Counts the nodes of a tree; returns more than `_MAX_NODES` if it contains itself."""
    if id(node) in ancestors:
        return _MAX_NODES + 1
    if id(node) not in counts:
        ancestors = ancestors | {id(node)} if not isinstance(node, yaml.ScalarNode) else ancestors
        children = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        counts[id(node)] = 1 + sum(_count_nodes(child, counts, ancestors) for child in children)
    return counts[id(node)]


def _tag_numbers_as_text(node: yaml.Node, keys: Collection[str]) -> None:
    """Tags numbers of these keys of the outermost mapping as text."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value in keys and value.tag in (_INT, _FLOAT):
            value.tag = _TEXT


def _describe_syntax_error(error: yaml.MarkedYAMLError) -> str:
    """Describes the problem and its line, without the text around it."""
    mark = error.problem_mark or error.context_mark
    position = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    return f"{problem}{position}."


def _describe_constructor_error(error: yaml.constructor.ConstructorError) -> str:
    if "determine a constructor" in (error.problem or ""):
        return (
            f"{error.problem}. A config is plain data; tags that would make Python objects are "
            "refused. Remove the tag."
        )
    line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
    return f"{error.problem}{line}."
