"""Compares a function of all rows with the same function of a block of rows."""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from ._control import CONTROL
from ._relations import Mixed, Relation
from ._walk import ANOTHER_PROGRAM, Walk


def compare(
    whole: ClosedJaxpr,
    part: ClosedJaxpr,
    relations: Sequence[Relation],
    num_blocks: int,
    *,
    draws: dict[tuple[int, ...], set[int | None]] | None = None,
) -> list[Relation]:
    """Returns the relations of the results of a function.

    `draws` collects the shapes of random bits that a block draws by one key, with their dims of
    rows. The relations are then those of a function that draws for the block what all rows would
    draw.
    """
    used_outputs = [True] * len(whole.jaxpr.outvars)
    if len(used_outputs) != len(part.jaxpr.outvars):
        return [Mixed(ANOTHER_PROGRAM)] * len(used_outputs)
    a, b = (_without_dead(closed, used_outputs) for closed in (whole, part))
    return Walk(num_blocks, CONTROL, draws).of_jaxprs(a, b, relations)


def _without_dead(closed: ClosedJaxpr, used_outputs: list[bool]) -> ClosedJaxpr:
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used_outputs, instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)
