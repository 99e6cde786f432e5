"""Lists the side effects of a program by the names of the functions that users call."""

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params


def effects_of(closed: ClosedJaxpr) -> list[str]:
    """Returns the names of the functions that give a program side effects.

    Args:
        closed: The program.

    Returns:
        Names in backticks such as "`jax.debug.print`", each once; empty if the program is pure.
    """
    if all(type(e).__name__ == "NamedAxisEffect" for e in closed.effects):
        return []
    return list(dict.fromkeys(_with_effects(closed.jaxpr))) or [str(e) for e in closed.effects]


def _with_effects(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        inner = [f for j in jaxprs_in_params(equation.params) for f in _with_effects(j)]
        yield from inner
        if equation.effects and not inner:
            yield _EFFECTS.get(equation.primitive.name, f"`{equation.primitive.name}`")


_EFFECTS = {
    "debug_print": "`jax.debug.print`",
    "debug_callback": "`jax.debug.callback`",
    "io_callback": "`jax.experimental.io_callback`",
    "check": "`checkify.check`",
}
