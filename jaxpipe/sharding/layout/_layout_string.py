"""The number of layers of each stage, in Megatron's notation: `Et*3|t*4|t*4|t*3L`.

`|` ends a stage, `t` is a layer, `m` one that predicts further tokens, `E` the embedding and `L`
the loss. `x*3` and `(xy)*3` repeat, and commas mean nothing.
"""

import re
from collections.abc import Iterable
from typing import Any

from ..._input import short_repr

_MAX_LETTERS = 100_000
"""The most letters of a layout after its repetitions are expanded."""

_REPEATED = re.compile(r"([A-Za-z]|\([^()]*\))\*(\d+)(?![\d*])")


def parse_layout(text: str, *, mtp_layers: bool = False) -> tuple[int, ...]:
    """Parses a layout string to the number of layers per stage.

    Args:
        text: The layout, such as `Et*3|t*4|t*4|t*3L`: E is the embedding, t a layer, L the loss,
            and | separates stages; x*n and (xy)*n repeat.
        mtp_layers: Whether the model has layers that predict further tokens (MTP), m, behind all
            others.

    Returns:
        [num_stages] the number of layers of each stage, t and m, in forward order.

    Raises:
        ValueError: If the text has other signs, does not begin with E or end with L, if a stage in
            the middle is empty, or if t follows m.

    Example:
        >>> parse_layout("Et|t*2|tL")
        (1, 2, 1)
    """
    prefix = f"`pipeline_layout` is {short_repr(text)}"
    try:
        inner = _expanded(text)
    except OverflowError:
        raise ValueError(
            f"{prefix}, which has more than {_MAX_LETTERS} layers and stages. "
            "Give smaller numbers behind *."
        ) from None
    stages = inner.split("|")
    if set(inner) - set("EtL|m"):
        raise ValueError(
            f"{prefix}. Give E, then t for every layer with | between stages, "
            "then L, such as 'Et*3|t*4|t*4|t*3L'; x*n and (xy)*n repeat."
        )
    if "m" in inner and not mtp_layers:
        raise ValueError(
            f"{prefix}, and m is a layer that predicts further tokens, which "
            "no model here has. Leave it out."
        )
    if inner.count("E") != 1 or inner.count("L") != 1 or inner[0] + inner[-1] != "EL":
        raise ValueError(
            f"{prefix}. The first stage begins with the one E, the embedding, "
            "and the last one ends with the one L, the loss."
        )
    if "m" in inner and inner.index("m") < inner.rfind("t"):
        raise ValueError(f"{prefix}, where t follows m. Give m behind all t.")
    empty = [number for number, stage in enumerate(stages) if not stage]
    if empty:
        raise ValueError(
            f"{prefix}, where stage {empty[0]} has no layer. Only the stages "
            "of E and of L may have none."
        )
    return tuple(stage.count("t") + stage.count("m") for stage in stages)


def layers_of_stages(given: Any) -> tuple[int, ...]:
    """Reads the layers of every stage, as `jaxpipe.pipeline` takes them.

    Args:
        given: [num_stages] numbers, or a layout string, which may have layers m.

    Returns:
        [num_stages] the number of layers of each stage, in forward order.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(given, str):
        return parse_layout(given, mtp_layers=True)
    counts = tuple(given) if isinstance(given, Iterable) else ()
    if not counts or not all(hasattr(n, "__index__") and n >= 0 for n in counts):
        raise ValueError(f"`layers_per_stage` is {given}. Give the number of layers of each stage.")
    return counts


def count_mtp_layers(text: str) -> int:
    """Returns the number of layers m of a layout string that `parse_layout` accepts."""
    return _expanded(text).count("m")


def _expanded(text: str) -> str:
    """Expands repetitions, the innermost first."""
    text = re.sub(r"[,\s]", "", text)
    while (match := _REPEATED.search(text)) is not None:
        once = match[1].strip("()")
        if len(match[2]) > 6 or len(text) + len(once) * int(match[2]) > _MAX_LETTERS:
            raise OverflowError
        text = text[: match.start()] + once * int(match[2]) + text[match.end() :]
    return text
