"""Tabulates the settings of a run, and their difference from the defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..models import PRESETS
from ..train.config import key_defaults, key_meanings


@dataclass(frozen=True)
class Setting:
    """A key of a run."""

    key: str
    value: str  # its value in the run
    default: str
    # The origin of the value: `preset` for the model's preset, `run` for another value, "" for the
    # default, `unknown` for a key that this version does not have.
    source: str
    meaning: str


def settings(values: Mapping[str, Any]) -> list[Setting]:
    """Compares each setting of a run with its default."""
    defaults, meanings = key_defaults(), key_meanings()
    preset = PRESETS.get(str(values.get("model_name")), {})
    rows = []
    for key, value in values.items():
        if key not in defaults:
            source = "unknown"
        elif value == defaults[key]:
            source = ""
        else:
            source = "preset" if key in preset and preset[key] == value else "run"
        default = _text(defaults[key]) if key in defaults else ""
        rows.append(Setting(key, _text(value), default, source, meanings.get(key, "")))
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if value == "":
        return '""'
    return repr(value) if isinstance(value, list | dict) else str(value)
