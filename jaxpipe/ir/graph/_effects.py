"""Lists the side effects of a program by the names of the functions that users call."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from ..._compat import ClosedJaxpr, jaxprs_in_params


def effects_of(closed: ClosedJaxpr, *, prints: bool = False) -> list[str]:
    """Returns, in backticks, the functions with side effects of a program; `prints` allows some."""
    refused = [e for e in closed.effects if not _is_allowed(e, prints)]
    if not refused:
        return []
    return list(dict.fromkeys(_with_effects(closed.jaxpr, prints))) or [str(e) for e in refused]


def is_print(equation: JaxprEqn) -> bool:
    """Returns whether an equation, or something that it calls, prints or calls back unordered."""
    return any(map(_is_unordered_print, equation.effects))


def _is_unordered_print(effect: Any) -> bool:
    return type(effect).__name__ == "DebugEffect"


def _is_allowed(effect: Any, prints: bool) -> bool:
    is_axis = type(effect).__name__ == "NamedAxisEffect"
    return is_axis or (prints and _is_unordered_print(effect))


def _with_effects(jaxpr: Jaxpr, prints: bool) -> Iterator[str]:
    for equation in jaxpr.eqns:
        inner = [f for j in jaxprs_in_params(equation.params) for f in _with_effects(j, prints)]
        yield from inner
        if not inner and not all(_is_allowed(e, prints) for e in equation.effects):
            name = equation.primitive.name
            name = _EFFECTS.get(name, name)
            is_ordered = any(type(e).__name__ == "OrderedDebugEffect" for e in equation.effects)
            yield f"`{name}(ordered=True)`" if is_ordered else f"`{name}`"


_EFFECTS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "io_callback": "jax.experimental.io_callback",
    "check": "checkify.check",
}
