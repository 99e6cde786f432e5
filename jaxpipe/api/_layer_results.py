"""What a layer returns: x, and auxiliary losses and metrics."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._losses import check_metrics


def x_and_aux(
    returned: Any, x: PyTree, *, may_change_x: bool = False
) -> tuple[PyTree, dict[str, Any]]:
    """Returns the result of a layer as (x, auxiliary scalars), given the x before it.

    A pair that has the structure of that x is x. `may_change_x` allows an x of another structure.
    """
    is_like_x = jax.tree.structure(returned) == jax.tree.structure(x)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    has_aux = is_pair and isinstance(returned[1], Mapping | None)
    if may_change_x and has_aux and not returned[1]:  # an x may end with an empty dict of skips
        has_aux = jax.tree.structure(returned[0]) == jax.tree.structure(x)
    if is_like_x or (may_change_x and not has_aux):
        return returned, {}
    if not is_pair:
        shapes = (str(jax.tree.map(jnp.shape, tree)) for tree in (returned, x))
        raise ValueError(
            f"`layer` returned {next(shapes)} and was given {next(shapes)} (shapes). {_LAYER_FORMS}"
        )
    y, aux = returned
    if not has_aux:
        raise ValueError(f"`layer` returned {type(aux).__name__} behind x. {_LAYER_FORMS}")
    scalars = dict(aux or {})
    try:
        check_metrics(scalars, "layer")
    except ValueError as error:
        hint = " If the pair is x, return a dict or a list in its place." if may_change_x else ""
        raise ValueError(f"{error}{hint}") from None
    return y, scalars


_LAYER_FORMS = (
    "Return x, of the same structure and shapes, or (x, aux) with a dict of scalars by name: "
    "auxiliary losses and metrics. A layer that changes x is a kind of its own: give a dict as "
    "`Model.layer`."
)
