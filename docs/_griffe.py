"""Lets the API reference show the examples of docstrings as code.

A docstring names its example `Example:`, as Google's style does. The parser knows only `Examples:`
as a section of code, and would show the other as prose.
"""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Renames the section `Example:` of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
