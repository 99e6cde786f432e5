"""What a program does beside computing its outputs, in the words of who wrote it."""

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params


def effects_of(closed: ClosedJaxpr) -> list[str]:
    """Returns what in a program does more than compute its outputs, by the names of primitives."""
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
